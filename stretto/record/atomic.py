"""Files that are there whole or not at all.

Bytes go to a hidden neighbour, are flushed to the disk, and take the name by one rename: a kill at any moment
leaves the old file or the new one. The hazard is a full disk, which a rename cannot help: the neighbour is
removed and the error names the path that was wanted.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["naming", "new_file", "sync_folder", "write_atomic"]


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` (text as UTF-8) to `path`, whole or not at all. Raises OSError that names `path`."""
    with new_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the name `path` when the block ends well, and vanishes when it does not."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with naming(path):
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError inside comes out naming `path`; that of a failed write names no file of its own."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename in it outlives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
