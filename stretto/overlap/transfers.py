"""Messages in flight, and whose their tensors are meanwhile.

The hazard is a buffer: it belongs to its transfer until that was waited for. Source: two libraries in which it
did not, NVIDIA/TransformerEngine 1004 and NVIDIA/Megatron-LM 6060.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

__all__ = ["Shape", "Transfer"]

Shape = tuple[int, ...]


@dataclass
class Transfer:
    """Works in flight, and the messages whose tensors belong to them until they were waited for."""

    works: list[dist.Work]
    messages: list[tuple[str, Tensor, int]]
    """("sending to" or "receiving from", tensor, peer)."""
    watched: "list[Future[None]]" = field(default_factory=list)
    """While a trace is open: the ends of the works, for which its threads wait."""

    def wait(self, index: int) -> None:
        """Until one of the works has ended."""
        if self.watched:
            self.watched[index].result()
        else:
            self.works[index].wait()
