"""Dropout on a part of a tensor, as the one-process model would draw it on the whole.

Every rank draws the whole mask from its generator and uses its own part: ranks that started from one seed
stay in step, and a run over several ranks is the run over one. The hazard is a generator that was seeded
differently from rank to rank; and the whole mask is there for a moment on each. Source: this library.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from stretto.overlap.inputs import outside_of_graphs
from stretto.overlap.routes import Slices, slice_sizes
from stretto.overlap.row_counts import Rows
from stretto.overlap.rows import count_all

__all__ = ["PartDropout"]


class PartDropout(nn.Dropout):
    """`nn.Dropout` on own rows (..., own rows, K), or own features (..., rows, own K).

    The mask is that which `nn.Dropout` draws for the whole, contiguous tensor. Nothing is sent, except that
    uneven rows, and features at their first use, are counted.
    """

    mesh: DeviceMesh
    part: str
    uneven: bool
    rows: Rows | None = None
    _features: tuple[int, int] | None = None

    @classmethod
    def adopt(cls, dropout: nn.Dropout, mesh: DeviceMesh, part: str, *, uneven: bool) -> None:
        """Turn a dropout into one on "rows" or "features" in place."""
        dropout.__class__ = cls
        assert isinstance(dropout, PartDropout)
        dropout.mesh, dropout.part, dropout.uneven = mesh, part, uneven

    @outside_of_graphs
    def forward(self, input: Tensor) -> Tensor:
        """x times the own part of a mask of 0 and 1 / (1 - p)."""
        if not self.training or self.p == 0:
            return super().forward(input)
        dim = -2 if self.part == "rows" else -1
        own, whole = input.shape[dim], self._whole(input, dim)
        place = Slices(tuple(slice_sizes(whole, self.mesh.size()))).rows(self.mesh.get_local_rank())
        assert place.stop - place.start == own, (place, own)
        shape = list(input.shape)
        shape[dim] = whole
        mask = F.dropout(torch.ones(shape, dtype=input.dtype, device=input.device), self.p, training=True)
        return input * mask.narrow(dim, place.start, own)

    def _whole(self, x: Tensor, dim: int) -> int:
        if self.part == "rows" and self.rows is not None:
            return self.rows.total
        if self.part == "rows":
            return count_all(x, self.mesh, dim, uneven=self.uneven)
        own = x.shape[dim]
        if self._features is None:
            self._features = (own, count_all(x, self.mesh, dim, uneven=True))
        if self._features[0] != own:
            raise ValueError(f"this rank had {self._features[0]} features at the first call, and has {own} now")
        return self._features[1]
