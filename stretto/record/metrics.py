"""`metrics.jsonl`: one line an iteration, appended, and cut back when a run goes on.

Every line has `iteration` and whatever the loop measured. The hazard is the end of the file after a kill: a
torn line, or lines of iterations that the newest checkpoint does not hold and that will be made again.
`Metrics` drops both before it appends, by one atomic rename. JSON has no NaN or infinity; they are written as
null.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from stretto.record.atomic import naming, write_atomic

__all__ = ["Metrics", "read_metrics"]


class Metrics:
    """The metrics of a run, kept from iteration 0 up to `from_iteration` and written from there on.

    path: the file; made if it is not there. Lines of iterations >= `from_iteration` and a torn last line are
    dropped. Raises ValueError where an earlier line is not JSON.
    """

    def __init__(self, path: Path, from_iteration: int = 0) -> None:
        self.path = path
        _cut_back(path, from_iteration)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append one line and flush it to the disk. Raises OSError naming the path, with no torn line left."""
        line = (json.dumps(_plain(dict(metrics)), allow_nan=False) + "\n").encode()
        start = os.fstat(self._file).st_size
        with naming(self.path):
            try:
                written = 0
                while written < len(line):
                    written += os.write(self._file, line[written:])
                os.fsync(self._file)
            except BaseException:
                os.ftruncate(self._file, start)
                raise

    def close(self) -> None:
        """Close the file; nothing was waiting to be written."""
        os.close(self._file)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every whole line; a torn last one is left out. Raises ValueError where an earlier line is not JSON."""
    lines = path.read_bytes().split(b"\n")[:-1]
    return [_parse(path, number, line) for number, line in enumerate(lines, start=1)]


def _cut_back(path: Path, from_iteration: int) -> None:
    if not path.exists():
        return
    text = path.read_bytes()
    lines = text.split(b"\n")[:-1]
    kept = b"".join(
        line + b"\n"
        for number, line in enumerate(lines, start=1)
        if _parse(path, number, line)["iteration"] < from_iteration
    )
    if kept != text:
        write_atomic(path, kept)


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        metrics = json.loads(line)
        metrics["iteration"] + 0
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path}, line {number}: not a line of metrics: {line[:60]!r}; mend or delete it") from None
    return dict(metrics)


def _plain(value: Any) -> Any:
    """Numbers of any kind (0-d tensors too) as Python's, what is not finite as None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
