"""The autograd of row-parallel products: partial sums leave after the product, and gradients arrive.

`MatmulReduceScatter` leaves each rank its own rows; `MatmulAllReduce` gathers them again. Several weights on
one input have their outputs side by side in one message. The hazard is the bias, which every rank holds and
only a row's owner adds: its gradient needs the rows of all ranks, summed in one order. Source: the backward
table of this library's schedules.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.overlap.inputs import How
from stretto.overlap.loops import Scatter, gather, send_everywhere
from stretto.overlap.p2p import Call
from stretto.overlap.pending import Left
from stretto.overlap.products import BiasGradient, WeightGradient, input_gradient, output
from stretto.overlap.routes import Slices
from stretto.overlap.tuning import tuned
from stretto.overlap.two_ranks import exchange_sums

__all__ = ["MatmulAllReduce", "MatmulReduceScatter"]


def _scattered(
    call: Call,
    how: How,
    slices: Slices,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> Tensor:
    """The own rows of x times every weight, side by side, summed over ranks: others' rows are computed first."""
    widths = [len(weight) for weight in weights]
    shape = (slices.total, x.shape[1], sum(widths))

    def run(way: How) -> Scatter:
        cut = slices.cut(way.num_subslices)
        scatter = Scatter(call, way.header(call, x.dtype), shape, cut, x.device, check=way.check)
        for piece in scatter.pieces():
            rows = x[piece.rows]
            partial = x.new_empty(*rows.shape[:2], sum(widths))
            _products(rows, weights, partial)
            scatter.put(piece, partial)
        return scatter

    _, scatter = tuned(call, how, slices.total, (shape[1:], tuple(widths), x.dtype), run)
    return scatter.result(_side_by_side(biases, widths))


def _products(x: Tensor, weights: Sequence[Tensor], into: Tensor) -> None:
    """Rows times every weight, side by side."""
    for part, weight in zip(into.split([len(weight) for weight in weights], -1), weights):
        output(x, weight, None, part)


def _exchanged(
    call: Call,
    how: How,
    slices: Slices,
    left: Left,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> Tensor:
    """Of two ranks: x times every weight, side by side, summed when `left` was waited for."""
    widths = [len(weight) for weight in weights]
    mine = x.new_empty(slices.total, x.shape[1], sum(widths))

    def multiply(rows: slice) -> None:
        _products(x[rows], weights, mine[rows])

    header, bias = how.header(call, x.dtype), _side_by_side(biases, widths)
    return exchange_sums(call, header, mine, slices, left, multiply, bias=bias, check=how.check)


def _side_by_side(biases: Sequence[Tensor | None], widths: Sequence[int]) -> Tensor | None:
    """The biases of all features, zero where a weight has none; None where none has one."""
    given = [bias for bias in biases if bias is not None]
    if len(biases) == 1 or not given:
        return biases[0]
    return torch.cat([given[0].new_zeros(n) if bias is None else bias for bias, n in zip(biases, widths)])


class MatmulReduceScatter(torch.autograd.Function):
    """x (sum(sizes), inner, K), weights (F, K), biases (F,) -> (sizes[rank], inner, sum of F)."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, how: How, slices: Slices, num_weights: int, x: Tensor, *rest: Tensor | None
    ) -> Tensor:
        """Own rows last; one message carries the outputs of all weights."""
        ctx.how, ctx.slices, ctx.num_weights = how, slices, num_weights
        ctx.save_for_backward(x, *rest)
        with how.peers.resume(call):
            return _scattered(call, how, slices, x, rest[:num_weights], rest[num_weights:])  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """One gather of the outputs' gradient feeds the gradients of input, weights and biases."""
        x, *rest = ctx.saved_tensors
        how, slices = ctx.how, ctx.slices
        weights, biases = rest[: ctx.num_weights], rest[ctx.num_weights :]
        needs_x, needs = ctx.needs_input_grad[4], ctx.needs_input_grad[5:]
        widths = [len(weight) for weight in weights]
        dx = torch.empty_like(x) if needs_x else None
        dy = grads[0].contiguous()

        def run(way: How) -> tuple[list[WeightGradient | None], list[BiasGradient | None]]:
            header, cut = way.header(call, x.dtype), slices.cut(way.num_subslices)
            dws = [WeightGradient(weight) if needed else None for weight, needed in zip(weights, needs)]
            dbs = [BiasGradient(bias, cut) if needed else None for bias, needed in zip(biases, needs[len(weights) :])]
            for piece, arrived in gather(call, header, dy, cut, check=way.check):
                dys = arrived.split(widths, -1)
                if dx is not None:
                    input_gradient(dys, weights, dx[piece.rows])
                for one, dw, db in zip(dys, dws, dbs):
                    if dw is not None:
                        dw.add(one, x[piece.rows])
                    if db is not None:
                        db.add(piece, one)
            return dws, dbs

        facts = (dy.shape[1:], tuple(widths), x.dtype, tuple(ctx.needs_input_grad[4:]))
        with how.peers.call("matmul_reduce_scatter backward") as call:
            _, (dws, dbs) = tuned(call, how, slices.total, facts, run)
        return None, None, None, None, dx, *(dw and dw.result() for dw in dws), *(db and db.result() for db in dbs)


class MatmulAllReduce(torch.autograd.Function):
    """x (rows, inner, K), weights (F, K), biases (F,) -> (rows, inner, sum of F), foreign rows still arriving."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        how: How,
        slices: Slices,
        left: Left,
        exchanges: bool,
        num_weights: int,
        x: Tensor,
        *rest: Tensor | None,
    ) -> Tensor:
        """Sums are scattered to the owners of rows, who send them to everyone; `left` gets what is under way."""
        weights, biases = rest[:num_weights], rest[num_weights:]
        ctx.save_for_backward(x, *weights)
        with how.peers.resume(call):
            if exchanges:
                return _exchanged(call, how, slices, left, x, weights, biases)  # type: ignore[arg-type]
            own = _scattered(call, how, slices, x, weights, biases)  # type: ignore[arg-type]
            out = x.new_empty(slices.total, *own.shape[1:])
            left.transfers += send_everywhere(call, how.header(call, x.dtype), own, slices, out, check=how.check)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Nothing is sent: the outputs' gradient is whole on every rank."""
        x, *weights = ctx.saved_tensors
        needs_x, needs = ctx.needs_input_grad[6], ctx.needs_input_grad[7:]
        dys = grads[0].split([len(weight) for weight in weights], -1)
        dx = torch.empty_like(x) if needs_x else None
        if dx is not None:
            input_gradient(dys, weights, dx)
        flat = x.flatten(0, 1)
        dws = [dy.flatten(0, 1).t() @ flat if needed else None for dy, needed in zip(dys, needs)]
        dbs = [dy.sum((0, 1)) if needed else None for dy, needed in zip(dys, needs[len(weights) :])]
        return None, None, None, None, None, None, dx, *dws, *dbs
