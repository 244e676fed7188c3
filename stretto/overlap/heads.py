"""Which attention heads each rank has, where several query heads share one key-value head.

Pure arithmetic, the same on every rank. The hazard is grouped-query attention with fewer key-value heads than
ranks: then ranks share a head, each computes it whole, and its weights' gradient is the sum of theirs.
Source: GQA (arXiv 2305.13245); the cuts are this library's.
"""

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

__all__ = ["HeadCut", "cut_heads", "repeat_kv_heads", "split_heads"]


@dataclass(frozen=True)
class HeadCut:
    """Equal numbers of query heads on every rank, and the key-value heads that they use."""

    num_heads: int
    num_kv_heads: int
    world_size: int

    @property
    def heads(self) -> int:
        """Query heads of each rank."""
        return self.num_heads // self.world_size

    @property
    def group(self) -> int:
        """Query heads that share one key-value head on a rank: `num_key_value_groups` there."""
        return gcd(self.num_heads // self.num_kv_heads, self.heads)

    @property
    def shares(self) -> bool:
        """Whether some rank needs more, or others, than an equal part of the key-value heads."""
        return self.num_kv_heads % self.world_size != 0

    def kv_heads(self, rank: int) -> list[int]:
        """The key-value heads that a rank's query heads use, in their order; one may come twice."""
        first, each = rank * self.heads, self.num_heads // self.num_kv_heads
        return [(first + head) // each for head in range(0, self.heads, self.group)]


def cut_heads(num_heads: int, world_size: int, num_kv_heads: int | None = None) -> HeadCut:
    """Cut query heads equally over ranks, each with the key-value heads that they use.

    `ValueError` if the ranks do not divide `num_heads`, or `num_kv_heads` does not.
    """
    kv = num_heads if num_kv_heads is None else num_kv_heads
    if kv < 1 or num_heads % kv:
        raise ValueError(f"num_kv_heads={kv} does not divide num_heads={num_heads}")
    if num_heads % world_size:
        fitting = [str(n) for n in range(1, world_size) if num_heads % n == 0]
        several = ", ".join(fitting[:-1]) + " or " + fitting[-1] + " ranks" if fitting[1:] else f"{fitting[0]} rank"
        raise ValueError(f"num_heads={num_heads} cannot be split over {world_size} ranks; use {several}")
    return HeadCut(num_heads, kv, world_size)


def split_heads(num_heads: int, world_size: int, num_kv_heads: int | None = None) -> tuple[list[int], list[int]]:
    """How many query and key-value heads each rank has: as even as can be, the first have more.

    A rank's query heads are those of its key-value heads. With fewer key-value heads than ranks, each has one,
    which it shares with the ranks beside it: the projections of keys and values then go through
    `repeat_kv_heads`. `ValueError` if there are fewer query heads than ranks, or if `num_kv_heads` does not
    divide `num_heads`.
    """
    kv = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads < world_size:
        raise ValueError(
            f"num_heads={num_heads} cannot be split over {world_size} ranks; use at most {num_heads} ranks"
        )
    if kv < 1 or num_heads % kv:
        raise ValueError(f"num_kv_heads={kv} does not divide num_heads={num_heads}")
    each = num_heads // kv
    if kv < world_size:
        sharing = _even(world_size, kv)
        return [heads for ranks in sharing for heads in _even(each, ranks)], [1] * world_size
    kv_heads = _even(kv, world_size)
    return [each * heads for heads in kv_heads], kv_heads


def repeat_kv_heads(projection: Tensor, num_kv_heads: int, world_size: int) -> Tensor:
    """A key or value projection with every head as often as `split_heads` counts it; itself where once each.

    Args:
        projection: (num_kv_heads * d, ...), a weight or a bias.
        num_kv_heads: key-value heads in it.
        world_size: ranks that share them.

    Returns:
        (max(num_kv_heads, world_size) * d, ...).

    Gradients:
        The sum over the repeats of a head.
    """
    if len(projection) % num_kv_heads:
        raise ValueError(f"a projection to {len(projection)} features has no num_kv_heads={num_kv_heads} heads")
    if num_kv_heads >= world_size:
        return projection
    times = torch.tensor(_even(world_size, num_kv_heads), device=projection.device)
    return projection.unflatten(0, (num_kv_heads, -1)).repeat_interleave(times, 0).flatten(0, 1)


def _even(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]
