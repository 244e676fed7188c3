"""Rewards and judges: media and prompts in, numbers out. Loading one by name is all that happens here.

A reward is a plain function `f(media, prompts, **metadata)` that returns one number a sample; a judge is a
plain function `g(media, prompts)` that returns named figures over all samples. The hazard of loading by name
is that the code of the named module or file runs: name only what you would run. Imports nothing heavy until
asked.
"""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["JUDGES", "REWARDS", "load_judge", "load_reward"]

REWARDS = {
    "brightness": "stretto.rewards.brightness:brightness",
    "digits": "stretto.rewards.digits:digits",
}
"""Shipped rewards: name -> module:function."""
JUDGES = {"digits": "stretto.rewards.digits_judge:digits_judge"}
"""Shipped judges: name -> module:function."""


def load_reward(spec: str) -> Callable[..., Any]:
    """The reward function called `spec`, ready for `stretto.rewards.scoring.score`.

    Args:
        spec: a shipped name (`digits`, `brightness`), `package.module:function`, `path/to/file.py:function`, or the
        address of a service (`http://host:port/path`, see `stretto.rewards.remote`), which is not asked yet.

    Raises:
        ValueError: in one line, an unknown name (with the nearest known), or a module, file or function that
            is missing, cannot be imported or cannot be called, or an address that is none.
    """
    if "://" in spec:
        from stretto.rewards.remote import RemoteReward

        return RemoteReward(spec)
    return _load(spec, "reward", REWARDS)


def load_judge(spec: str) -> Callable[..., dict[str, float]]:
    """The judge function called `spec`: the shipped `digits`, or a function as for `load_reward`.

    A judge takes media (B, ...) in [0, 1] and B prompts and returns a dict of numbers. Raises as
    `load_reward`, and for an address: only rewards are asked elsewhere.
    """
    if "://" in spec:
        raise ValueError(f"judge {spec!r} is an address; a judge is a function, only a reward may be a service")
    return _load(spec, "judge", JUDGES)


def _load(spec: str, kind: str, shipped: dict[str, str]) -> Callable[..., Any]:
    place, colon, name = shipped.get(spec, spec).rpartition(":")
    if not colon or not place or not name:
        near = difflib.get_close_matches(spec, shipped, n=3, cutoff=0.4) or sorted(shipped)
        elsewhere = ", a service's http://host:port/path" if kind == "reward" else ""
        raise ValueError(
            f"unknown {kind} {spec!r}; did you mean {' or '.join(near)}? "
            f"Your own is written package.module:function or path/to/file.py:function{elsewhere}"
        )
    module = _module_of_file(place, kind) if place.endswith(".py") else _module(place, kind)
    function = getattr(module, name, None)
    if function is None:
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"{kind} {spec!r}: {place} has no function {name!r}{hint}")
    if not callable(function):
        raise ValueError(f"{kind} {spec!r}: {name} is {type(function).__name__}, not a function")
    loaded: Callable[..., Any] = function
    return loaded


def _module(place: str, kind: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except Exception as error:
        if isinstance(error, ImportError) and place.startswith("stretto.rewards."):
            raise ValueError(f'{_one_line(error)}; run: pip install "stretto[train]"') from error
        raise ValueError(f"{kind} module {place!r} cannot be imported: {_one_line(error)}") from error


def _module_of_file(place: str, kind: str) -> ModuleType:
    """Runs a file as a module of its own; the same file gives the same module the second time."""
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"{kind} file {place} does not exist (looked for {path})")
    name = f"stretto_{kind}_file_{path}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{kind} file {place} cannot be run: {_one_line(error)}") from error
    return module


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
