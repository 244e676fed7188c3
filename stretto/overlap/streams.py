"""Tensors that one thread makes and another uses, each on a CUDA stream of its own; on the host, threads alone.

A thread begins on the default stream of device 0, whatever its starter used. `Worker` gives it the device and a
stream that goes on from where the starter's was; `Made` carries a tensor with the event after which it may be read.
The hazard is the allocator: memory goes back to the stream that it came from, so whoever takes a tensor from another
stream records that it is used there. Source: torch's notes on CUDA semantics.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Made", "Worker", "made"]


@dataclass(frozen=True)
class Made:
    """A tensor, and when it is there."""

    tensor: Tensor
    event: "torch.cuda.Event | None" = None

    def take(self) -> Tensor:
        """The tensor, for use on the caller's stream."""
        if self.event is not None:
            stream = torch.cuda.current_stream(self.tensor.device)
            stream.wait_event(self.event)
            self.tensor.record_stream(stream)
        return self.tensor


def made(tensor: Tensor) -> Made:
    """What the caller's stream has been given the work to make."""
    if not tensor.is_cuda:
        return Made(tensor)
    return Made(tensor, torch.cuda.current_stream(tensor.device).record_event())


class Worker:
    """One thread that does what it is given in order, on a stream of its own."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def submit(
        self, device: torch.device, function: Callable[..., Tensor], *args: Any, **kwargs: Any
    ) -> "Future[Made]":
        """Call `function` in the thread, after what the caller's stream was given; `Made` arguments are taken."""
        if device.type != "cuda":
            return self._thread.submit(lambda: made(function(*map(_taken, args), **kwargs)))
        before = torch.cuda.current_stream(device).record_event()

        def run() -> Made:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device, priority=-1)
            with torch.cuda.device(device), torch.cuda.stream(self._streams[device]):
                self._streams[device].wait_event(before)
                return made(function(*map(_taken, args), **kwargs))

        return self._thread.submit(run)

    def shutdown(self) -> None:
        """End the thread when it has done all."""
        self._thread.shutdown()


def _taken(argument: Any) -> Any:
    return argument.take() if isinstance(argument, Made) else argument
