"""Rows of a sharded weight that several ranks use: gathered for the product, their gradients summed back.

For key and value projections with fewer heads than ranks. The weight stays sharded as every other, so that
checkpoints and optimizers see nothing; each rank is sent the few rows that it lacks and, backwards, sends
their gradients to the owners. The hazard: this is not hidden behind anything; it is worth it because such
weights are small. Source: the exchange's loops.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.overlap.exchange import Trade, own_first, own_last
from stretto.overlap.faults import Header
from stretto.overlap.heads import HeadCut
from stretto.overlap.loops import sum_dtype
from stretto.overlap.p2p import Peers
from stretto.overlap.routes import Slices, slice_sizes

__all__ = ["SharedRows", "shared_rows"]


@dataclass(frozen=True)
class SharedRows:
    """Which heads' rows of a weight every rank owns and uses; equal on every rank."""

    cut: HeadCut
    head_dim: int

    @property
    def owned(self) -> Slices:
        """The rows that each rank's shard holds."""
        total = self.cut.num_kv_heads * self.head_dim
        return Slices(tuple(slice_sizes(total, self.cut.world_size)))

    def used(self, rank: int) -> range:
        """The rows that a rank's heads use, each once."""
        heads = self.cut.kv_heads(rank)
        return range(heads[0] * self.head_dim, (heads[-1] + 1) * self.head_dim)

    def between(self, owner: int, user: int) -> range:
        """The rows that `user` has from `owner`."""
        rows, used = self.owned.rows(owner), self.used(user)
        start = max(rows.start, used.start)
        return range(start, max(start, min(rows.stop, used.stop)))

    def repeats(self, rank: int) -> list[int] | None:
        """Where a rank's heads are among those it uses; None: each once, in order."""
        heads = self.cut.kv_heads(rank)
        return None if len(set(heads)) == len(heads) else [head - heads[0] for head in heads]


def shared_rows(local: Tensor, rows: SharedRows, peers: Peers, *, check: bool) -> Tensor:
    """The rows of a weight that this rank's heads use, in their order.

    Args:
        local: (own rows, ...), this rank's shard, as `torch.chunk` cuts the weight.
        rows: who owns and uses what.
        peers: every rank makes this call.
        check: precede payloads by headers.

    Returns:
        (this rank's key-value heads * head_dim, ...).

    Gradients:
        Summed over the ranks that use a row, in one order, in float32 (float64 for float64), to its owner.
    """
    found: Tensor = _Gather.apply(rows, peers, check, local.flatten(1) if local.ndim > 1 else local.unsqueeze(1))
    repeats = rows.repeats(peers.rank)
    if repeats is not None:
        index = torch.tensor(repeats, device=local.device)
        found = found.unflatten(0, (-1, rows.head_dim)).index_select(0, index).flatten(0, 1)
    return found.view(len(found), *local.shape[1:])


class _Gather(torch.autograd.Function):
    """(own rows, K) -> (used rows, K)."""

    @staticmethod
    def forward(ctx: Any, rows: SharedRows, peers: Peers, check: bool, local: Tensor) -> Tensor:
        ctx.rows, ctx.peers, ctx.check = rows, peers, check
        rank, width, local = peers.rank, local.shape[1], local.contiguous()
        own, used = rows.owned.rows(rank).start, rows.used(rank).start
        out = local.new_empty(len(rows.used(rank)), width)
        trade = Trade(
            make=lambda peer, _: local[_shifted(rows.between(rank, peer), own)],
            room=lambda peer, _: out[_shifted(rows.between(peer, rank), used)],
            sent=lambda peer: (len(rows.between(rank, peer)), width),
            received=lambda peer: (len(rows.between(peer, rank)), width),
            num_subslices=1,
            device=local.device,
        )
        with peers.call("shared weight rows") as call:
            header = Header(call.operation, call.number, "gather", 0, (), local.dtype, 1, "direct", _needs(ctx, 3))
            for peer, _, piece in own_last(call, header, trade, check=check):
                if peer == rank:
                    out[_shifted(rows.between(rank, rank), used)] = piece
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        rows, peers, grad = ctx.rows, ctx.peers, grads[0].contiguous()
        rank, width = peers.rank, grad.shape[1]
        own, used = rows.owned.rows(rank).start, rows.used(rank).start
        total = grad.new_zeros(rows.owned.sizes[rank], width, dtype=sum_dtype(grad.dtype))
        trade = Trade(
            make=lambda peer, _: grad[_shifted(rows.between(peer, rank), used)],
            room=lambda peer, _: grad.new_empty(len(rows.between(rank, peer)), width),
            sent=lambda peer: (len(rows.between(peer, rank)), width),
            received=lambda peer: (len(rows.between(rank, peer)), width),
            num_subslices=1,
            device=grad.device,
        )
        with peers.call("shared weight rows backward") as call:
            header = Header(call.operation, call.number, "gather", 0, (), grad.dtype, 1, "direct", ())
            for peer, _, piece in own_first(call, header, trade, check=ctx.check):
                total[_shifted(rows.between(rank, peer), own)] += piece
        return None, None, None, total.to(grad.dtype)


def _needs(ctx: Any, place: int) -> tuple[bool, ...]:
    return (bool(ctx.needs_input_grad[place]),)


def _shifted(rows: range, start: int) -> slice:
    return slice(rows.start - start, rows.stop - start)
