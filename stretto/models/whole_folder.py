"""A folder of weights that takes its name when it is complete.

The files are written under a hidden neighbour and renamed, so that a kill or a full disk leaves what was there
before. The hazard is a folder that is there already, which may hold files of others: its own stay, and each new one
takes its place by a rename of its own.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["whole_folder"]


@contextmanager
def whole_folder(folder: str | Path) -> Iterator[Path]:
    """An empty folder to write files into, which become those of `folder` when the block ends well."""
    final = Path(folder).absolute()
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if final.exists():
            for file in sorted(partial.iterdir()):
                file.replace(final / file.name)
        else:
            partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
