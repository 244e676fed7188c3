"""The autograd of sequence-parallel attention: rows sharded outside, heads sharded inside.

`MatmulAllToAll` projects the features that each rank's heads need and sends them; `AttentionAllToAll` attends
for the queries that each rank owns and sends their outputs, multiplied on arrival by the output projection if
it is given. The hazard: the weights are whole on every rank, so their gradients here are this rank's rows'
part of the sum. Source: DeepSpeed-Ulysses (arXiv 2309.14509); hidden as in CommFuse (arXiv 2604.24013).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.overlap.exchange import Trade, own_first, own_last
from stretto.overlap.inputs import How
from stretto.overlap.loops import sum_dtype
from stretto.overlap.p2p import Call
from stretto.overlap.projections import Gradients, Layout, Linears, projection, projection_gradient
from stretto.overlap.queries import QuerySlices
from stretto.overlap.tuning import tuned

__all__ = ["AttentionAllToAll", "MatmulAllToAll"]


class MatmulAllToAll(torch.autograd.Function):
    """x (sizes[rank], inner, K), `Linears` -> (sum(sizes), inner, sum of this rank's features)."""

    @staticmethod
    def forward(ctx: Any, call: Call, how: How, layout: Layout, x: Tensor, *flat: Tensor | None) -> Tensor:
        """Others' head groups are computed and sent first, the own last."""
        linears = Linears.of(flat)
        rank, inner = call.peers.rank, x.shape[1]
        out = x.new_empty(layout.rows.total, inner, layout.width(rank))

        def run(way: How) -> None:
            cut = layout.cut(way.num_subslices)
            trade = projection(cut, rank, x, linears, out)
            for peer, s, piece in own_last(call, way.header(call, x.dtype), trade, check=way.check):
                if peer == rank:
                    out[cut.rows.rows(rank, s)] = piece

        facts = (x.shape[1:], tuple(f.sizes for f in layout.features), x.dtype)
        with how.peers.resume(call):
            tuned(call, how, layout.rows.total, facts, run)
        ctx.how, ctx.layout = how, layout
        ctx.save_for_backward(x, *linears.saved())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of others' rows leave; each head group of the own rows is used as it comes, own first."""
        x, *saved = ctx.saved_tensors
        linears = Linears.of(saved)
        how, layout, grad = ctx.how, ctx.layout, grads[0].contiguous()
        rank, needs = how.peers.rank, ctx.needs_input_grad[3:]
        facts = (x.shape[1:], tuple(f.sizes for f in layout.features), x.dtype, tuple(ctx.needs_input_grad))

        def run(way: How) -> Gradients:
            found, cut = Gradients.zero(x, linears, needs), layout.cut(way.num_subslices)
            trade = projection_gradient(cut, rank, grad)
            for peer, s, piece in own_first(call, way.header(call, x.dtype), trade, check=way.check):
                found.add(cut, peer, cut.rows.local(rank, s), piece, x, linears)
            return found

        with how.peers.call("matmul_all_to_all backward") as call:
            _, sums = tuned(call, how, layout.rows.total, facts, run)
        return None, None, None, *sums.rounded(x, linears)


def attended(layout: Layout, rank: int, queries: QuerySlices, q: Tensor) -> Trade:
    """The outputs of own heads for every rank's queries against those of its heads for own queries."""
    rows, (heads,), batch = layout.rows, layout.features, q.shape[1]
    return Trade(
        make=lambda peer, s: queries.output(rows.rows(peer, s)),
        room=lambda peer, s: q.new_empty(rows.size(rank, s), batch, heads.sizes[peer]),
        sent=lambda peer: (rows.sizes[peer], batch, heads.sizes[rank]),
        received=lambda peer: (rows.sizes[rank], batch, heads.sizes[peer]),
        num_subslices=rows.num_subslices,
        device=q.device,
        is_scratch=True,
    )


def attended_gradient(layout: Layout, rank: int, grad: Tensor, weight: Tensor | None) -> Trade:
    """The gradient of every rank's heads at own rows against that of own heads at its rows."""
    rows, (heads,), batch = layout.rows, layout.features, grad.shape[1]

    def make(peer: int, s: int) -> Tensor:
        mine, columns = grad[rows.local(rank, s)], heads.rows(peer)
        if weight is None:
            return mine[..., columns].contiguous()
        return (mine.flatten(0, 1) @ weight[:, columns]).view(*mine.shape[:2], heads.sizes[peer])

    return Trade(
        make=make,
        room=lambda peer, s: grad.new_empty(rows.size(peer, s), batch, heads.sizes[rank]),
        sent=lambda peer: (rows.sizes[rank], batch, heads.sizes[peer]),
        received=lambda peer: (rows.sizes[peer], batch, heads.sizes[rank]),
        num_subslices=rows.num_subslices,
        device=grad.device,
        is_scratch=True,
    )


class Joined:
    """The head groups of the own rows side by side, times the output projection if there is one, as they come."""

    def __init__(self, layout: Layout, rank: int, like: Tensor, weight: Tensor | None) -> None:
        (self._heads,), self._rows, self._rank, self._weight = layout.features, layout.rows, rank, weight
        own, batch = layout.rows.sizes[rank], like.shape[1]
        self.heads = like.new_empty(own, batch, self._heads.total)
        """(own rows, batch, all heads' features)."""
        self._sum = None
        if weight is not None:
            self._sum = like.new_zeros(own, batch, len(weight), dtype=sum_dtype(like.dtype))

    def add(self, peer: int, s: int, piece: Tensor) -> None:
        """Enter a peer's head group at some of the own rows."""
        place, columns = self._rows.local(self._rank, s), self._heads.rows(peer)
        self.heads[place, :, columns] = piece
        if self._weight is not None and self._sum is not None:
            part = piece.flatten(0, 1) @ self._weight[:, columns].t()
            self._sum[place] += part.view(*piece.shape[:2], len(self._weight))

    def result(self, bias: Tensor | None) -> Tensor:
        """What the layer returns."""
        if self._sum is None:
            return self.heads
        if bias is not None:
            self._sum += bias
        return self._sum.to(self.heads.dtype)


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
        rank, (heads,), batch = call.peers.rank, layout.features, q.shape[1]

        def run(way: How) -> Joined:
            cut = layout.cut(way.num_subslices)
            queries.forget()
            joined, trade = Joined(cut, rank, q, weight), attended(cut, rank, queries, q)
            for peer, s, piece in own_last(call, way.header(call, q.dtype), trade, check=way.check):
                joined.add(peer, s, piece)
            return joined

        facts = (batch, heads.sizes, q.dtype, queries.is_causal, weight is None, how.gradients)
        with how.peers.resume(call):
            how, joined = tuned(call, how, layout.rows.total, facts, run)
        layout = layout.cut(how.num_subslices)
        ctx.how, ctx.layout, ctx.queries = how, layout, queries
        ctx.save_for_backward(joined.heads if weight is not None else None, weight, *queries.give_up())
        return joined.result(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of others' head groups leave; each slice of queries goes back as it comes, own first."""
        joined, weight, *inputs = ctx.saved_tensors
        how, layout, queries = ctx.how, ctx.layout, ctx.queries
        queries.take_back(inputs)
        grad = grads[0].contiguous()
        rank, rows = how.peers.rank, layout.rows
        trade = attended_gradient(layout, rank, grad, weight)
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
