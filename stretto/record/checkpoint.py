"""Checkpoints that are whole or not there, and know of which model they are.

A checkpoint is a folder `iteration-00000020` with `state.safetensors` and, written last, `manifest.json`: the size
and SHA-256 of every file, the iteration, the model's identity and whether it was the best so far. It is made under a
hidden name, flushed, and renamed, so that a kill at any moment leaves the one before it. The hazards: a file cut
short later (found by the manifest, named, and the checkpoint before it taken), a full disk (nothing half-written
stays) and a checkpoint of another model (refused). Nothing is unpickled.
"""

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from stretto.record.atomic import naming, new_file, sync_folder, write_atomic
from stretto.record.tensor_file import read_state, write_state

__all__ = ["Loaded", "best", "load", "load_newest", "newest", "save"]

_NAME = re.compile(r"iteration-(\d{8,})")
_STATE, _MANIFEST = "state.safetensors", "manifest.json"
_PARTIAL, _REPLACED = ".partial-", ".replaced-"


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was read: its iteration and state, and what was wrong with newer ones."""

    iteration: int
    state: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def save(
    folder: Path,
    iteration: int,
    state: dict[str, Any],
    *,
    identity: Mapping[str, Any],
    keep: int = 2,
    is_best: bool = False,
) -> Path:
    """Write the checkpoint after `iteration` finished iterations, then let the oldest go.

    state: see `tensor_file`. identity: plain data that names the model (adapter, shapes, method, ...); `load`
    compares it. keep: newest checkpoints that stay; the last one saved with `is_best` stays beside them. Any
    of a later iteration goes: the run went back behind it. Raises OSError that names the path (a full disk),
    with the older checkpoints untouched.
    """
    final = folder / f"iteration-{iteration:08d}"
    partial = folder / f"{_PARTIAL}{final.name}"
    with naming(final):
        folder.mkdir(parents=True, exist_ok=True)
        _tidy(folder)
        try:
            _write(partial, iteration, state, identity, is_best)
            _take_name(partial, final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        _forget(folder, iteration, keep)
    return final


def load_newest(folder: Path, identity: Mapping[str, Any] | None = None) -> Loaded | None:
    """The newest whole checkpoint; None where there is none at all.

    Damaged ones are passed over, each with a note that names what is wrong. Raises ValueError when all are
    damaged, when one that is newer than all whole ones has a format that this version does not know, and when the
    newest whole one is of another model than `identity`.
    """
    notes: list[str] = []
    for path in newest(folder):
        damage = _damage(path)
        if damage is None:
            return _read(path, identity, [f"{note}; took {path.name}" for note in notes])
        notes.append(f"{path} is damaged ({damage})")
    if notes:
        raise ValueError(f"no checkpoint is whole: {'; '.join(notes)}; start again in another run.folder")
    return None


def load(path: Path, identity: Mapping[str, Any] | None = None) -> Loaded:
    """One checkpoint. Raises ValueError when it is damaged or of another model than `identity`."""
    damage = _damage(path)
    if damage is not None:
        raise ValueError(f"{path} is damaged ({damage})")
    return _read(path, identity, [])


def newest(folder: Path) -> list[Path]:
    """The checkpoints of a folder, whole or not, newest first."""
    found = {}
    for path in _entries(folder):  # one that stepped aside sorts first, and counts where none has its name
        if match := _NAME.fullmatch(path.name.removeprefix(_REPLACED)):
            found[int(match[1])] = path
    return [found[iteration] for iteration in sorted(found, reverse=True)]


def best(folder: Path) -> Path | None:
    """The newest checkpoint that was saved with `is_best`."""
    for path in newest(folder):
        with contextlib.suppress(OSError, ValueError):  # damaged, or of a format to come
            if _manifest(path).get("is_best"):
                return path
    return None


class _Damaged(ValueError):
    """A checkpoint's manifest is not what was written."""


class _Digested:
    """A file that is written and digested in one pass, so that the digest is of what was meant."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest, self.num_bytes = file, hashlib.sha256(), 0

    def write(self, data: Any) -> None:
        self.file.write(data)
        self.digest.update(data)
        self.num_bytes += len(data)


def _read(path: Path, identity: Mapping[str, Any] | None, notes: list[str]) -> Loaded:
    """A checkpoint whose files are known to be whole."""
    manifest = _manifest(path)
    if identity is not None:
        _compare(path, manifest["identity"], _plain(identity))
    with (path / _STATE).open("rb") as file:
        return Loaded(manifest["iteration"], read_state(file), notes)


def _write(partial: Path, iteration: int, state: dict[str, Any], identity: Mapping[str, Any], is_best: bool) -> None:
    partial.mkdir()
    with new_file(partial / _STATE) as file:
        digested = _Digested(file)
        write_state(digested, state)
    manifest = {
        "format": 1,
        "iteration": iteration,
        "identity": _plain(identity),
        "is_best": is_best,
        "files": {_STATE: {"bytes": digested.num_bytes, "sha256": digested.digest.hexdigest()}},
    }
    write_atomic(partial / _MANIFEST, json.dumps(manifest, indent=1) + "\n")


def _take_name(partial: Path, final: Path) -> None:
    """Rename into place. One of the same name steps aside first; `_tidy` brings it back after a kill between."""
    replaced = final.with_name(f"{_REPLACED}{final.name}")
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    sync_folder(final.parent)
    with contextlib.suppress(OSError):
        _remove(replaced)


def _tidy(folder: Path) -> None:
    """Clear away what a kill left behind."""
    for path in _entries(folder):
        if path.name.startswith(_PARTIAL):
            _remove(path)
        elif path.name.startswith(_REPLACED):
            final = path.with_name(path.name.removeprefix(_REPLACED))
            _remove(path) if final.exists() else path.rename(final)


def _forget(folder: Path, iteration: int, keep: int) -> None:
    present = newest(folder)
    later = [path for path in present if int(path.name.rpartition("-")[2]) > iteration]
    best_so_far = best(folder)
    older = [path for path in present if path not in later and path != best_so_far]
    for path in later + older[keep:]:
        gone = path.with_name(f"{_PARTIAL}{path.name}")  # so that a kill leaves none half-deleted under its name
        path.rename(gone)
        _remove(gone)


def _remove(path: Path) -> None:
    """Remove a folder, or whatever else stands under a checkpoint's name; nothing where there is nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest, with every key that is read here. Raises `_Damaged`, and ValueError for another format."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise _Damaged(f"{_MANIFEST} is missing or cut short") from None
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise _Damaged(f"{_MANIFEST} is not a manifest: it names no format")
    if manifest["format"] != 1:
        raise ValueError(
            f"{path} has format {str(manifest['format'])[:20]}, this version reads 1; go on with the version of "
            "stretto that wrote it, or move it out of the folder to go on from the checkpoint before it"
        )
    for key, kind in (("iteration", int), ("identity", dict), ("files", dict)):
        if type(manifest.get(key)) is not kind:
            raise _Damaged(f"{_MANIFEST} is not whole: {key} is missing or of a wrong type")
    for name in {_STATE, *manifest["files"]}:
        expected = manifest["files"].get(name)
        if not isinstance(expected, dict) or not {"bytes", "sha256"} <= expected.keys() or Path(name).name != name:
            raise _Damaged(f"{_MANIFEST} is not whole: it does not tell the size and SHA-256 of {name[:40]}")
    return manifest


def _damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    try:
        files = _manifest(path)["files"]
    except _Damaged as damage:
        return str(damage)
    for name, expected in files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        num_bytes = (path / name).stat().st_size
        if num_bytes != expected["bytes"]:
            return f"{name} has {num_bytes} bytes, {str(expected['bytes'])[:20]} were written"
        with (path / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                return f"{name} is not what was written: its SHA-256 differs"
    return None


def _plain(identity: Mapping[str, Any]) -> dict[str, Any]:
    """An identity as JSON gives it back, so that tuples and lists compare equal."""
    return dict(json.loads(json.dumps(dict(identity))))


_ABSENT = object()


def _compare(path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
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
