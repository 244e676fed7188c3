"""A row layer whose input features come in blocks, each sharded by itself: attention and MLP side by side.

A rank has its part of every block, but `torch.chunk`, and with it every checkpoint and optimizer, cuts the
weight's columns as one. The weight stays cut so; before a product each rank is sent the columns that its
features need and, backwards, sends their gradients to the owners. The hazard is the cost: up to the rank's
share of the weight moves at every forward, and again at every backward where the weight is trained, hidden
behind nothing. (A strided placement would move nothing, but distributed checkpoints refuse it.) Source: the
exchange's loops.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.overlap.exchange import Trade, own_last
from stretto.overlap.faults import Header
from stretto.overlap.p2p import Peers
from stretto.overlap.routes import slice_sizes

__all__ = ["PackedColumns", "packed_columns"]


@dataclass(frozen=True)
class PackedColumns:
    """Which columns of a weight every rank owns and uses; equal on every rank."""

    blocks: tuple[int, ...]
    """Input features of each block."""
    world_size: int

    def used(self, rank: int) -> list[int]:
        """The columns that a rank's features need: its part of every block, as `torch.chunk` cuts it."""
        columns: list[int] = []
        start = 0
        for block in self.blocks:
            sizes = slice_sizes(block, self.world_size)
            first = start + sum(sizes[:rank])
            columns += range(first, first + sizes[rank])
            start += block
        return columns

    def owned(self, rank: int) -> range:
        """The columns in a rank's shard."""
        sizes = slice_sizes(sum(self.blocks), self.world_size)
        return range(sum(sizes[:rank]), sum(sizes[: rank + 1]))

    def sent(self, owner: int, user: int) -> list[int]:
        """Where in `owner`'s shard the columns are that `user` needs, in the order of use."""
        owned = self.owned(owner)
        return [column - owned.start for column in self.used(user) if column in owned]

    def placed(self, owner: int, user: int) -> list[int]:
        """Where among the columns that `user` uses those of `owner` are."""
        owned = self.owned(owner)
        return [place for place, column in enumerate(self.used(user)) if column in owned]


def packed_columns(local: Tensor, columns: PackedColumns, peers: Peers, *, check: bool) -> Tensor:
    """The columns of a weight that this rank's features need.

    Args:
        local: (F, own columns), this rank's shard, as `torch.chunk` cuts the weight.
        columns: who owns and uses what.
        peers: every rank makes this call.
        check: precede payloads by headers.

    Returns:
        (F, this rank's part of every block).

    Gradients:
        Sent to the owner; every column is used once.
    """
    if peers.world_size == 1:
        return local
    found: Tensor = _Exchange.apply(columns, peers, check, local)
    return found


@cache
def _places(columns: PackedColumns, rank: int, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """For every peer: the own shard's columns that it uses, and the places of those that it owns among the used."""

    def index(places: list[int]) -> Tensor:
        return torch.tensor(places, dtype=torch.long, device=device)

    peers = range(columns.world_size)
    sent = [index(columns.sent(rank, peer)) for peer in peers]
    return sent, [index(columns.placed(peer, rank)) for peer in peers]


class _Exchange(torch.autograd.Function):
    """(F, own columns) -> (F, used columns)."""

    @staticmethod
    def forward(ctx: Any, columns: PackedColumns, peers: Peers, check: bool, local: Tensor) -> Tensor:
        ctx.columns, ctx.peers, ctx.check = columns, peers, check
        sent, placed = _places(columns, peers.rank, local.device)
        ctx.num_own = local.shape[1]
        out = local.new_empty(len(local), sum(map(len, placed)))
        _move(peers, "packed weight columns", (ctx.needs_input_grad[3],), check, local, sent, out, placed)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        sent, placed = _places(ctx.columns, ctx.peers.rank, grads[0].device)
        total = grads[0].new_empty(len(grads[0]), ctx.num_own)
        _move(ctx.peers, "packed weight columns backward", (), ctx.check, grads[0], placed, total, sent)
        return None, None, None, total


def _move(
    peers: Peers,
    operation: str,
    gradients: tuple[bool, ...],
    check: bool,
    source: Tensor,
    taken: list[Tensor],
    into: Tensor,
    put: list[Tensor],
) -> None:
    """Send every peer its columns `taken[peer]` of `source`; `put` those from it into columns of `into`."""
    height = len(source)
    trade = Trade(
        make=lambda peer, _: source.index_select(1, taken[peer]),
        room=lambda peer, _: source.new_empty(height, len(put[peer])),
        sent=lambda peer: (height, len(taken[peer])),
        received=lambda peer: (height, len(put[peer])),
        num_subslices=1,
        device=source.device,
    )
    with peers.call(operation) as call:
        header = Header(call.operation, call.number, "gather", 0, (), source.dtype, 1, "direct", gradients)
        for peer, _, piece in own_last(call, header, trade, check=check):
            into.index_copy_(1, put[peer], piece)
