"""What a checkpoint says of itself in `manifest.json`: its files, its tensors, its plain state, its model.

It is written last, so that a folder without one is no checkpoint; its sizes and SHA-256 tell a file that was cut
short or changed later. That protects from damage, not from malice: whoever can change a file can change its digest.
The hazard is JSON: tuples come back as lists, so plain state is compared and used as JSON gives it back.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "FORMAT",
    "MANIFEST",
    "Damaged",
    "as_json",
    "check_file",
    "compare_identity",
    "plain_json",
    "read_manifest",
]

FORMAT, MANIFEST = 2, "manifest.json"

_KINDS = {"iteration": int, "identity": dict, "files": dict, "tensors": dict, "plain": dict, "world_size": int}
_METADATA = ".metadata"


class Damaged(ValueError):
    """A checkpoint is not what was written."""


def plain_json(value: Any, name: str = "") -> Any:
    """Plain state as JSON gives it back: dicts with string keys, lists, numbers, strings, booleans, None.

    Raises TypeError that names what has no place there.
    """
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise TypeError(f"{name}: the key {key!r} of plain state is no string")
        return {key: plain_json(inner, f"{name}/{key}" if name else key) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(inner, f"{name}/{index}") for index, inner in enumerate(value)]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"{name}: a {type(value).__name__} has no place in a checkpoint's plain state")


def as_json(manifest: dict[str, Any]) -> str:
    """The text of `manifest.json`. NaN and infinities are written as Python reads them back."""
    return json.dumps(manifest, indent=1) + "\n"


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, with every key that is read later.

    Raises `Damaged`, and ValueError for another format.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise Damaged(f"{MANIFEST} is missing or cut short") from None
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise Damaged(f"{MANIFEST} is not a manifest: it names no format")
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {str(manifest['format'])[:20]}, this version reads {FORMAT}; go on with the version "
            "of stretto that wrote it, or move it out of the folder to go on from the checkpoint before it"
        )
    for key, kind in _KINDS.items():
        if type(manifest.get(key)) is not kind:
            raise Damaged(f"{MANIFEST} is not whole: {key} is missing or of a wrong type")
    for name in {_METADATA, *manifest["files"]}:
        expected = manifest["files"].get(name)
        if not isinstance(expected, dict) or not {"bytes", "sha256"} <= expected.keys() or Path(name).name != name:
            raise Damaged(f"{MANIFEST} is not whole: it does not tell the size and SHA-256 of {name[:40]}")
    for name, tensor in manifest["tensors"].items():
        if not isinstance(tensor, dict) or not {"shape", "dtype"} <= tensor.keys():
            raise Damaged(f"{MANIFEST} is not whole: it does not tell the shape and dtype of {name[:40]}")
    return manifest


def check_file(path: Path, expected: dict[str, Any]) -> str | None:
    """What is wrong with a file, by its manifest's entry; None where nothing is."""
    if not path.is_file():
        return f"{path.name} is missing"
    num_bytes = path.stat().st_size
    if num_bytes != expected["bytes"]:
        return f"{path.name} has {num_bytes} bytes, {str(expected['bytes'])[:20]} were written"
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
            return f"{path.name} is not what was written: its SHA-256 differs"
    return None


_ABSENT = object()


def compare_identity(path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise ValueError, with the first differences, where a checkpoint is of another model."""
    differing = list(_differences(there, here))
    if differing:
        more = f" (and {len(differing) - 3} more)" if len(differing) > 3 else ""
        raise ValueError(
            f"{path} is a checkpoint of another model: {'; '.join(differing[:3])}{more}; go on with its own, or in "
            "another run.folder"
        )


def _differences(there: dict[str, Any], here: dict[str, Any]) -> Iterator[str]:
    """A phrase a key whose values differ; of a table the first of its entries that differ, and their number."""
    for key in _differing(there, here):
        one, other = there.get(key, _ABSENT), here.get(key, _ABSENT)
        if isinstance(one, dict) and isinstance(other, dict):
            inner = _differing(one, other)
            one, other = one.get(inner[0], _ABSENT), other.get(inner[0], _ABSENT)
            key = f"{len(inner)} of the {key} differ, first {inner[0][-60:]}"
            yield f"{key}: {_shown(one)} there and {_shown(other)} here"
        else:
            yield f"{key} is {_shown(one)} there and {_shown(other)} here"


def _differing(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    return [key for key in {**here, **there} if there.get(key, _ABSENT) != here.get(key, _ABSENT)]


def _shown(value: Any) -> str:
    text = "absent" if value is _ABSENT else repr(value)
    return text if len(text) <= 30 else f"{text[:27]}..."
