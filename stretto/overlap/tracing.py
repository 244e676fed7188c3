"""What ran beside what: when each product, each transfer and each wait of this process began and ended.

`trace` records while it is open and writes a file for Perfetto or chrome://tracing. A work of gloo does not say
when it ended (`is_completed` stays False until somebody waited), so while a trace is open a thread waits for each
transfer and stamps its end. On CUDA products, waits and NCCL's transfers are stamped by events in their streams,
which become seconds when the trace closes; a wait is then the time that the stream stood still. The hazard: that
thread is a cost of tracing, so times are read from an untraced run and order from a traced one. The clock is the
machine's monotonic one: traces of ranks on one machine can be laid side by side.
"""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from stretto.overlap.law import overlapped_s
from stretto.overlap.moments import Moment, seconds

__all__ = ["Span", "Trace", "TracedCall", "trace"]

_LANES = ("call", "product", "transfer", "wait")
_open: "list[Trace]" = []


@dataclass
class Span:
    """Something that this process did, in seconds of the machine's monotonic clock."""

    what: str
    """"call", "product", "transfer" (posted until complete) or "wait" (nothing else was done)."""
    name: str
    start_s: float
    end_s: float
    call: str
    """The group's name and the how-manieth call on it."""
    operation: str

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class TracedCall:
    """One call's sums, beside what the law says of a call with these products and transfers."""

    operation: str
    call: str
    products_s: float
    transfers_s: float
    """Of its messages one after the other: time during which at least one was in flight."""
    exposed_s: float
    """Blocked in waits."""
    predicted_exposed_s: float
    """By the law, for direct or ring with the sub-slices that it had."""


@dataclass(eq=False)
class Trace:
    """The spans that were recorded, in the order in which they ended; no two traces are one."""

    spans: list[Span] = field(default_factory=list)
    cuts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of each call: ranks, sub-slices."""
    stamped: list[tuple[Span, Moment, Moment]] = field(default_factory=list)
    """Spans whose times are still on a device."""

    def exposed_s(self) -> float:
        """Seconds that this process spent in waits."""
        return sum(span.seconds for span in self.spans if span.what == "wait")

    def resolve(self) -> None:
        """Turn what was stamped on a device into seconds; waits for the device."""
        found = iter(seconds([moment for _, start, end in self.stamped for moment in (start, end)]))
        for (span, _, _), start_s, end_s in zip(self.stamped, found, found):
            span.start_s, span.end_s = start_s, end_s
        self.stamped.clear()

    def calls(self) -> list[TracedCall]:
        """Every call with its sums, in order."""
        groups: dict[tuple[str, str], list[Span]] = defaultdict(list)
        for span in sorted(self.spans, key=lambda span: span.start_s):
            groups[span.operation, span.call].append(span)
        return [self._sums(*key, spans) for key, spans in groups.items()]

    def save(self, path: str | Path) -> None:
        """Write Chrome's trace format; one process a rank, one row for each of calls, products, transfers, waits."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        rows = [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": lane}}
            for tid, lane in enumerate(_LANES)
        ]
        rows.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        events = [
            {
                "ph": "X",
                "name": span.name,
                "cat": span.operation,
                "pid": rank,
                "tid": _LANES.index(span.what),
                "ts": span.start_s * 1e6,
                "dur": span.seconds * 1e6,
                "args": {"call": span.call, "operation": span.operation},
            }
            for span in self.spans
        ]
        Path(path).write_text(json.dumps({"traceEvents": [*rows, *events], "displayTimeUnit": "ms"}))

    def _sums(self, operation: str, call: str, spans: Sequence[Span]) -> TracedCall:
        products = sum(span.seconds for span in spans if span.what == "product")
        transfers = _covered_s([span for span in spans if span.what == "transfer"])
        waits = sum(span.seconds for span in spans if span.what == "wait")
        ranks, num_subslices = self.cuts.get(call, (1, 1))
        predicted = overlapped_s(products, transfers, ranks, num_subslices) - products
        return TracedCall(operation, call, products, transfers, waits, predicted)


def _covered_s(spans: Sequence[Span]) -> float:
    """Seconds during which at least one of the spans lasted."""
    total, end = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start_s):
        start = max(span.start_s, end)
        end = max(end, span.end_s)
        total += max(0.0, end - start)
    return total


@contextmanager
def trace(path: str | Path | None = None) -> Iterator[Trace]:
    """Record every call of this process, on whatever group and thread, until the context ends.

    Args:
        path: a file for Perfetto. With several ranks each writes its own: `trace.json` becomes `trace.rank3.json`.

    Yields:
        The `Trace`, complete when the context has ended.
    """
    recorded = Trace()
    _open.append(recorded)
    try:
        yield recorded
    finally:
        _open.remove(recorded)
        recorded.resolve()
        if path is not None:
            recorded.save(_of_rank(Path(path)))


def is_tracing() -> bool:
    """Whether some trace is open."""
    return bool(_open)


def add(span: Span) -> None:
    """Put a span into every open trace."""
    for recorded in _open:
        recorded.spans.append(span)


def stamp(what: str, name: str, start: Moment, end: Moment, call: str, operation: str) -> None:
    """Put a span into every open trace, of moments that a device may not have reached yet."""
    if isinstance(start, float) and isinstance(end, float):
        add(Span(what, name, start, end, call, operation))
        return
    span = Span(what, name, float("nan"), float("nan"), call, operation)
    add(span)
    for recorded in _open:
        recorded.stamped.append((span, start, end))


def describe(call: str, ranks: int, num_subslices: int) -> None:
    """Note how a call was cut."""
    for recorded in _open:
        recorded.cuts[call] = ranks, num_subslices


@contextmanager
def blocked(operation: str) -> "Iterator[Span]":
    """A wait of this thread for another that communicates; the span that is yielded is complete at the end."""
    span = Span("wait", operation, time.perf_counter(), float("nan"), operation, operation)
    try:
        yield span
    finally:
        span.end_s = time.perf_counter()
        add(span)


def watch(end: Callable[[], None], name: str, call: str, operation: str) -> "Future[None]":
    """Wait for a message's `end` in a thread of its own and stamp it; the future ends, or fails, with it."""
    ended: Future[None] = Future()
    start_s = time.perf_counter()

    def until_it_ends() -> None:
        try:
            end()
        except BaseException as error:
            ended.set_exception(error)
            return
        add(Span("transfer", name, start_s, time.perf_counter(), call, operation))
        ended.set_result(None)

    threading.Thread(target=until_it_ends, name="stretto trace", daemon=True).start()
    return ended


def _of_rank(path: Path) -> Path:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return path
    return path.with_name(f"{path.stem}.rank{dist.get_rank()}{path.suffix}")
