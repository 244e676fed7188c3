"""Looking up rows of a table whose parts are on different ranks: one row travels for each token, if any.

A rank sends to each other rank the rows which that one reads, and in the backward gets their gradients: nothing is
summed on the way, and no more bytes travel than of a reduce-scatter of partial look-ups; of N equal parts one Nth as
many. The hazard: sizes are not told but known, so tokens must be the same on every rank; they may change after the
forward, which keeps none of them. Source: this library's.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.overlap.exchange import Flight, Trade
from stretto.overlap.faults import Header
from stretto.overlap.loops import gather, sum_dtype
from stretto.overlap.p2p import Call, Peers
from stretto.overlap.routes import Slices, slice_sizes

__all__ = ["Embed", "Lookup"]


class Lookup:
    """Who reads what of whom in one look-up of tokens (rows, inner), of which every rank reads its own rows.

    All ranks have all tokens, so that each knows the sizes of all messages. With `whole` every rank gets all rows in
    the end.
    """

    def __init__(
        self,
        peers: Peers,
        tokens: Tensor,
        num_embeddings: int,
        padding_idx: int | None,
        *,
        whole: bool,
        check: bool,
    ) -> None:
        self.peers, self.check, self.whole, self.inner = peers, check, whole, tokens.shape[1]
        self.slices, self._vocabulary = (
            Slices(tuple(slice_sizes(n, peers.world_size))) for n in (len(tokens), num_embeddings)
        )
        self._padding_idx = padding_idx
        ranks, own = range(peers.world_size), peers.rank
        read = [tokens[self.slices.rows(peer)].flatten() for peer in ranks]
        self.taken = [self._places(read[own], peer) for peer in ranks]
        """Of each owner: where in this rank's rows, flattened, its tokens stand."""
        self.places = [self._places(read[peer], own) for peer in ranks]
        """Of each reader: where in its rows, flattened, this rank's tokens stand."""
        first = self._vocabulary.rows(own).start
        self.given = [each[places] - first for each, places in zip(read, self.places)]
        """Of each reader: its tokens that are this rank's, counted from the first of these."""

    def header(self, call: Call, dtype: torch.dtype, needed: bool) -> Header:
        """Of all steps of a call; a look-up computes next to nothing, so the schedule is always direct."""
        return Header(call.operation, call.number, "gather", 0, (), dtype, 1, "direct", (needed,))

    def traded(
        self,
        call: Call,
        header: Header,
        make: Callable[[int], Tensor],
        sent: list[Tensor],
        received: list[Tensor],
        like: Tensor,
    ) -> Iterator[tuple[int, Tensor]]:
        """(peer, rows (n, K) from it), own first: as many as `received` has for it; `make` gives what leaves."""
        width = like.shape[-1]
        trade = Trade(
            make=lambda peer, _: make(peer),
            room=lambda peer, _: like.new_empty(len(received[peer]), width),
            sent=lambda peer: (len(sent[peer]), width),
            received=lambda peer: (len(received[peer]), width),
            num_subslices=1,
            device=like.device,
            is_scratch=True,
        )
        for peer, _, rows in Flight(call, header, trade, "scatter", check=self.check).pieces():
            yield peer, rows

    def add_gradient(self, total: Tensor, reader: int, rows: Tensor) -> None:
        """Add the gradients (n, K) of a reader's tokens that are this rank's to those of the own vocabulary."""
        tokens = self.given[reader]
        if self._padding_idx is not None:
            counted = tokens != self._padding_idx - self._vocabulary.rows(self.peers.rank).start
            tokens, rows = tokens[counted], rows[counted]
        total.index_add_(0, tokens, rows.to(total.dtype))

    def _places(self, tokens: Tensor, owner: int) -> Tensor:
        part = self._vocabulary.rows(owner)
        return ((tokens >= part.start) & (tokens < part.stop)).nonzero().squeeze(1)


class Embed(torch.autograd.Function):
    """weight (own vocabulary, K) -> (own rows, inner, K), or (rows, inner, K)."""

    @staticmethod
    def forward(ctx: Any, lookup: Lookup, call: Call, weight: Tensor) -> Tensor:
        """Every rank gets what it reads; with `whole` all rows are gathered then."""
        slices, rank, width = lookup.slices, lookup.peers.rank, weight.shape[1]
        ctx.lookup, ctx.weight = lookup, weight.detach()
        own = weight.new_zeros(slices.sizes[rank] * lookup.inner, width)
        header = lookup.header(call, weight.dtype, ctx.needs_input_grad[2])

        def looked_up(peer: int) -> Tensor:
            return weight[lookup.given[peer]]

        with lookup.peers.resume(call):
            for peer, arrived in lookup.traded(call, header, looked_up, lookup.given, lookup.taken, weight):
                own[lookup.taken[peer]] = arrived
            own = own.view(slices.sizes[rank], lookup.inner, width)
            if not lookup.whole:
                return own
            out = weight.new_empty(slices.total, lookup.inner, width)
            for _ in gather(call, header, own, slices, check=lookup.check, into=out):
                pass
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Rows' gradients go back to where the rows came from; with `whole` they are there already."""
        lookup, weight = ctx.lookup, ctx.weight
        dy = grads[0].contiguous()
        total = torch.zeros_like(weight, dtype=sum_dtype(weight.dtype))
        if lookup.whole:
            for reader, places in enumerate(lookup.places):
                lookup.add_gradient(total, reader, dy[lookup.slices.rows(reader)].flatten(0, 1)[places])
            return None, None, total.to(weight.dtype)
        rows = dy.flatten(0, 1)

        def read(peer: int) -> Tensor:
            return rows[lookup.taken[peer]]

        with lookup.peers.call("vocab_embedding backward") as call:
            header = lookup.header(call, dy.dtype, True)
            for reader, arrived in lookup.traded(call, header, read, lookup.taken, lookup.given, rows):
                lookup.add_gradient(total, reader, arrived)
        return None, None, total.to(weight.dtype)
