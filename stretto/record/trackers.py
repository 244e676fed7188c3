"""Where an iteration's metrics go: the file, the screen and, on request, TensorBoard.

`open_trackers` gives one object whose `write` feeds them all, so that the loop has no `if`. On a terminal
there is a bar, elsewhere a plain line an iteration. The hazard is TensorBoard after a resume, which would
show the dropped iterations beside the new ones: it is opened with the iteration to purge from.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from stretto.record.atomic import naming
from stretto.record.metrics import Metrics

__all__ = ["Bar", "Lines", "TensorBoard", "Trackers", "Writer", "open_trackers", "say"]


class Writer(Protocol):
    """Takes the metrics of one iteration after another."""

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Take one iteration's metrics; `iteration` is among them."""

    def close(self) -> None:
        """Finish."""


class Screen(Writer, Protocol):
    """A writer that shows, and can say a sentence between two iterations."""

    def say(self, text: str) -> None:
        """Show a line of text."""


def say(text: str, stream: TextIO | None = None) -> None:
    """A line of text on stdout, at once, or on another stream; nothing where stdout is closed.

    Raises OSError that names stdout where it takes no more.
    """
    stream = stream or sys.stdout
    if stream is not None:
        with naming(Path("stdout")):
            print(text, file=stream, flush=True)


class Lines:
    """A plain line an iteration: for logs and pipes; none where stdout is closed."""

    def __init__(self, iterations: int, shown: Sequence[str], stream: TextIO | None = None) -> None:
        self.iterations, self.shown, self.stream = iterations, shown, stream

    def write(self, metrics: Mapping[str, Any]) -> None:
        """See `Writer`."""
        done = int(metrics["iteration"]) + 1
        self.say(f"{done:>{len(str(self.iterations))}}/{self.iterations}  {_summary(metrics, self.shown)}")

    def say(self, text: str) -> None:
        """See `Screen`."""
        say(text, self.stream)

    def close(self) -> None:
        """Nothing is open."""


class Bar:
    """A progress bar: for terminals."""

    def __init__(
        self, iterations: int, shown: Sequence[str], from_iteration: int, stream: TextIO | None = None
    ) -> None:
        from tqdm import tqdm

        self.shown = shown
        self._tqdm = tqdm
        self._bar = tqdm(
            total=iterations, initial=from_iteration, unit="it", file=stream or sys.stdout, dynamic_ncols=True
        )

    def write(self, metrics: Mapping[str, Any]) -> None:
        """See `Writer`."""
        self._bar.set_postfix_str(_summary(metrics, self.shown), refresh=False)
        self._bar.update(1)

    def say(self, text: str) -> None:
        """See `Screen`; the bar moves down a line."""
        self._tqdm.write(text, file=self._bar.fp)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()


class TensorBoard:
    """Event files: every number of the metrics as a scalar, nested ones as `outer/inner`, list items by
    index."""

    def __init__(self, folder: Path, from_iteration: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError('run.tensorboard = true needs an extra: pip install "stretto[tensorboard]"') from None
        self._writer: Any = SummaryWriter(str(folder), purge_step=from_iteration or None)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """See `Writer`."""
        for name, value in _scalars(metrics):
            self._writer.add_scalar(name, value, int(metrics["iteration"]))
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class Trackers:
    """All the writers of a run as one; closes them together. `say` speaks on the screen."""

    def __init__(self, screen: Screen, *others: Writer) -> None:
        self._screen, self._writers = screen, (*others, screen)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Feed every writer: the file first, the screen last."""
        for writer in self._writers:
            writer.write(metrics)

    def say(self, text: str) -> None:
        """Show a line of text without breaking the bar."""
        self._screen.say(text)

    def close(self) -> None:
        """Close every writer."""
        for writer in self._writers:
            writer.close()

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_trackers(
    folder: Path,
    *,
    iterations: int,
    shown: Sequence[str],
    from_iteration: int = 0,
    tensorboard: bool = False,
) -> Trackers:
    """The writers of the run in `folder`.

    iterations: of the whole run. shown: names of the metrics on the screen, in order; those that an iteration
    lacks are left out. from_iteration: the first that will be written; what the files hold from there on is
    dropped. tensorboard: also event files, in `folder`/tensorboard. Raises ValueError with the pip line where
    that extra is missing.
    """
    events = [TensorBoard(folder / "tensorboard", from_iteration)] if tensorboard else []
    metrics = Metrics(folder / "metrics.jsonl", from_iteration)
    return Trackers(_screen(iterations, shown, from_iteration), metrics, *events)


def _screen(iterations: int, shown: Sequence[str], from_iteration: int) -> Screen:
    """A bar on a terminal; plain lines elsewhere, and where tqdm is not installed."""
    if sys.stdout is not None and sys.stdout.isatty():
        try:
            return Bar(iterations, shown, from_iteration)
        except ImportError:
            pass
    return Lines(iterations, shown)


def _summary(metrics: Mapping[str, Any], shown: Sequence[str]) -> str:
    scalars = dict(_scalars(metrics))
    return "  ".join(f"{name} {scalars[name]:.4g}" for name in shown if name in scalars)


def _scalars(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a nest of mappings and lists, named by its way down."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if name or key != "iteration":
                yield from _scalars(inner, f"{name}/{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _scalars(inner, f"{name}/{index}")
    elif hasattr(value, "item"):
        yield name, float(value.item())
    elif isinstance(value, int | float):
        yield name, float(value)
