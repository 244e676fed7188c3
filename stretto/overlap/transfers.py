"""Messages in flight, and whose their tensors are meanwhile.

The hazard is a buffer: it belongs to its transfer until that was waited for. Source: two libraries in which it
did not, NVIDIA/TransformerEngine 1004 and NVIDIA/Megatron-LM 6060.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from stretto.overlap import tracing
from stretto.overlap.moments import Moment
from stretto.overlap.wires import Message, Wire

__all__ = ["Shape", "Transfer"]

Shape = tuple[int, ...]


@dataclass
class Transfer:
    """Works in flight, and the messages whose tensors belong to them until they were waited for."""

    works: list[Any]
    messages: list[Message]
    wire: Wire | None = None
    """What carries them; None if there are none."""
    watched: "list[Future[None]]" = field(default_factory=list)
    """While a trace is open: the ends of the works, for which its threads wait."""

    def wait(self, index: int) -> None:
        """Until one of the works has ended, for the caller's stream if not for the host."""
        assert self.wire is not None
        if self.watched:
            self.watched[index].result()
        else:
            self.wire.end(self.works[index])
        self.wire.settle(self.works[index])

    def watch(self, position: str, call: str, operation: str, start: Moment) -> None:
        """Have open traces record when each message, or the batch where that is one work, has ended."""
        if self.wire is None:
            return
        names = [f"{verb} rank {peer} {tuple(t.shape)}, {position}" for verb, t, peer in self.messages]
        if len(self.works) < len(names):
            names = ["; ".join(names)]
        for work, name in zip(self.works, names):
            end = self.wire.end_of(work)
            if end is None:
                self.watched.append(tracing.watch(partial(self.wire.end, work), name, call, operation))
            else:
                tracing.stamp("transfer", name, start, end, call, operation)
