"""Streams without a device: each knows which work must have ended before its next, by vector clocks.

Work is a name; `CUDA` stands in for `torch.cuda` and shows whether the events that the library records and waits for
order what must be ordered, and nothing else. It proves no kernel, no copy and no allocator.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

DEVICE = torch.device("cuda", 0)


class Event:
    def __init__(self, **options: Any) -> None:
        self.options, self.before, self.device = options, frozenset(), DEVICE

    def record(self, stream: "Stream") -> None:
        self.before = frozenset(stream.before)


class Stream:
    """`before` is all work that has ended when the stream's next work begins."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.before: set[str] = set()

    def do(self, work: str) -> frozenset[str]:
        """Queue work; what it comes after."""
        after = frozenset(self.before)
        self.before.add(work)
        return after

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.before |= event.before

    def wait_stream(self, stream: "Stream") -> None:
        self.before |= stream.before


class CUDA:
    """One device; each thread has its current stream."""

    def __init__(self) -> None:
        self.default = Stream()
        self._local = threading.local()

    def current_stream(self, device: Any = None) -> Stream:
        return getattr(self._local, "stream", self.default)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield


class Memory:
    """A tensor of the device, or a buffer: remembers what its copies came after, and where it is used."""

    is_cuda, device = True, DEVICE

    def __init__(self, cuda: CUDA, name: str) -> None:
        self.cuda, self.name, self.after, self.used_on = cuda, name, frozenset(), []

    def copy_(self, source: "Memory", non_blocking: bool = False) -> None:
        assert non_blocking
        self.after = self.cuda.current_stream().do(f"{source.name} to {self.name}")

    def record_stream(self, stream: Stream) -> None:
        self.used_on.append(stream)


class Communicator:
    """As `dist.ProcessGroupNCCL`: its stream waits for the current one, and the one that waits for a work for it."""

    supports_coalescing = True

    def __init__(self, cuda: CUDA, *given: Any) -> None:
        self.cuda, self.given, self.own, self.calls = cuda, given, Stream(), []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))

    def _end_coalescing(self) -> Any:
        self.calls.append(("_end_coalescing",))
        self.own.wait_stream(self.cuda.current_stream())
        self.own.do(f"message {sum(call[0] == '_end_coalescing' for call in self.calls)}")
        event = self.own.record_event()
        return mock.Mock(wait=lambda: self.cuda.current_stream().wait_event(event))


@contextmanager
def in_place_of_torch() -> Iterator[CUDA]:
    cuda = CUDA()
    with mock.patch.multiple(
        torch.cuda,
        Stream=Stream,
        Event=Event,
        current_stream=cuda.current_stream,
        stream=cuda.stream,
        device=cuda.device,
    ):
        yield cuda
