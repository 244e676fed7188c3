"""Name patterns of a plan, resolved to the modules they mean before anything is changed.

A pattern has the parts of a module's name, each of which may hold `*`. The hazard: a pattern that misses
leaves a layer whole, and the result wrong; so every pattern must match, and nothing may be matched twice, but
for styles that only hook a module and may come `BESIDE` another pattern's.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor import DTensor

from stretto.overlap.lora import linear_in, name_of_linear, plain_names, plain_pattern

__all__ = ["Match", "match_plan"]

BESIDE = ("rows", "rows split")
_NUMBERED = ("row", "modulation")
_JOINING = ("column", "column whole")


@dataclass(frozen=True)
class Match:
    """One module, or the column layers that share a gather, and the style that a plan has for them."""

    pattern: str
    names: tuple[str, ...]
    style: str
    follower: str = ""
    """The module behind whose forward a row layer's last half hides."""
    numbers: tuple[int, ...] = ()
    """The proportions of the blocks that a row layer's input features come in; or which outputs are meant."""
    rows: tuple[tuple[str, ...], ...] = ()
    """The sequences that the rows of each input are of: ("text", "image") where theirs lie side by side."""


def match_plan(
    module: nn.Module, plan: Mapping[str, str], styles: Mapping[str, type | tuple[type, ...]]
) -> list[Match]:
    """Every match of every pattern, or `ValueError`.

    `styles` names the styles and the exact classes of module that each is for; (nn.Module,) is any.
    """
    if not plan:
        raise ValueError("the plan is empty; name the modules that become parallel, as LLAMA does")
    wrong = [pattern for pattern in plan if not isinstance(pattern, str)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is no name pattern; a plan maps names of modules to styles")
    full_names = plain_names(module)
    modules = {name: module.get_submodule(full) for name, full in full_names.items()}
    found: list[Match] = []
    taken: dict[str, str] = {}
    for pattern, words in plan.items():
        style, numbers, follower, rows = _style(pattern, words, styles)
        first_pattern, *siblings = plain_pattern(pattern).split("+")
        if siblings and style not in _JOINING:
            raise ValueError(
                f"{pattern!r} joins names by +, which is for column layers with one input, not {style!r}"
            )
        matches = [name for name in modules if _matches(name, first_pattern.split("."))]
        if not matches:
            raise ValueError(f"{pattern!r} matches no module; near it are {_near(pattern, modules)}")
        for first in matches:
            parent = first.rpartition(".")[0]
            names = (first, *(f"{parent}.{name}".lstrip(".") for name in siblings))
            for name in names:
                if name not in modules:
                    raise ValueError(f"{pattern!r} names {name!r}, which is no module")
                place = f"{style in BESIDE} {name}"
                if place in taken:
                    raise ValueError(f"{name!r} is matched by {taken[place]!r} and again by {pattern!r}")
                _check_type(name, linear_in(name, modules[name], style), style, styles[style])
                taken[place] = pattern
            full = tuple(name_of_linear(full_names[name], modules[name], style) for name in names)
            behind = _resolved(follower, pattern, first, modules)
            found.append(Match(pattern, full, style, full_names[behind] if behind else "", numbers, rows))
    return found


def _style(
    pattern: str, words: str, styles: Mapping[str, type | tuple[type, ...]]
) -> tuple[str, tuple[int, ...], str, tuple[tuple[str, ...], ...]]:
    """What a plan's words for a pattern say: "STYLE NUMBERS > FOLLOWER @ ROWS", the last three where they belong."""
    if not isinstance(words, str):
        raise ValueError(f"{pattern!r} asks for {words!r}; a style is a string")
    before, at, named = (part.strip() for part in words.partition("@"))
    style, arrow, follower = (part.strip() for part in before.partition(">"))
    numbers: tuple[int, ...] = ()
    first, _, last = style.rpartition(" ")
    if style not in styles and first in _NUMBERED and all(part.isdecimal() for part in last.split("+")):
        style, numbers = first, tuple(int(part) for part in last.split("+"))
    if style not in styles or (style == "row" and 0 in numbers):
        raise ValueError(f"{pattern!r} asks for {words!r}; the styles are {', '.join(map(repr, styles))}")
    if arrow and (style != "row" or not follower):
        raise ValueError(f"{pattern!r} asks for {words!r}; a follower is written 'row > its name'")
    rows = tuple(tuple(name.strip() for name in one.split("+")) for one in named.split(",")) if at else ()
    if any(not name for one in rows for name in one):
        raise ValueError(f"{pattern!r} asks for {words!r}; sequences are written '@ image', '@ text+image'")
    return style, numbers, follower, rows


def _check_type(name: str, module: nn.Module, style: str, allowed: type | tuple[type, ...]) -> None:
    classes = allowed if isinstance(allowed, tuple) else (allowed,)
    if nn.Module not in classes and type(module) not in classes:
        wanted = " or ".join(f"nn.{one.__name__}" for one in classes)
        is_parallel = any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False))
        again = ": it is parallel already; parallelize a model once, and before FSDP" if is_parallel else ""
        raise ValueError(f"{name!r} is a {type(module).__name__}, not an {wanted}, which {style!r} is for{again}")


def _resolved(follower: str, pattern: str, name: str, modules: Mapping[str, nn.Module]) -> str:
    """The follower's name: its parts with `*` stand for what the pattern's stood for, in order."""
    if not follower:
        return ""
    stood_for = [part for part, given in zip(name.split("."), pattern.split(".")) if "*" in given]
    parts = follower.split(".")
    if sum("*" in part for part in parts) > len(stood_for):
        raise ValueError(f"follower {follower!r} has more * than {pattern!r}, from which it takes them")
    resolved = ".".join(stood_for.pop(0) if "*" in part else part for part in parts)
    if resolved not in modules:
        near = _near(resolved, modules)
        raise ValueError(f"follower {follower!r} of {name!r} is {resolved!r}, which is no module; near it are {near}")
    return resolved


def _near(pattern: str, modules: Mapping[str, nn.Module]) -> str:
    return (
        ", ".join(difflib.get_close_matches(pattern, [name for name in modules if name], n=3, cutoff=0.3)) or "none"
    )


def _matches(name: str, parts: list[str]) -> bool:
    names = name.split(".")
    return len(names) == len(parts) and all(fnmatchcase(one, part) for one, part in zip(names, parts))
