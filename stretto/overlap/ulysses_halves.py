"""The autograd of sequence-parallel attention in two halves: sent in one node, received in another.

What the caller computes between the halves hides the messages: forward between the start and the wait, backward
between the wait's node, which sends, and the start's, which receives. Autograd runs there, in reversed order,
whatever lay between the two forward. The hazard: both nodes of a call are one exchange, so their number and order
must be the same on every rank. Source: DeepSpeed-Ulysses (arXiv 2309.14509), in halves of a batch as Domino
(arXiv 2409.15241) takes tensor parallelism.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.overlap.exchange import Flight, Trade
from stretto.overlap.inputs import How
from stretto.overlap.p2p import Call
from stretto.overlap.projections import Gradients, Layout, Linears, projection, projection_gradient
from stretto.overlap.queries import QuerySlices
from stretto.overlap.ulysses import Joined, attended, attended_gradient

__all__ = ["AttentionStart", "AttentionWait", "MatmulStart", "MatmulWait", "Trip"]


class Trip:
    """One call's messages out and, in the backward, back: what its two nodes share."""

    out: Tensor
    """Where the rows of a projection arrive."""

    def __init__(self, call: Call, how: How, layout: Layout) -> None:
        self.call, self.how, self.layout, self.rank = call, how, layout, call.peers.rank
        self.flight: Flight | None = None

    def arrived(self) -> Flight:
        """What is under way, to be taken once."""
        flight, self.flight = self.flight, None
        assert flight is not None
        return flight


class MatmulStart(torch.autograd.Function):
    """x (sizes[rank], inner, K), `Linears` -> (sizes[rank], inner, sum of this rank's features)."""

    @staticmethod
    def forward(ctx: Any, trip: Trip, x: Tensor, *flat: Tensor | None) -> Tensor:
        """Others' head groups are computed and sent; the own ones, in whose name this returns, by `MatmulWait`.

        There they hide what is still on its way. What is returned has a shape and no numbers.
        """
        linears = Linears.of(flat)
        call, how, layout, rank = trip.call, trip.how, trip.layout, trip.rank
        trip.out = x.new_empty(layout.rows.total, x.shape[1], layout.width(rank))
        trade = projection(layout, rank, x, linears, trip.out)
        with how.peers.resume(call):
            trip.flight = Flight(call, how.header(call, x.dtype), trade, "scatter", check=how.check)
            trip.flight.leave()
        ctx.trip = trip
        ctx.save_for_backward(x, *linears.saved())
        return x.new_empty(()).expand(layout.rows.sizes[rank], x.shape[1], layout.width(rank))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """What `MatmulWait` sent is used as it arrives, after the own."""
        x, *saved = ctx.saved_tensors
        linears = Linears.of(saved)
        trip, rank, rows = ctx.trip, ctx.trip.rank, ctx.trip.layout.rows
        sums = Gradients.zero(x, linears, ctx.needs_input_grad[1:])
        with trip.how.peers.resume(trip.call):
            for s in range(rows.num_subslices):
                place = rows.local(rank, s)
                sums.add(trip.layout, rank, place, grads[0][place], x, linears)
            for peer, s, piece in trip.arrived().pieces():
                sums.add(trip.layout, peer, rows.local(rank, s), piece, x, linears)
        return None, *sums.rounded(x, linears)


class MatmulWait(torch.autograd.Function):
    """What `MatmulStart` returned -> (sum(sizes), inner, own features)."""

    @staticmethod
    def forward(ctx: Any, trip: Trip, own: Tensor) -> Tensor:
        """The own rows are computed, and others' have arrived. An error of that product leaves the group alive."""
        ctx.trip, out, flight = trip, trip.out, trip.arrived()
        del trip.out
        out[trip.layout.rows.rows(trip.rank)] = flight.take_own()
        with trip.how.peers.resume(trip.call):
            for _ in flight.pieces():
                pass
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        """Gradients of others' rows leave."""
        trip, grad = ctx.trip, grads[0].contiguous()
        trade = projection_gradient(trip.layout, trip.rank, grad)
        return None, _sent_back(trip, "matmul_all_to_all backward", grad, trade)


class AttentionStart(torch.autograd.Function):
    """q, k, v (sum(sizes), batch, own heads, d) -> (sizes[rank], batch, own heads' features)."""

    @staticmethod
    def forward(ctx: Any, trip: Trip, queries: QuerySlices, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Others' queries are computed and sent, then the own ones computed: these are returned."""
        call, how = trip.call, trip.how
        ctx.trip, ctx.queries = trip, queries
        trade = attended(trip.layout, trip.rank, queries, q)
        with how.peers.resume(call):
            trip.flight = Flight(call, how.header(call, q.dtype), trade, "scatter", check=how.check)
            return trip.flight.leave().take_own()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """What `AttentionWait` sent goes back through attention as it arrives, after the own."""
        trip, queries, rank, rows = ctx.trip, ctx.queries, ctx.trip.rank, ctx.trip.layout.rows
        with trip.how.peers.resume(trip.call):
            for s in range(rows.num_subslices):
                queries.backward(rows.rows(rank, s), grads[0][rows.local(rank, s)])
            for peer, s, piece in trip.arrived().pieces():
                queries.backward(rows.rows(peer, s), piece)
        return None, None, *queries.gradients()


class AttentionWait(torch.autograd.Function):
    """The own heads' features of own rows -> (sizes[rank], batch, all heads' features or F)."""

    @staticmethod
    def forward(ctx: Any, trip: Trip, own: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Head groups are joined as they come, own first."""
        ctx.trip, rank, rows = trip, trip.rank, trip.layout.rows
        joined = Joined(trip.layout, rank, own, weight)
        with trip.how.peers.resume(trip.call):
            for s in range(rows.num_subslices):
                joined.add(rank, s, own[rows.local(rank, s)])
            for peer, s, piece in trip.arrived().pieces():
                joined.add(peer, s, piece)
        ctx.save_for_backward(joined.heads if weight is not None else None, weight)
        return joined.result(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of others' head groups leave; the weight's is computed beside them."""
        joined, weight = ctx.saved_tensors
        trip, grad = ctx.trip, grads[0].contiguous()
        own = dw = db = None
        if ctx.needs_input_grad[1]:
            trade = attended_gradient(trip.layout, trip.rank, grad, weight)
            own = _sent_back(trip, "attention_all_to_all backward", grad, trade)
        if ctx.needs_input_grad[2]:
            dw = grad.flatten(0, 1).t() @ joined.flatten(0, 1)
        if ctx.needs_input_grad[3]:
            db = grad.sum((0, 1))
        return None, own, dw, db


def _sent_back(trip: Trip, operation: str, grad: Tensor, trade: Trade) -> Tensor:
    """The own part of a gradient of which the others' parts have left, as `trip`'s second call."""
    how = trip.how
    with how.peers.call(operation) as call:
        call.tuned_as = how.tuned_as
        trip.call = call
        trip.flight = Flight(call, how.header(call, grad.dtype), trade, "gather", check=how.check)
        return trip.flight.leave().take_own()
