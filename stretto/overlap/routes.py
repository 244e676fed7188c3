"""The ONE place that says which slice goes to which peer, and which rows a slice has.

Every step of every schedule is a permutation: each rank sends to exactly one peer and receives from exactly
one. Deriving slices and peers in two places is how such loops hang or deliver wrong data, so every loop asks
`route`. The hazard is sizes: `Slices` must be the same on every rank. Source: CommFuse (arXiv 2604.24013),
its schedules; the staged direct gather is this library's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Asked", "Kind", "Route", "Schedule", "Slices", "route", "slice_sizes"]

Schedule = Literal["plain", "ring", "direct"]
Asked = Literal["auto", "plain", "ring", "direct"]
Kind = Literal["gather", "scatter"]


@dataclass(frozen=True)
class Route:
    """One rank's part in one step, in slices and ranks of the group."""

    compute: int
    """The slice whose product belongs to this step."""
    send_to: int
    send: int
    """The slice that is sent."""
    recv_from: int
    recv: int
    """The slice that is received (of a direct scatter: a piece of the rank's own)."""


def route(kind: Kind, schedule: Schedule, rank: int, world_size: int, step: int) -> Route:
    """Who computes, sends and receives which slice at `step`.

    Steps run from 0 to world_size - 1; the last has a product and no transfer. A gather computes the own
    slice first, a scatter last: so the step with nothing beside it is the one that needs nothing. All indices
    mod world_size:

        kind     schedule  compute  send  to     recv   from
        gather   ring      r-i      r-i   r+1    r-i-1  r-1
        gather   direct    r-i      r     r+i+1  r-i-1  r-i-1
        scatter  ring      r-i-1    r-i-1 r+1    r-i-2  r-1
        scatter  direct    r+i+1    r+i+1 r+i+1  r      r-i-1
    """
    r, i = rank, step
    steps: dict[tuple[str, str], tuple[int, int, int, int, int]] = {
        ("gather", "ring"): (r - i, r + 1, r - i, r - 1, r - i - 1),
        ("gather", "direct"): (r - i, r + i + 1, r, r - i - 1, r - i - 1),
        ("scatter", "ring"): (r - i - 1, r + 1, r - i - 1, r - 1, r - i - 2),
        ("scatter", "direct"): (r + i + 1, r + i + 1, r + i + 1, r - i - 1, r),
    }
    return Route(*(index % world_size for index in steps[kind, schedule]))


def slice_sizes(total: int, num_slices: int) -> list[int]:
    """How many of `total` rows each slice has: as `torch.chunk` and DTensor's `Shard` cut them."""
    size = -(-total // num_slices)
    return [max(0, min(size, total - index * size)) for index in range(num_slices)]


@dataclass(frozen=True)
class Slices:
    """The rows of a tensor cut by owner, and every owner's slice cut again in `num_subslices`."""

    sizes: tuple[int, ...]
    """Rows of each rank's slice."""
    num_subslices: int = 1

    def cut(self, num_subslices: int) -> "Slices":
        """The same rows in another number of sub-slices."""
        return Slices(self.sizes, num_subslices)

    def size(self, owner: int, subslice: int) -> int:
        """Rows of one sub-slice; 0 for some where the slice is shorter than `num_subslices`."""
        return slice_sizes(self.sizes[owner], self.num_subslices)[subslice]

    def local(self, owner: int, subslice: int) -> slice:
        """The rows of a sub-slice within its owner's slice."""
        start = sum(slice_sizes(self.sizes[owner], self.num_subslices)[:subslice])
        return slice(start, start + self.size(owner, subslice))

    def rows(self, owner: int, subslice: int | None = None) -> slice:
        """The rows of a sub-slice, or of the whole slice, within the whole tensor."""
        first = sum(self.sizes[:owner])
        if subslice is None:
            return slice(first, first + self.sizes[owner])
        local = self.local(owner, subslice)
        return slice(first + local.start, first + local.stop)

    @property
    def total(self) -> int:
        """Rows of the whole tensor."""
        return sum(self.sizes)


def sizes_from(sizes: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Sizes that a caller gave, checked."""
    if len(sizes) != world_size or any(size < 0 for size in sizes):
        raise ValueError(f"sizes={list(sizes)} must be {world_size} row counts, one a rank")
    return tuple(sizes)
