"""The folder of a run: what lies where, and that one process at a time writes it.

The lock is the kernel's (`flock` on `.lock`), so that it ends with its process however that dies; the number
in the file only names the holder. The hazard is a second start over an earlier run: it is refused unless it
resumes.
"""

import fcntl
import os
import re
import weakref
from pathlib import Path
from types import TracebackType
from typing import Literal

from stretto.record.atomic import naming, write_atomic

__all__ = ["RunFolder"]

_RESUME = re.compile(r'^resume = "auto"$', re.MULTILINE)


class RunFolder:
    """An opened and locked run folder; use as a context or `close` it.

    Holds config.toml, env.json, metrics.jsonl, checkpoints/, grids/, weights/ and tensorboard/. A
    folder that was made here and in which nothing was written vanishes at the end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.environment = path / "env.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.grids = path / "grids"
        self.weights = path / "weights"
        self._was_there = path.is_dir()
        self._lock: int | None = None

    @classmethod
    def open(cls, path: Path, resume: Literal["no", "auto"] = "no") -> "RunFolder":
        """Make the folder if needed and lock it for this process's life.

        resume: "no" refuses a folder that already holds a run; "auto" goes on with it. Raises ValueError for
        that, for a folder in use (naming the process) and for a path that is not a folder.
        """
        folder = cls(path)
        folder._take_lock()
        if resume == "no" and folder.holds_a_run:
            folder.close()
            raise ValueError(
                f"{path} already holds a run; go on with it (--resume auto), name another folder "
                f"(--run.folder {path}-2), or delete it"
            )
        return folder

    @property
    def holds_a_run(self) -> bool:
        """Whether an iteration was ever recorded here."""
        has_metrics = self.metrics.is_file() and self.metrics.stat().st_size > 0
        return has_metrics or (self.checkpoints.is_dir() and any(self.checkpoints.iterdir()))

    def write_config(self, text: str) -> None:
        """Keep the resolved recipe. One that differs from what is there steps aside as config.1.toml, .2, ...

        Whether this start resumed is no setting of the run: `run.resume` makes no difference, and is kept as "no", so
        that a start from the kept recipe does not go on by surprise.
        """
        text = _RESUME.sub('resume = "no"', text, count=1)
        if self.config.is_file() and _RESUME.sub('resume = "no"', self.config.read_text(), count=1) == text:
            return
        _keep(self.config, text)

    def write_environment(self, text: str) -> None:
        """Keep the machine report, in the same way."""
        _keep(self.environment, text)

    def close(self) -> None:
        """Give the folder up."""
        if self._lock is not None:
            self.remove_if_empty()
            self._let_go()

    def remove_if_empty(self) -> None:
        """Let a folder vanish that was made here and in which nothing was written."""
        if not self._was_there and self.path.is_dir() and os.listdir(self.path) == [".lock"]:
            (self.path / ".lock").unlink()
            self.path.rmdir()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take_lock(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(f"run.folder = {self.path} is or lies in a file; name a folder") from None
        lock = self.path / ".lock"
        with naming(lock):
            self._lock = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with naming(lock):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode().strip() or "unknown"
            self._let_go()
            raise ValueError(
                f"{self.path} is in use by process {holder}; wait for it, stop it, or name another run.folder"
            ) from None
        with naming(lock):
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        # A forked child (a reward's worker) would hold the lock on after its parent was killed.
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _let_go_of(this()))

    def _let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _let_go_of(folder: RunFolder | None) -> None:
    if folder is not None:
        folder._let_go()


def _keep(path: Path, text: str) -> None:
    """Write `text`; what was there and differs is renamed to the first free number."""
    if path.exists():
        if path.read_text() == text:
            return
        number = 1
        while (aside := path.with_suffix(f".{number}{path.suffix}")).exists():
            number += 1
        path.rename(aside)
    write_atomic(path, text)
