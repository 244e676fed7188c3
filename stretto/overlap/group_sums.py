"""Sums over a group of what is small and hides behind nothing: norms' and adapters' gradients, one number a row.

They are announced, kept in the report and ended by a fault as every other call is. Every rank adds the parts in the
order of ranks, in `sum_dtype`; more than a few numbers of more than two ranks are added by their owners, own part
last, and sent on: the same bits on every rank. The hazard: each is waited for at once. Source: the conjugate pairs of
Megatron-LM's sequence parallelism.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.overlap.faults import Header
from stretto.overlap.lane import Lane
from stretto.overlap.loops import Scatter, gather, sum_dtype
from stretto.overlap.p2p import Call, Peers
from stretto.overlap.routes import Slices, slice_sizes

__all__ = ["sum_over_ranks", "with_summed_gradients"]

_FEW = 1 << 14  # numbers that go whole to every peer: one step instead of two


def sum_over_ranks(peers: Peers, operation: str, x: Tensor, *, check: bool) -> Tensor:
    """The sum of every rank's x, of its shape and in `sum_dtype`."""
    wide = x.to(sum_dtype(x.dtype))
    if peers.world_size == 1:
        return wide
    with peers.call(operation) as call:
        header = Header(operation, call.number, "scatter", 0, (), wide.dtype, 1, "direct", ())
        added = _added_by_all if wide.numel() <= _FEW or peers.world_size == 2 else _added_by_owners
        return added(call, header, wide.flatten().contiguous(), check).view(x.shape)


def _added_by_all(call: Call, header: Header, mine: Tensor, check: bool) -> Tensor:
    shape, rank = tuple(mine.shape), call.peers.rank
    lane = Lane(call, "scatter", header, lambda _: (shape, shape), device=mine.device, check=check)
    parts = torch.empty(call.peers.world_size, *shape, dtype=mine.dtype, device=mine.device)
    parts[rank] = mine
    sent = [lane.post(step, 0, mine, parts[lane.routes[step].recv_from]) for step in range(lane.last)]
    for transfer in sent:
        call.wait(transfer)
    total = parts[0].clone()  # or the sum would keep every part
    for part in parts[1:]:
        total += part
    return total


def _added_by_owners(call: Call, header: Header, mine: Tensor, check: bool) -> Tensor:
    slices, out = Slices(tuple(slice_sizes(len(mine), call.peers.world_size))), torch.empty_like(mine)
    scatter = Scatter(call, header, tuple(mine.shape), slices, mine.device, check=check)
    for piece in scatter.pieces():
        scatter.put(piece, mine[piece.rows].clone())
    for _ in gather(call, header, scatter.result(), slices, check=check, into=out):
        pass
    return out


def with_summed_gradients(peers: Peers, operation: str, tensors: list[Tensor], *, check: bool) -> list[Tensor]:
    """The same tensors, whose gradients will be summed over the ranks before they are rounded: one message of all.

    Which of them need a gradient must be the same on every rank. Complex ones are refused with a `ValueError`.
    """
    if any(tensor.is_complex() for tensor in tensors):
        raise ValueError("gradients of complex parameters are not summed over ranks; make them real, view_as_real")
    if peers.world_size == 1:
        return tensors
    return list(_SummedGradients.apply(peers, operation, check, *tensors))


class _SummedGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, peers: Peers, operation: str, check: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.peers, ctx.operation, ctx.check = peers, operation, check
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found: list[Tensor | None] = [None] * len(grads)
        needed = [i for i, is_needed in enumerate(ctx.needs_input_grad[3:]) if is_needed]
        wide = torch.cat([grads[i].flatten().to(sum_dtype(grads[i].dtype)) for i in needed])
        total = sum_over_ranks(ctx.peers, ctx.operation, wide, check=ctx.check)
        for i, part in zip(needed, total.split([grads[i].numel() for i in needed])):
            found[i] = part.view(grads[i].shape).to(grads[i].dtype)
        return None, None, None, *found
