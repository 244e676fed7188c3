"""The autograd of column-parallel products: rows arrive before the product, input gradients leave after it.

`AllGatherMatmul` has its rows sharded; `ReplicateMatmul` has them whole on every rank. In both backwards the
input's gradient leaves beside the weights' gradients. Where rows are whole it may still be arriving when these are
done: `SummedGradient`, the node before, waits for it when autograd has nothing else to do. The hazard: which
gradients are needed decides what is sent, so it must be the same on every rank. Source: the backward table of this
library's schedules; the other half of a batch beside a column layer's sums is Domino's (arXiv 2409.15241).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.overlap.inputs import How
from stretto.overlap.loops import Scatter, gather, send_everywhere
from stretto.overlap.p2p import Call
from stretto.overlap.pending import Left
from stretto.overlap.products import WeightGradient, input_partial, output
from stretto.overlap.routes import Slices, slice_sizes
from stretto.overlap.tuning import tuned
from stretto.overlap.two_ranks import exchange_sums
from stretto.overlap.waits import wait_late

__all__ = ["AllGatherMatmul", "ReplicateMatmul"]


class AllGatherMatmul(torch.autograd.Function):
    """x (sizes[rank], inner, K) and weights (F, K) -> (sum(sizes), inner, F) for each weight."""

    @staticmethod
    def forward(ctx: Any, call: Call, how: How, slices: Slices, num_weights: int, x: Tensor, *rest: Tensor) -> Any:
        """Each slice is multiplied as it arrives, own first."""
        weights, biases = rest[:num_weights], rest[num_weights:]
        kept = x.new_empty(slices.total, *x.shape[1:]) if how.keep_gathered else None
        outs = [weight.new_empty(slices.total, x.shape[1], len(weight)) for weight in weights]

        def run(way: How) -> None:
            header, cut = way.header(call, x.dtype), slices.cut(way.num_subslices)
            for piece, data in gather(call, header, x, cut, check=way.check, into=kept):
                for out, weight, bias in zip(outs, weights, biases):
                    output(data, weight, bias, out[piece.rows])

        with how.peers.resume(call):
            tuned(call, how, slices.total, (x.shape[1:], num_weights, x.dtype, how.keep_gathered), run)
        ctx.how, ctx.slices = how, slices
        ctx.save_for_backward(x if kept is None else kept, *weights)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Input gradients leave and, unless it was kept, the input arrives, beside two products a slice."""
        x, *weights = ctx.saved_tensors
        needs_x, needs_w, needs_b = _needs(ctx.needs_input_grad[4:], len(weights))
        grads = tuple(grad.contiguous() for grad in grads)
        dx = None
        if needs_x or (any(needs_w) and not ctx.how.keep_gathered):
            facts = (x.shape[1:], len(weights), x.dtype, ctx.how.keep_gathered, tuple(ctx.needs_input_grad[4:]))

            def run(way: How) -> tuple[Tensor | None, list[WeightGradient | None]]:
                return _input_and_weight_gradients(call, ctx, way, x, weights, grads)

            with ctx.how.peers.call("all_gather_matmul backward") as call:
                _, (dx, sums) = tuned(call, ctx.how, ctx.slices.total, facts, run)
        else:
            sums = _started(ctx.needs_input_grad[5:], weights)
            _add(sums, grads, x, slice(None))
        dbs = [grad.sum((0, 1)) if needed else None for grad, needed in zip(grads, needs_b)]
        return None, None, None, None, dx, *(s and s.result() for s in sums), *dbs


def _input_and_weight_gradients(
    call: Call,
    ctx: Any,
    how: How,
    x: Tensor,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> tuple[Tensor | None, list[WeightGradient | None]]:
    slices, header = ctx.slices.cut(how.num_subslices), how.header(call, x.dtype)
    sums = _started(ctx.needs_input_grad[5:], weights)
    scatter = None
    if ctx.needs_input_grad[4]:
        scatter = Scatter(call, header, (slices.total, *x.shape[1:]), slices, x.device, check=how.check)
    regather = any(sums) and not how.keep_gathered
    at_once = how.keep_gathered and scatter is not None and scatter.waits_in_result
    if regather and scatter is not None:  # two products a step: the input need not be cut
        arriving = gather(call, replace(header, num_subslices=1), x, slices.cut(1), check=how.check)
        for (place, data), step in zip(arriving, scatter.steps()):
            for piece in step:
                scatter.put(piece, input_partial(grads, weights, piece.rows, x.dtype))
            call.begin_product()
            _add(sums, grads, data, place.rows)
    elif regather:
        for place, data in gather(call, header, x, slices, check=how.check):
            _add(sums, grads, data, place.rows)
    elif scatter is not None:
        for piece in scatter.pieces():
            scatter.put(piece, input_partial(grads, weights, piece.rows, x.dtype))
            if not at_once:
                call.begin_product()
                _add(sums, grads, x[piece.rows], piece.rows)
                call.end_product(piece.step, piece.subslice, piece.owner)
    if at_once:  # one product beside all that is still on its way, and not one a slice
        _add_whole(call, sums, grads, x)
    return scatter.result() if scatter is not None else None, sums


class UnderWay:
    """The sums that a backward of `ReplicateMatmul` left for the node before it."""

    left: Left | None = None

    def wait(self) -> None:
        """Until they have arrived."""
        if self.left is not None:
            self.left.wait()
            self.left = None


class SummedGradient(torch.autograd.Function):
    """x -> x, whose gradient is complete behind this node only."""

    @staticmethod
    def forward(ctx: Any, under_way: UnderWay, x: Tensor) -> Tensor:
        """Nothing."""
        ctx.under_way = under_way
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        """Wait for the sums, which arrive in the gradient itself."""
        ctx.under_way.wait()
        return None, grads[0]


class ReplicateMatmul(torch.autograd.Function):
    """x (rows, inner, K), the same on every rank, and weights (F, K) -> (rows, inner, F) for each weight."""

    @classmethod
    def behind_sums(cls, how: How, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Any:
        """The outputs of x out of a `SummedGradient`, which waits as late as it can."""
        under_way = UnderWay()
        summed: Tensor = SummedGradient.apply(under_way, x)
        wait_late(summed)
        return cls.apply(how, under_way, len(weights), summed, *weights, *biases)

    @staticmethod
    def forward(ctx: Any, how: How, under_way: UnderWay, num_weights: int, x: Tensor, *rest: Tensor) -> Any:
        """Products alone."""
        weights, biases = rest[:num_weights], rest[num_weights:]
        ctx.how, ctx.under_way = how, under_way
        ctx.save_for_backward(x, *weights)
        outs = [weight.new_empty(*x.shape[:2], len(weight)) for weight in weights]
        return tuple(output(x, weight, bias, out) for out, weight, bias in zip(outs, weights, biases))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Input gradients leave beside their products and arrive beside the weights' gradients and what follows."""
        x, *weights = ctx.saved_tensors
        needs_x, needs_w, needs_b = _needs(ctx.needs_input_grad[3:], len(weights))
        grads = tuple(grad.contiguous() for grad in grads)
        dx = None
        if needs_x:
            facts = (x.shape[1:], len(weights), x.dtype, tuple(ctx.needs_input_grad[3:]))

            def run(way: How) -> tuple[Tensor, list[WeightGradient | None], Left]:
                left = Left(call)
                dx, sums = _summed_input_gradient(call, ctx, way, x, weights, grads, left)
                if call.is_trial:
                    left.wait()
                return dx, sums, left

            how = ctx.how
            if how.schedule == "auto" and how.peers.world_size == 2:  # what hides the sums is not known
                how = replace(how, schedule="direct", num_subslices=1)
            with how.peers.call("replicate_matmul backward") as call:
                _, (dx, sums, ctx.under_way.left) = tuned(call, how, x.shape[0], facts, run)
            if torch.is_anomaly_enabled():  # it reads every gradient at once
                ctx.under_way.wait()
        else:
            sums = _started(needs_w, weights)
            _add(sums, grads, x, slice(None))
        dbs = [grad.sum((0, 1)) if needed else None for grad, needed in zip(grads, needs_b)]
        return None, None, None, dx, *(s and s.result() for s in sums), *dbs


def _summed_input_gradient(
    call: Call,
    ctx: Any,
    how: How,
    x: Tensor,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    left: Left,
) -> tuple[Tensor, list[WeightGradient | None]]:
    """The input's gradient, complete when `left` was waited for, and the weights'."""
    sums = _started(ctx.needs_input_grad[4:], weights)
    slices = Slices(tuple(slice_sizes(x.shape[0], call.peers.world_size)), how.num_subslices)
    header = how.header(call, x.dtype)
    if call.peers.world_size == 2 and how.schedule == "direct":
        mine = torch.empty_like(x)

        def multiply(rows: slice) -> None:
            mine[rows] = input_partial(grads, weights, rows, x.dtype)

        dx = exchange_sums(call, header, mine, slices, left, multiply, check=how.check)
        _add_whole(call, sums, grads, x)
        return dx, sums
    scatter = Scatter(call, header, tuple(x.shape), slices, x.device, check=how.check)
    for piece in scatter.pieces():
        scatter.put(piece, input_partial(grads, weights, piece.rows, x.dtype))
    dx = torch.empty_like(x)
    if how.schedule == "direct":
        left.transfers += send_everywhere(call, header, scatter.result(), slices, dx, check=how.check)
        _add_whole(call, sums, grads, x)
        return dx, sums
    for piece, _ in gather(call, header, scatter.result(), slices, check=how.check, into=dx):
        _add(sums, grads, x[piece.rows], piece.rows)
    return dx, sums


def _started(needed: Sequence[bool], weights: Sequence[Tensor]) -> list[WeightGradient | None]:
    return [WeightGradient(weight) if need else None for weight, need in zip(weights, needed)]


def _needs(needed: Sequence[bool], num_weights: int) -> tuple[bool, Sequence[bool], Sequence[bool]]:
    return needed[0], needed[1 : 1 + num_weights], needed[1 + num_weights :]


def _add_whole(call: Call, sums: Sequence[WeightGradient | None], grads: Sequence[Tensor], x: Tensor) -> None:
    """One product of all rows."""
    call.begin_product()
    _add(sums, grads, x, slice(None))
    call.end_product(call.peers.world_size - 1, 0, call.peers.rank)


def _add(sums: Sequence[WeightGradient | None], grads: Sequence[Tensor], x: Tensor, rows: slice) -> None:
    for total, grad in zip(sums, grads):
        if total is not None:
            total.add(grad[rows], x)
