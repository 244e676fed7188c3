"""Messages of a device's tensors over a backend that takes only the host's: staged in page-locked buffers.

For several ranks that share one GPU, and wherever gloo is all there is. A send's copy leaves on a stream of its own
when the product that made the tensor is done; one thread posts the sends, in order, as their copies end, so that the
host goes on to queue products. A receive is posted at once and copied in when it was waited for, on a third stream,
beside the product that runs meanwhile. The hazard: sends reach the backend later than they were posted, so nothing
else may use it. Source: this library's; the copies' rules are those of torch's streams and allocators.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.overlap.faults import hang_up

__all__ = ["Copies", "DeviceCopies", "HostCopies", "Staged"]


class Copies(Protocol):
    """How a tensor and its buffer on the host are copied."""

    def buffer(self, like: Tensor) -> Tensor:
        """A host buffer of the shape and dtype of a tensor."""

    def mark(self) -> Any:
        """The place in the caller's stream before which a tensor's memory may still be in use."""

    def leave(self, tensor: Tensor, buffer: Tensor) -> Any:
        """Begin to copy out what the caller's stream has made; `synchronize` of what is returned ends it."""

    def enter(self, buffer: Tensor, tensor: Tensor, mark: Any) -> None:
        """Copy in; the caller's stream, and the one of `mark`, wait for it."""


class DeviceCopies:
    """Copies of a CUDA device, on two streams beside the caller's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def buffer(self, like: Tensor) -> Tensor:
        """As `Copies`; page-locked. Its allocator keeps it from others until copies of it have ended."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)

    def mark(self) -> Any:
        """The current stream and an event in it."""
        stream = torch.cuda.current_stream(self._device)
        return stream, stream.record_event()

    def leave(self, tensor: Tensor, buffer: Tensor) -> Any:
        """As `Copies`."""
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            buffer.copy_(tensor, non_blocking=True)
        return self._out.record_event(torch.cuda.Event(blocking=True))

    def enter(self, buffer: Tensor, tensor: Tensor, mark: Any) -> None:
        """As `Copies`."""
        posted_on, made = mark
        self._in.wait_event(made)
        with torch.cuda.stream(self._in):
            tensor.copy_(buffer, non_blocking=True)
        entered = self._in.record_event()
        posted_on.wait_event(entered)
        torch.cuda.current_stream(self._device).wait_event(entered)


class HostCopies:
    """The same for tensors of the host, as late as a device may make them: so the logic is proved without one."""

    def buffer(self, like: Tensor) -> Tensor:
        """As `Copies`."""
        return torch.empty_like(like)

    def mark(self) -> None:
        """The host has no streams."""

    def leave(self, tensor: Tensor, buffer: Tensor) -> Any:
        """As `Copies`; copied when somebody waits."""
        return _LateCopy(tensor, buffer)

    def enter(self, buffer: Tensor, tensor: Tensor, mark: Any) -> None:
        """As `Copies`."""
        tensor.copy_(buffer)


@dataclass
class _LateCopy:
    tensor: Tensor
    buffer: Tensor

    def synchronize(self) -> None:
        self.buffer.copy_(self.tensor)


@dataclass
class _Staging:
    """One message and the buffer through which it goes."""

    tensor: Tensor
    buffer: Tensor
    mark: Any
    arriving: Any = None
    leaving: "Future[Any] | None" = None


class Staged:
    """A wire through host buffers; `backend` is gloo, and this wire's own."""

    def __init__(self, backend: Any, rank: int, world_size: int, copies: Copies) -> None:
        self._backend, self._rank, self._world_size, self._copies = backend, rank, world_size, copies
        self._thread = ThreadPoolExecutor(1, "stretto staging")

    def post(self, messages: list[tuple[str, Tensor, int]]) -> list[_Staging]:
        """As `Wire`, one work a message."""
        mark, works = self._copies.mark(), []
        for verb, tensor, peer in messages:
            tensor = tensor.data  # no graph may hold the buffer, or see an arrival as a change
            staging = _Staging(tensor, self._copies.buffer(tensor), mark)
            if verb == "sending to":
                copied = self._copies.leave(tensor, staging.buffer)
                staging.leaving = self._thread.submit(self._send, staging.buffer, copied, peer)
            else:
                staging.arriving = self._backend.recv([staging.buffer], peer, 0)
            works.append(staging)
        return works

    def end(self, work: _Staging) -> None:
        """As `Wire`."""
        (work.arriving if work.leaving is None else work.leaving.result()).wait()

    def settle(self, work: _Staging) -> None:
        """As `Wire`. What was sent has left its tensor before it left its buffer: only arrivals are copied."""
        if work.leaving is None:
            self._copies.enter(work.buffer, work.tensor, work.mark)
        self.release(work.buffer)

    def end_of(self, work: _Staging) -> None:
        """The host waits."""

    def release(self, buffer: Tensor) -> None:
        """The end of a buffer: nobody reads it after this. (The tests poison it.)"""

    def hang_up(self) -> None:
        """As `Wire`."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        hang_up(self._backend, self._rank, self._world_size)

    def _send(self, buffer: Tensor, copied: Any, peer: int) -> Any:
        copied.synchronize()
        return self._backend.send([buffer], peer, 0)
