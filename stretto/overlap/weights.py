"""Products with a weight whose rows are sharded over data-parallel ranks, gathered behind the product.

The parameter gather of ZeRO-3: the own rows are multiplied first, others' as they arrive, and no rank need
hold the whole weight. Backwards the rows arrive again, for the input's gradient, while the weight's gradient
leaves row slice by row slice for its owners, own last. The hazard: the result is the sum over ranks of what
each computed on its own data, so the caller divides where an average is wanted. Source: the backward table of
this library's schedules.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.overlap.inputs import (
    How,
    Sizes,
    check_linear,
    checked_how,
    gathered_slices,
    needed,
    outside_of_graphs,
)
from stretto.overlap.loops import Piece, Scatter, gather, sum_dtype
from stretto.overlap.p2p import Call, peers_of
from stretto.overlap.routes import Slices
from stretto.overlap.tuning import tuned

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
    tuned_as: str = "",
) -> Tensor:
    """Multiply own data by a weight of which every rank has some rows, each slice of it as it arrives.

    Args:
        x: (..., K), this rank's own data; rows may differ from rank to rank.
        weight: (own rows, K), this rank's output features of a weight (F, K).
        group: every rank of it makes this call.
        sizes: rows of the weight on every rank: None (equal), "exchange", or one number a rank, as in
            `all_gather_matmul`.
        schedule: as in `all_gather_matmul`.
        num_subslices: pieces per slice.
        keep_gathered: keep the whole weight for the backward; else it is gathered again.
        check: as in `all_gather_matmul`, and so `tuned_as`.
        tuned_as: see `check`.

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
        gradients, device = needed(x, weight), x.device
        how = checked_how(
            peers, schedule, num_subslices, check, gradients, keep_gathered, device=device, tuned_as=tuned_as
        )
        rows = weight.unsqueeze(1).contiguous()
        slices = gathered_slices(call, how, rows, sizes)
    result: Tensor = _WeightGatherMatmul.apply(call, how, slices, x.flatten(0, -2).contiguous(), rows)
    return result.view(*x.shape[:-1], slices.total)


class _WeightGatherMatmul(torch.autograd.Function):
    """x (n, K), weight (own rows, 1, K) -> (n, F)."""

    @staticmethod
    def forward(ctx: Any, call: Call, how: How, slices: Slices, x: Tensor, weight: Tensor) -> Tensor:
        out = x.new_empty(len(x), slices.total)
        kept = weight.new_empty(slices.total, 1, weight.shape[2]) if how.keep_gathered else None

        def run(way: How) -> None:
            header, cut = way.header(call, x.dtype), slices.cut(way.num_subslices)
            for piece, rows in gather(call, header, weight, cut, check=way.check, into=kept):
                torch.mm(x, rows.squeeze(1).t(), out=out[:, piece.rows])

        with how.peers.resume(call):
            tuned(call, how, slices.total, (weight.shape[2], x.dtype, how.keep_gathered), run)
        ctx.how, ctx.slices = how, slices
        ctx.save_for_backward(x, weight if kept is None else kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        how, dy = ctx.how, grads[0]
        needs_x, needs_w = ctx.needs_input_grad[3:]
        gathers = needs_x and not how.keep_gathered
        dx: Tensor | None = None
        dw: Tensor | None = None

        def run(way: How) -> tuple[Tensor | None, Tensor | None]:
            return _gradients(call, ctx, way, x, weight, dy, gathers)

        if needs_w or gathers:
            facts = (x.shape[1], x.dtype, gathers, needs_w)
            with how.peers.call("weight_gather_matmul backward") as call:
                _, (dx, dw) = tuned(call, how, ctx.slices.total, facts, run)
        if needs_x and not gathers:
            dx = dy @ weight.squeeze(1)
        return None, None, None, dx, dw


def _gradients(
    call: Call, ctx: Any, how: How, x: Tensor, weight: Tensor, dy: Tensor, gathers: bool
) -> tuple[Tensor | None, Tensor | None]:
    """One loop: rows of the weight arrive for the input's gradient while the weight's gradient leaves."""
    slices, header = ctx.slices.cut(how.num_subslices), how.header(call, x.dtype)
    dx = torch.zeros_like(x, dtype=sum_dtype(x.dtype)) if gathers else None
    if not ctx.needs_input_grad[4]:
        assert dx is not None
        for place, rows in gather(call, header, weight, slices, check=how.check):
            dx += dy[:, place.rows] @ rows.squeeze(1)
        return dx.to(x.dtype), None
    scatter = Scatter(call, header, (slices.total, 1, x.shape[1]), slices, x.device, check=how.check)

    def leave(pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            scatter.put(piece, (dy[:, piece.rows].t() @ x).unsqueeze(1))

    if dx is None:
        leave(scatter.pieces())
        return None, scatter.result()
    # Two products a step: the weight need not be cut.
    arriving = gather(call, replace(header, num_subslices=1), weight, slices.cut(1), check=how.check)
    for (place, rows), step in zip(arriving, scatter.steps()):
        leave(step)
        call.begin_product()
        dx += dy[:, place.rows] @ rows.squeeze(1)
    return dx.to(x.dtype), scatter.result()
