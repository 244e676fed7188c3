"""The checkpoints of a run as folders: which there are, how one takes its name, which go.

A checkpoint is made as `.partial-iteration-00000020` and renamed when it is whole; one of the same name steps aside
as `.replaced-...` first. The hazard is a kill between two renames: `tidy` and `newest` know every state that it can
leave behind. One process at a time changes the folder.
"""

import contextlib
import re
import shutil
from pathlib import Path

from stretto.record.atomic import sync_folder
from stretto.record.manifest import read_manifest

__all__ = ["best", "forget", "newest", "partial_of", "path_of", "remove", "take_name", "tidy"]

_NAME = re.compile(r"iteration-(\d{8,})")
_PARTIAL, _REPLACED = ".partial-", ".replaced-"


def path_of(folder: Path, iteration: int) -> Path:
    """Where the checkpoint after `iteration` finished iterations lies."""
    return folder / f"iteration-{iteration:08d}"


def partial_of(final: Path) -> Path:
    """Where a checkpoint is made."""
    return final.with_name(f"{_PARTIAL}{final.name}")


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
        with contextlib.suppress(OSError, ValueError):  # damaged, or of another format
            if read_manifest(path).get("is_best"):
                return path
    return None


def tidy(folder: Path) -> None:
    """Clear away what a kill left behind."""
    for path in _entries(folder):
        if path.name.startswith(_PARTIAL):
            remove(path)
        elif path.name.startswith(_REPLACED):
            final = path.with_name(path.name.removeprefix(_REPLACED))
            remove(path) if final.exists() else path.rename(final)


def take_name(final: Path) -> None:
    """Rename a checkpoint that is whole into place."""
    partial, replaced = partial_of(final), final.with_name(f"{_REPLACED}{final.name}")
    sync_folder(partial)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    sync_folder(final.parent)
    with contextlib.suppress(OSError):
        remove(replaced)


def forget(folder: Path, iteration: int, keep: int) -> None:
    """Let all but the `keep` newest go, and the best; and any later than `iteration`: the run went back behind it."""
    present = newest(folder)
    later = [path for path in present if int(path.name.rpartition("-")[2]) > iteration]
    best_so_far = best(folder)
    older = [path for path in present if path not in later and path != best_so_far]
    for path in later + older[keep:]:
        gone = path.with_name(f"{_PARTIAL}{path.name}")  # so that a kill leaves none half-deleted under its name
        path.rename(gone)
        remove(gone)


def remove(path: Path) -> None:
    """Remove a folder, or whatever else stands under a checkpoint's name; nothing where there is nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
