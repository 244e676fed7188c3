"""An all-reduce between two ranks in one step: each sends the other its whole partial sums.

As many bytes as a scatter and a gather, and no sum to wait for between the two, so that all of it leaves beside the
product and can be left under way. The hazard is the result, which must not be read before `Left.wait`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from stretto.overlap.faults import Header
from stretto.overlap.lane import Lane
from stretto.overlap.loops import sum_dtype
from stretto.overlap.p2p import Call
from stretto.overlap.pending import Left
from stretto.overlap.routes import Slices

__all__ = ["exchange_sums"]


def exchange_sums(
    call: Call,
    header: Header,
    mine: Tensor,
    slices: Slices,
    left: Left,
    multiply: Callable[[slice], None],
    *,
    bias: Tensor | None = None,
    check: bool,
) -> Tensor:
    """The sum over both ranks, of `mine`'s shape, once `left` has been waited for; bitwise the same on both.

    Args:
        call, header: as of `Scatter`.
        mine: (slices.total, ...), contiguous: this rank's partial sums, not computed yet.
        slices: the order in which they are computed, other's rows first.
        left: gets what is under way, and the addition.
        multiply: fills rows of `mine`.
        bias: added once.
        check: send headers.
    """
    rank, m, shape = call.peers.rank, slices.num_subslices, tuple(mine.shape)
    out = torch.empty_like(mine)
    lane = Lane(call, "scatter", header, lambda _: (shape, shape), device=mine.device, check=check)
    for s in range(2 * m):
        sent, received = (1 - rank, rank) if s < m else (rank, 1 - rank)
        rows = slices.rows(sent, s % m)
        call.begin_product()
        multiply(rows)
        call.end_product(0, s, sent)
        left.transfers.append(lane.post(0, s, mine[rows], out[slices.rows(received, s % m)]))
    call.leave(left.transfers)

    def add() -> None:
        total = out.data.to(sum_dtype(out.dtype))  # itself, where it has that dtype
        total += mine
        if bias is not None:
            total += bias
        if total.dtype != out.dtype:
            out.data.copy_(total)

    left.then = add
    return out
