"""Recipes: TOML in, a `Config` out, and back, every fault told at once.

`load_recipe` reads the TOML strictly, lays `--section.field value` overrides over it (tyro) and checks the
values; whatever is wrong at any of the three comes in one `RecipeError`, each line with the key, the value
and the way out. The hazard is a recipe that comes back changed: `load_recipe` and `dump_recipe` are inverse,
None being written by omission. Imports no torch.
"""

import contextlib
import dataclasses
import io
import itertools
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w
import tyro

from stretto import strict
from stretto.config import Config
from stretto.faults import Fault, value_faults
from stretto.prompts import looked_for

__all__ = ["RecipeError", "dump_recipe", "load_recipe", "settings_help", "validate"]


class RecipeError(ValueError):
    """A recipe that cannot be run; `faults` holds one line for each thing to mend."""

    def __init__(self, source: str, faults: list[str]) -> None:
        self.faults = faults
        lines = faults if len(faults) == 1 else [f"{len(faults)} faults", *(f"  {fault}" for fault in faults)]
        super().__init__(f"{source}: " + "\n".join(lines))


def load_recipe(path: Path, overrides: list[str]) -> Config:
    """Read a recipe, apply the overrides, check every value.

    Relative paths in a recipe stay as they are: they are of the current directory, not of the recipe's.
    path: a TOML file with one table a section. overrides: command-line words, `["--sampling.steps", "4"]`;
    they win over the file. Raises `RecipeError` with all the faults of the file, the overrides and the
    values.
    """
    config, misread = strict.structure(_read_toml(path))
    faults = [Fault((".".join(fault.path[:2]),), fault.text) for fault in misread]
    config, override_faults = _override(config, overrides)
    faults += override_faults
    unread = {fault.keys[0] for fault in faults}
    faults += [fault for fault in value_faults(config) if not _touches(fault.keys, unread)]
    if faults:
        raise RecipeError(str(path), [fault.text for fault in faults])
    return config


def dump_recipe(config: Config) -> str:
    """The whole config as TOML; `load_recipe` of it gives an equal config. None is written by omission."""
    return tomli_w.dumps(_without_none(dataclasses.asdict(config)))


def validate(config: Config) -> list[str]:
    """Every fault of the values, one line each, with the value and the way out; empty when it can run."""
    return [fault.text for fault in value_faults(config)]


def settings_help() -> str:
    """Every setting as `--section.field`, with its type, its default and its sentence."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        _parse(Config(), ["--help"])
    return text.getvalue()


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):
        fault = f"there is no such file{looked_for(path)}; give the path of a recipe in TOML"
    except IsADirectoryError:
        fault = "is a folder; give the path of a recipe in TOML"
    except UnicodeDecodeError as error:
        fault = f"is not UTF-8 text (byte {error.start}), as TOML must be"
    except tomllib.TOMLDecodeError as error:
        fault = f"malformed TOML: {error}"
    raise RecipeError(str(path), [fault])


def _touches(keys: tuple[str, ...], unread: set[str]) -> bool:
    """Whether a fault of values speaks of something that was not read, so that it judges a stand-in."""
    return any(
        key == place or key.startswith(f"{place}.") or place.startswith(f"{key}.") for key in keys for place in unread
    )


def _override(config: Config, overrides: list[str]) -> tuple[Config, list[Fault]]:
    """All options at once; where one is wrong one at a time, so that each is named and none hides the next."""
    faults = []
    known = strict.field_types()
    read: list[tuple[str, str, list[str]]] = []
    for option, values in _options(overrides):
        key = option.removeprefix("--").replace("-", "_")
        shown = " ".join([option, *values])
        if not option.startswith("--"):
            faults.append(Fault((key,), f"{option}: overrides read --section.field value"))
        elif key.partition(".")[0] == "rewards":
            faults.append(Fault((key,), f"{shown}: rewards are set in the recipe alone, as [[rewards]]"))
        elif key not in known:
            faults.append(Fault((key,), f"{shown}: unknown setting; {strict.nearest(key)}"))
        else:
            read.append((shown, key, [f"--{key}", *values]))
    with contextlib.suppress(SystemExit):
        return _parse(config, [word for _, _, words in read for word in words]), faults
    for shown, key, words in read:
        try:
            config = _parse(config, words)
        except SystemExit:
            faults.append(Fault((key,), f"{shown}: {strict.wants(known[key])}"))
    return config, faults


def _options(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each `--section.field` (or `--section.field=value`) with the words up to the next one."""
    starts = [0, *(index for index, word in enumerate(words) if index and word.startswith("--")), len(words)]
    for start, end in itertools.pairwise(starts):
        if start < end:
            option, equals, value = words[start].partition("=")
            yield option, ([value] if equals else []) + words[start + 1 : end]


def _parse(default: Config, words: list[str]) -> Config:
    """tyro over a config; exits, saying nothing, where a word does not fit."""
    words = [{"true": "True", "false": "False"}.get(word, word) for word in words]
    with contextlib.redirect_stderr(io.StringIO()):
        return tyro.cli(
            Config,
            default=default,
            args=words,
            prog="stretto train RECIPE.toml",
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff,),
        )


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_none(inner) for inner in value]
    return value
