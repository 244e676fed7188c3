"""The autograd of sequence-parallel attention: rows sharded outside, heads sharded inside.

`MatmulAllToAll` projects the features that each rank's heads need and sends them; `AttentionAllToAll` attends
for the queries that each rank owns and sends their outputs, multiplied on arrival by the output projection if
it is given. The hazard: the weights are whole on every rank, so their gradients here are this rank's rows'
part of the sum. Source: DeepSpeed-Ulysses (arXiv 2309.14509); hidden as in CommFuse (arXiv 2604.24013).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.overlap.exchange import Trade, own_first, own_last
from stretto.overlap.inputs import How
from stretto.overlap.loops import sum_dtype
from stretto.overlap.p2p import Call
from stretto.overlap.products import output
from stretto.overlap.queries import QuerySlices
from stretto.overlap.routes import Slices
from stretto.overlap.tuning import tuned

__all__ = ["AttentionAllToAll", "Layout", "MatmulAllToAll"]


@dataclass(frozen=True)
class Layout:
    """Which rows and which features of every rank."""

    rows: Slices
    features: tuple[Slices, ...]
    """For each weight, the features of every rank."""

    def cut(self, num_subslices: int) -> "Layout":
        """The same with rows in another number of sub-slices."""
        return replace(self, rows=self.rows.cut(num_subslices))

    def width(self, rank: int) -> int:
        """Features of a rank, over all weights."""
        return sum(f.sizes[rank] for f in self.features)

    def parts(self, rank: int) -> list[tuple[slice, slice]]:
        """For each weight, the rank's features in the weight and their columns in its message."""
        start, found = 0, []
        for f in self.features:
            found.append((f.rows(rank), slice(start, start + f.sizes[rank])))
            start += f.sizes[rank]
        return found


@dataclass
class Gradients:
    """The sums that the backward of a projection makes, in `sum_dtype`; None where none is needed."""

    x: Tensor | None
    weights: list[Tensor | None]
    biases: list[Tensor | None]

    def gather(self, call: Call, how: How, layout: Layout, grad: Tensor, x: Tensor, weights: list[Tensor]) -> None:
        """Add what the head groups of the own rows give, as their gradients arrive."""
        rank, rows, inner = call.peers.rank, layout.rows, x.shape[1]
        trade = Trade(
            make=lambda peer, s: grad[rows.rows(peer, s)],
            room=lambda peer, s: x.new_empty(rows.size(rank, s), inner, layout.width(peer)),
            sent=lambda peer: (rows.sizes[peer], inner, layout.width(rank)),
            received=lambda peer: (rows.sizes[rank], inner, layout.width(peer)),
            num_subslices=rows.num_subslices,
            device=x.device,
        )
        for peer, s, piece in own_first(call, how.header(call, x.dtype), trade, check=how.check):
            place = rows.local(rank, s)
            mine = x[place].flatten(0, 1)
            for (features, columns), weight, dw, db in zip(layout.parts(peer), weights, self.weights, self.biases):
                part = piece[..., columns].flatten(0, 1)
                if self.x is not None:
                    self.x[place] += (part @ weight[features]).view(len(piece), *x.shape[1:])
                if dw is not None:
                    dw[features] += part.t() @ mine
                if db is not None:
                    db[features] += part.sum(0, dtype=db.dtype)


class MatmulAllToAll(torch.autograd.Function):
    """x (sizes[rank], inner, K), weights (F, K) -> (sum(sizes), inner, sum of this rank's features)."""

    @staticmethod
    def forward(ctx: Any, call: Call, how: How, layout: Layout, x: Tensor, num_weights: int, *rest: Tensor) -> Tensor:
        """Others' head groups are computed and sent first, the own last."""
        weights, biases = rest[:num_weights], rest[num_weights:]
        rank, inner = call.peers.rank, x.shape[1]
        out = x.new_empty(layout.rows.total, inner, layout.width(rank))

        def run(way: How) -> None:
            rows = layout.rows.cut(way.num_subslices)

            def make(peer: int, s: int) -> Tensor:
                mine = x[rows.local(rank, s)]
                made = x.new_empty(len(mine), inner, layout.width(peer))
                for (features, columns), weight, bias in zip(layout.parts(peer), weights, biases):
                    output(mine, weight[features], None if bias is None else bias[features], made[..., columns])
                return made

            trade = Trade(
                make=make,
                room=lambda peer, s: out[rows.rows(peer, s)],
                sent=lambda peer: (rows.sizes[rank], inner, layout.width(peer)),
                received=lambda peer: (rows.sizes[peer], inner, layout.width(rank)),
                num_subslices=rows.num_subslices,
                device=x.device,
            )
            for peer, s, piece in own_last(call, way.header(call, x.dtype), trade, check=way.check):
                if peer == rank:
                    out[rows.rows(rank, s)] = piece

        facts = (x.shape[1:], tuple(f.sizes for f in layout.features), x.dtype)
        with how.peers.resume(call):
            tuned(call, how, layout.rows.total, facts, run)
        ctx.how, ctx.layout = how, layout
        ctx.save_for_backward(x, *weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of others' rows leave; each head group of the own rows is used as it comes, own first."""
        x, *weights = ctx.saved_tensors
        how, layout, grad = ctx.how, ctx.layout, grads[0].contiguous()
        needs_x, needs_w = ctx.needs_input_grad[3], ctx.needs_input_grad[5 : 5 + len(weights)]
        needs_b = ctx.needs_input_grad[5 + len(weights) :]
        facts = (x.shape[1:], tuple(f.sizes for f in layout.features), x.dtype, tuple(ctx.needs_input_grad))

        def run(way: How) -> Gradients:
            found = Gradients(
                torch.zeros_like(x, dtype=sum_dtype(x.dtype)) if needs_x else None,
                [torch.zeros_like(w, dtype=sum_dtype(w.dtype)) if n else None for w, n in zip(weights, needs_w)],
                [w.new_zeros(len(w), dtype=sum_dtype(w.dtype)) if n else None for w, n in zip(weights, needs_b)],
            )
            found.gather(call, way, layout.cut(way.num_subslices), grad, x, weights)
            return found

        with how.peers.call("matmul_all_to_all backward") as call:
            _, sums = tuned(call, how, layout.rows.total, facts, run)
        dx, dws, dbs = sums.x, sums.weights, sums.biases
        found = (None if g is None else g.to(x.dtype) for g in (*dws, *dbs))
        return None, None, None, None if dx is None else dx.to(x.dtype), None, *found


class AttentionAllToAll(torch.autograd.Function):
    """q, k, v (sum(sizes), batch, own heads, d) -> (sizes[rank], batch, all heads' features or F)."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        how: How,
        layout: Layout,
        queries: QuerySlices,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        """Others' queries are computed and sent first, own last; head groups are joined as they come."""
        rank, (heads,) = call.peers.rank, layout.features
        batch, own = q.shape[1], layout.rows.sizes[call.peers.rank]
        joined = q.new_empty(own, batch, heads.total)

        def run(way: How) -> Tensor | None:
            rows = layout.rows.cut(way.num_subslices)
            queries.forget()
            trade = Trade(
                make=lambda peer, s: queries.output(rows.rows(peer, s)),
                room=lambda peer, s: q.new_empty(rows.size(rank, s), batch, heads.sizes[peer]),
                sent=lambda peer: (rows.sizes[peer], batch, heads.sizes[rank]),
                received=lambda peer: (own, batch, heads.sizes[peer]),
                num_subslices=rows.num_subslices,
                device=q.device,
            )
            y = None
            if weight is not None:
                y = q.new_zeros(own, batch, len(weight), dtype=sum_dtype(q.dtype))
            for peer, s, piece in own_last(call, way.header(call, q.dtype), trade, check=way.check):
                place, columns = rows.local(rank, s), heads.rows(peer)
                joined[place, :, columns] = piece
                if weight is not None and y is not None:
                    part = piece.flatten(0, 1) @ weight[:, columns].t()
                    y[place] += part.view(*piece.shape[:2], len(weight))
            return y

        facts = (batch, heads.sizes, q.dtype, queries.is_causal, weight is None, how.gradients)
        with how.peers.resume(call):
            how, y = tuned(call, how, layout.rows.total, facts, run)
        layout = layout.cut(how.num_subslices)
        if y is not None and bias is not None:
            y += bias
        ctx.how, ctx.layout, ctx.queries = how, layout, queries
        ctx.save_for_backward(joined if weight is not None else None, weight)
        return joined if y is None else y.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of others' head groups leave; each slice of queries goes back as it comes, own first."""
        joined, weight = ctx.saved_tensors
        how, layout, queries = ctx.how, ctx.layout, ctx.queries
        grad = grads[0].contiguous()
        rank, rows, (heads,), batch = how.peers.rank, layout.rows, layout.features, grad.shape[1]

        def make(peer: int, s: int) -> Tensor:
            mine, columns = grad[rows.local(rank, s)], heads.rows(peer)
            if weight is None:
                return mine[..., columns].contiguous()
            return (mine.flatten(0, 1) @ weight[:, columns]).view(*mine.shape[:2], heads.sizes[peer])

        trade = Trade(
            make=make,
            room=lambda peer, s: grad.new_empty(rows.size(peer, s), batch, heads.sizes[rank]),
            sent=lambda peer: (rows.sizes[rank], batch, heads.sizes[peer]),
            received=lambda peer: (rows.sizes[peer], batch, heads.sizes[rank]),
            num_subslices=rows.num_subslices,
            device=grad.device,
        )
        dw = db = None
        with how.peers.call("attention_all_to_all backward") as call:
            call.tuned_as = how.tuned_as
            header = how.header(call, grad.dtype)
            for peer, s, piece in own_first(call, header, trade, check=how.check):
                if peer == rank and s == 0 and ctx.needs_input_grad[7]:
                    dw = grad.flatten(0, 1).t() @ joined.flatten(0, 1)
                queries.backward(rows.rows(peer, s), piece)
        if ctx.needs_input_grad[8]:
            db = grad.sum((0, 1))
        return None, None, None, None, *queries.gradients(), dw, db
