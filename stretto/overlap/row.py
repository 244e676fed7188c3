"""The autograd of row-parallel products: partial sums leave after the product, and gradients arrive.

`MatmulReduceScatter` leaves each rank its own rows; `MatmulAllReduce` gathers them again. The hazard is the
bias, which every rank holds and only a row's owner adds: its gradient needs the rows of all ranks, summed in
one order. Source: the backward table of this library's schedules.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.overlap.inputs import How
from stretto.overlap.loops import Scatter, gather, send_everywhere
from stretto.overlap.p2p import Call, Transfer
from stretto.overlap.products import BiasGradient, WeightGradient, output
from stretto.overlap.routes import Slices

__all__ = ["MatmulAllReduce", "MatmulReduceScatter"]


def _scattered(
    call: Call,
    how: How,
    slices: Slices,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """The own rows of x times weight summed over ranks, plus bias: others' rows are computed first."""
    shape = (slices.total, x.shape[1], weight.shape[0])
    scatter = Scatter(call, how.header(call, x.dtype), shape, slices, x.device, check=how.check)
    for piece in scatter.pieces():
        rows = x[piece.rows]
        scatter.put(piece, output(rows, weight, None, x.new_empty(*rows.shape[:2], weight.shape[0])))
    return scatter.result(bias)


class MatmulReduceScatter(torch.autograd.Function):
    """x (sum(sizes), inner, K), weight (F, K), bias (F,) -> (sizes[rank], inner, F)."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, how: How, slices: Slices, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Own rows last."""
        ctx.how, ctx.slices = how, slices
        ctx.save_for_backward(x, weight, bias)
        with how.peers.resume(call):
            return _scattered(call, how, slices, x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """One gather of the output's gradient feeds the gradients of input, weight and bias."""
        x, weight, bias = ctx.saved_tensors
        how, slices = ctx.how, ctx.slices
        needs_x, needs_w, needs_b = ctx.needs_input_grad[3:]
        dx = torch.empty_like(x) if needs_x else None
        dw = WeightGradient(weight) if needs_w else None
        db = BiasGradient(bias, slices) if needs_b else None
        with how.peers.call("matmul_reduce_scatter backward") as call:
            header = how.header(call, x.dtype)
            for piece, dy in gather(call, header, grads[0].contiguous(), slices, check=how.check):
                if dx is not None:
                    torch.mm(dy.flatten(0, 1), weight, out=dx[piece.rows].flatten(0, 1))
                if dw is not None:
                    dw.add(dy, x[piece.rows])
                if db is not None:
                    db.add(piece, dy)
        return None, None, None, dx, dw and dw.result(), db and db.result()


class MatmulAllReduce(torch.autograd.Function):
    """x (rows, inner, K), weight (F, K), bias (F,) -> (rows, inner, F), its foreign rows still arriving."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        how: How,
        slices: Slices,
        transfers: list[Transfer],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """Sums are scattered to the owners of rows, who send them to everyone; `transfers` gets these."""
        ctx.save_for_backward(x, weight)
        out = x.new_empty(slices.total, x.shape[1], weight.shape[0])
        with how.peers.resume(call):
            own = _scattered(call, how, slices, x, weight, bias)
            header = how.header(call, x.dtype)
            transfers += send_everywhere(call, header, own, slices, out, check=how.check)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Nothing is sent: the output's gradient is whole on every rank."""
        x, weight = ctx.saved_tensors
        needs_x, needs_w, needs_b = ctx.needs_input_grad[4:]
        dy = grads[0].flatten(0, 1)
        dx = (dy @ weight).view_as(x) if needs_x else None
        dw = dy.t() @ x.flatten(0, 1) if needs_w else None
        return None, None, None, None, dx, dw, dy.sum(0) if needs_b else None
