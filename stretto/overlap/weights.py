"""Products with a weight whose rows are sharded over data-parallel ranks, gathered behind the product.

The parameter gather of ZeRO-3: the own rows are multiplied first, others' as they arrive, and no rank need
hold the whole weight. Backwards the rows arrive again, for the input's gradient, while the weight's gradient
leaves row slice by row slice for its owners, own last. The hazard: the result is the sum over ranks of what
each computed on its own data, so the caller divides where an average is wanted. Source: the backward table of
this library's schedules.
"""

from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.overlap import reference
from stretto.overlap.inputs import (
    How,
    Sizes,
    check_linear,
    checked_how,
    gathered_slices,
    needed,
    outside_of_graphs,
)
from stretto.overlap.loops import Scatter, gather, sum_dtype
from stretto.overlap.p2p import Call, peers_of
from stretto.overlap.routes import Slices

__all__ = ["weight_gather_matmul"]


@outside_of_graphs
def weight_gather_matmul(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup,
    *,
    sizes: Sizes = None,
    schedule: str = "direct",
    num_subslices: int = 1,
    keep_gathered: bool = False,
    check: bool = True,
) -> Tensor:
    """Multiply own data by a weight of which every rank has some rows, each slice of it as it arrives.

    Args:
        x: (..., K), this rank's own data; rows may differ from rank to rank.
        weight: (own rows, K), this rank's output features of a weight (F, K).
        group: every rank of it makes this call.
        sizes: rows of the weight on every rank: None (equal), "exchange", or one number a rank, as in
            `all_gather_matmul`.
        schedule: "direct", "ring", or "plain" for the collectives.
        num_subslices: pieces per slice.
        keep_gathered: keep the whole weight for the backward; else it is gathered again.
        check: as in `all_gather_matmul`.

    Returns:
        (..., F).

    Gradients:
        x: local, against the weight as it arrives, summed over slices in float32 (float64 for float64).
            weight: reduce-scattered, own rows last: the sum over ranks, each rank's from its own data.

    Raises:
        As `all_gather_matmul`.
    """
    peers = peers_of(group)
    with peers.call("weight_gather_matmul") as call:
        check_linear(x, [weight], [None], 0)
        how = checked_how(peers, schedule, num_subslices, check, needed(x, weight), keep_gathered)
        rows = weight.unsqueeze(1).contiguous()
        slices = gathered_slices(call, how, how.header(call, x.dtype), rows, sizes)
    if schedule == "plain":
        return F.linear(x, reference.all_gather(rows, slices.sizes, group).squeeze(1))
    result: Tensor = _WeightGatherMatmul.apply(call, how, slices, x.flatten(0, -2).contiguous(), rows)
    return result.view(*x.shape[:-1], slices.total)


class _WeightGatherMatmul(torch.autograd.Function):
    """x (n, K), weight (own rows, 1, K) -> (n, F)."""

    @staticmethod
    def forward(ctx: Any, call: Call, how: How, slices: Slices, x: Tensor, weight: Tensor) -> Tensor:
        out = x.new_empty(len(x), slices.total)
        kept = weight.new_empty(slices.total, 1, weight.shape[2]) if how.keep_gathered else None
        with how.peers.resume(call):
            header = how.header(call, x.dtype)
            for piece, rows in gather(call, header, weight, slices, check=how.check, into=kept):
                out[:, piece.rows] = x @ rows.squeeze(1).t()
        ctx.how, ctx.slices = how, slices
        ctx.save_for_backward(x, weight if kept is None else kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        how, dy = ctx.how, grads[0]
        needs_x, needs_w = ctx.needs_input_grad[3:]
        kept = how.keep_gathered
        dx = torch.zeros_like(x, dtype=sum_dtype(x.dtype)) if needs_x and not kept else None
        dw = None
        if needs_w or dx is not None:
            with how.peers.call("weight_gather_matmul backward") as call:
                dw = _gradients(call, ctx, x, weight, dy, dx)
        if needs_x:
            dx = dy @ weight.squeeze(1) if dx is None else dx.to(x.dtype)
        return None, None, None, dx, dw


def _gradients(call: Call, ctx: Any, x: Tensor, weight: Tensor, dy: Tensor, dx: Tensor | None) -> Tensor | None:
    """One loop: rows of the weight arrive for the input's gradient while the weight's gradient leaves."""
    how, slices = ctx.how, ctx.slices
    header = how.header(call, x.dtype)
    scatter = None
    if ctx.needs_input_grad[4]:
        scatter = Scatter(call, header, (slices.total, 1, x.shape[1]), slices, x.device, check=how.check)
    leaving = scatter.pieces() if scatter is not None else iter(())
    arriving = gather(call, header, weight, slices, check=how.check) if dx is not None else iter(())
    for piece, arrived in zip_longest(leaving, arriving):
        if scatter is not None:
            scatter.put(piece, (dy[:, piece.rows].t() @ x).unsqueeze(1))
        if dx is not None and arrived is not None:
            place, rows = arrived
            dx += dy[:, place.rows] @ rows.squeeze(1)
    return scatter.result() if scatter is not None else None
