"""How many rows of a sequence every rank has, known without asking: whoever cuts it from the whole says so.

A plan names its sequences (text and image tokens); rows of several may lie side by side on a rank, as in blocks
that join text and image. Gathered, such rows are in the order of ranks, not of sequences. The hazard: a count
is that of the last forward; a checkpointed block that is run again in a backward must not have seen another
size in between (the ranks' headers, or the sizes of slices, then disagree, and that is an error). Source: this
library.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from stretto.overlap.routes import slice_sizes

__all__ = ["RowCount", "Rows"]


class RowCount:
    """The rows of one sequence over all ranks, cut as `torch.chunk` cuts them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.total: int | None = None
        """As whoever cut the sequence last has found it."""


@dataclass(frozen=True)
class Rows:
    """What a rank's rows are made of: its part of one sequence, or of several, side by side in this order."""

    parts: tuple[RowCount, ...]

    @property
    def total(self) -> int:
        """Rows of all ranks."""
        return sum(self._totals())

    @property
    def is_joined(self) -> bool:
        """Whether rows of several sequences lie side by side."""
        return len(self.parts) > 1

    def sizes(self, world_size: int) -> list[int]:
        """Rows of every rank."""
        return [sum(sizes) for sizes in zip(*(slice_sizes(total, world_size) for total in self._totals()))]

    def gathered_order(self, world_size: int, device: torch.device) -> Tensor:
        """(total,) int64: which row of the sequences, one after the other, is at each place of gathered rows."""
        return _gathered_order(self._totals(), world_size, device)

    def _totals(self) -> tuple[int, ...]:
        for part in self.parts:
            if part.total is None:
                raise ValueError(
                    f"rows {part.name!r} are used before they are split; call the model, not its parts, or split them"
                )
        return tuple(part.total for part in self.parts if part.total is not None)


@cache
def _gathered_order(totals: tuple[int, ...], world_size: int, device: torch.device) -> Tensor:
    starts = [sum(totals[:index]) for index in range(len(totals))]
    cuts = [slice_sizes(total, world_size) for total in totals]
    order = [
        start + row
        for rank in range(world_size)
        for start, cut in zip(starts, cuts)
        for row in range(sum(cut[:rank]), sum(cut[: rank + 1]))
    ]
    return torch.tensor(order, dtype=torch.long, device=device)
