"""A table of plain values into the `Config`, strictly, with every fault of it at once.

cattrs walks the dataclasses; the hooks here let no value change its type and no key go unknown. The hazard is
silent coercion (`steps = 3.7` read as 3, "no" as true): a value has the field's type or is a fault; only an
integer may stand where a float is wanted. Imports no torch.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, cast, get_args, get_origin

import cattrs
from cattrs.cols import list_structure_factory
from cattrs.errors import ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn

from stretto.config import Config

__all__ = ["Misread", "field_types", "nearest", "structure", "wants"]

Path = tuple[str, ...]


class Misread(NamedTuple):
    """A place of the table that could not be read, and the line for the user."""

    path: Path
    text: str


def structure(table: dict[str, Any]) -> tuple[Config, list[Misread]]:
    """The config of what can be read, with defaults for the rest; and what cannot."""
    try:
        return _CONVERTER.structure(table, Config), []
    except cattrs.BaseValidationError as error:
        misread = list(_misread(error, ()))
    readable = _without(table, {fault.path for fault in misread}, ())
    return _CONVERTER.structure(readable, Config), misread


def field_types() -> dict[str, Any]:
    """`section.field` to its type; the fields of a list's tables stand under the list's name."""
    found: dict[str, Any] = {}
    for section, kind in typing.get_type_hints(Config).items():
        table = get_args(kind)[0] if get_origin(kind) is list else kind
        found |= {f"{section}.{field}": field_kind for field, field_kind in typing.get_type_hints(table).items()}
    return found


def wants(kind: Any) -> str:
    """What a type takes, in a user's words."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(kind)) + " is wanted"
    if get_origin(kind) is list:
        return "a list is wanted"
    if get_origin(kind) is types.UnionType:
        return wants(get_args(kind)[0])
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    return words.get(kind, "a table") + " is wanted"


def nearest(key: str) -> str:
    """What was probably meant by an unknown key: the nearest known one, or all that are known there."""
    key = ".".join(part for part in key.split(".") if not part.isdecimal())
    section, _, field = key.rpartition(".")
    known = list(field_types())
    sections = list(dict.fromkeys(name.partition(".")[0] for name in known))
    siblings = [name for name in known if section and name.partition(".")[0] == section]
    candidates = [name for name in known if name.partition(".")[2] == field]
    if not section:
        candidates = difflib.get_close_matches(key, sections, n=1) + candidates
    close = difflib.get_close_matches(field, [name.partition(".")[2] for name in siblings], n=1)
    candidates += [f"{section}.{name}" for name in close]
    candidates += difflib.get_close_matches(key, known, n=1)
    if candidates:
        return f"did you mean {candidates[0]}?"
    return "known: " + ", ".join([name.partition(".")[2] for name in siblings] or sections)


def _misread(error: BaseException, path: Path) -> Iterator[Misread]:
    """cattrs' tree of exceptions, flat; a note on each tells the field or the index that it stands for."""
    if isinstance(error, cattrs.BaseValidationError):
        for inner in error.exceptions:
            yield from _misread(inner, path + _step(inner))
    elif isinstance(error, ForbiddenExtraKeysError):
        for key in sorted(error.extra_fields):
            full = ".".join([*path, key])
            yield Misread((*path, key), f"{full}: unknown key; {nearest(full)}")
    else:
        yield Misread(path, f"{'.'.join(path)} = {error}")


def _step(error: BaseException) -> Path:
    for note in getattr(error, "__notes__", []):
        if isinstance(note, cattrs.AttributeValidationNote):
            return (note.name,)
        if isinstance(note, cattrs.IterableValidationNote):
            return (str(note.index),)
    return ()


def _without(value: Any, gone: set[Path], path: Path) -> Any:
    """The table without the places in `gone`; a list loses the items there."""
    if isinstance(value, dict):
        places = {key: (*path, key) for key in value}
        return {key: _without(value[key], gone, place) for key, place in places.items() if place not in gone}
    if isinstance(value, list):
        numbered = [((*path, str(index)), item) for index, item in enumerate(value)]
        return [_without(item, gone, place) for place, item in numbered if place not in gone]
    return value


def _scalar(kind: type) -> Any:
    def hook(value: Any, _: type) -> Any:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        raise TypeError(f"{_shown(value)}: {wants(kind)}")

    return hook


def _choice(value: Any, kind: Any) -> Any:
    choices = get_args(kind)
    if value in choices:
        return value
    close = difflib.get_close_matches(str(value), choices, n=1)
    raise ValueError(f"{_shown(value)}: {wants(kind)}" + (f'; did you mean "{close[0]}"?' if close else ""))


def _container(kind: Any, python_type: type, fill: Any) -> Any:
    def hook(value: Any, _: type) -> Any:
        if not isinstance(value, python_type):
            raise TypeError(f"{_shown(value)}: {wants(kind)}")
        return fill(value, kind)

    return hook


def _table(kind: Any, converter: cattrs.Converter) -> Any:
    return _container(kind, dict, make_dict_structure_fn(kind, converter, _cattrs_forbid_extra_keys=True))


def _list(kind: Any, converter: cattrs.Converter) -> Any:
    return _container(kind, list, list_structure_factory(kind, converter))


def _shown(value: Any) -> str:
    """A value as TOML writes it, cut where it is long."""
    text = str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter(detailed_validation=True)
    for kind in (int, float, bool, str):
        converter.register_structure_hook(kind, _scalar(kind))
    converter.register_structure_hook_func(lambda kind: get_origin(kind) is Literal, _choice)
    converter.register_structure_hook_factory(lambda kind: get_origin(kind) is list, _list)
    converter.register_structure_hook_factory(cast(Any, dataclasses.is_dataclass), _table)
    return converter


_CONVERTER = _make_converter()
