"""All-to-alls in steps: a piece for every peer, made just before it leaves, and a piece from every peer.

`own_last` makes others' pieces first, for a product that comes before its communication; `own_first` hands
out the own piece first, for one that comes after; a `Flight` is a trade in two halves, for a caller who computes
something else in between. All go the direct routes, one peer a step. Under "plain" every
piece is made before any leaves, and all have arrived before one is handed out. The hazard:
`make` decides what hides the transfers, so it must do its work when it is called and not before. Source:
CommFuse (arXiv 2604.24013) for Ulysses; the loops are this library's.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from stretto.overlap.faults import Header
from stretto.overlap.lane import Lane
from stretto.overlap.p2p import Call
from stretto.overlap.routes import Route
from stretto.overlap.transfers import Shape, Transfer

__all__ = ["Flight", "Trade", "own_first", "own_last"]

Made = Callable[[int, int], Tensor]


class Trade:
    """What a rank gives to and gets from every peer; itself is a peer that needs no message."""

    def __init__(
        self,
        *,
        make: Made,
        room: Made,
        sent: Callable[[int], Shape],
        received: Callable[[int], Shape],
        num_subslices: int,
        device: torch.device,
        is_scratch: bool = False,
    ) -> None:
        """Say what is traded.

        `make(peer, subslice)` computes the contiguous piece for a peer, `room(peer, subslice)` is the
        contiguous place for the piece from it, read once, when it is handed out, if it `is_scratch`; `sent` and
        `received` are the shapes of all sub-slices together, rows first.
        """
        self.make, self.room = make, room
        self.num_subslices, self.is_scratch = num_subslices, is_scratch
        self._sent, self._received, self._device = sent, received, device

    def lane(self, call: Call, kind: str, header: Header, check: bool) -> Lane:
        """The steps of this trade in the order of a gather (own first) or a scatter (own last)."""

        def shapes(here: Route) -> tuple[Shape, Shape]:
            return self._sent(here.send_to), self._received(here.recv_from)

        assert header.schedule != "ring"
        if kind == "gather":
            return Lane(call, "gather", header, shapes, device=self._device, check=check)
        return Lane(call, "scatter", header, shapes, device=self._device, check=check)


def own_first(call: Call, header: Header, trade: Trade, *, check: bool) -> Iterator[tuple[int, int, Tensor]]:
    """Yields (peer, sub-slice, piece), own first, then rank-1, rank-2, ...; pieces leave a step ahead."""
    if header.schedule == "plain":
        yield from Flight(call, header, trade, "gather", check=check).pieces()
        return
    lane = trade.lane(call, "gather", header, check)
    arriving: dict[int, tuple[Transfer, Tensor]] = {}
    for step, here in enumerate(lane.routes):
        for s in range(trade.num_subslices):
            arrived = None
            if step > 0:
                transfer, arrived = arriving.pop(s)
                call.wait(transfer)
            if step < lane.last:
                room = trade.room(here.recv_from, s)
                piece = _made(call, trade, step, here.send_to, s)
                arriving[s] = (lane.post(step, s, piece, room), room)
            call.begin_product()
            yield here.compute, s, trade.make(here.compute, s) if arrived is None else arrived
            call.end_product(step, s, here.compute)
            if arrived is not None and trade.is_scratch:
                call.release(arrived)


def own_last(call: Call, header: Header, trade: Trade, *, check: bool) -> Iterator[tuple[int, int, Tensor]]:
    """Make and send others' pieces, then yield (peer, sub-slice, piece): own first, rank-1, rank-2, ...

    Nothing is awaited before the own piece is made: pieces may take unequally long, as under a causal mask,
    and ranks do not wait for each other at every step. Their rooms are the caller's, so that costs no memory.
    """
    yield from Flight(call, header, trade, "scatter", check=check).pieces()


class Flight:
    """A trade of which others' pieces are on their way: its two halves, for a caller between.

    A flight that was left and is then dropped, as by the early end of a recomputation, leaves its transfers to the
    group, whose next call waits for them: buffers must outlive their transfers.
    """

    def __init__(self, call: Call, header: Header, trade: Trade, kind: str, *, check: bool) -> None:
        """Make others' pieces and post each as it is made; nothing is awaited.

        Under "plain" all are made, own ones too, before any leaves, and all have arrived at the end.
        """
        self._call, self._trade, self._left, self._landed = call, trade, False, False
        self._arriving: list[tuple[int, int, int, Tensor, Transfer]] = []
        self._own: list[Tensor] | None = None
        lane, plain = trade.lane(call, kind, header, check), header.schedule == "plain"
        made = []
        for step, here in enumerate(lane.routes[:-1]):
            for s in range(trade.num_subslices):
                made.append((step, here, s, _made(call, trade, step, here.send_to, s)))
                if not plain:
                    self._post(lane, *made.pop())
        if plain:
            self._own = self._make_own()
        for each in made:
            self._post(lane, *each)
        if plain:
            for *_, transfer in self._arriving:
                call.wait(transfer)
            self._landed = True

    def leave(self) -> "Flight":
        """Let it outlive its call; itself."""
        self._left = True
        self._call.leave([transfer for *_, transfer in self._arriving])
        return self

    def take_own(self) -> Tensor:
        """The own pieces, made now unless "plain" has, rows one after another; `pieces` then has others' alone."""
        own = self._take()
        return own[0] if len(own) == 1 else torch.cat(own)

    def pieces(self) -> Iterator[tuple[int, int, Tensor]]:
        """(peer, sub-slice, piece): own first unless they were taken, then others' as they come, rank-1, ..."""
        call = self._call
        for s, piece in enumerate(self._take()):
            call.begin_product()
            yield call.peers.rank, s, piece
            call.end_product(call.peers.world_size - 1, s, call.peers.rank)
        while self._arriving:
            step, peer, s, room, transfer = self._arriving[0]
            if not self._landed:
                call.wait(transfer)
            self._arriving.pop(0)
            call.begin_product()
            yield peer, s, room
            call.end_product(step, s, peer)
            if self._trade.is_scratch:
                call.release(room)

    def _take(self) -> list[Tensor]:
        own, self._own = self._make_own() if self._own is None else self._own, []
        return own

    def _make_own(self) -> list[Tensor]:
        peers, trade = self._call.peers, self._trade
        return [_made(self._call, trade, peers.world_size - 1, peers.rank, s) for s in range(trade.num_subslices)]

    def _post(self, lane: Lane, step: int, here: Route, s: int, piece: Tensor) -> None:
        room = self._trade.room(here.recv_from, s)
        self._arriving.append((step, here.recv_from, s, room, lane.post(step, s, piece, room)))

    def __del__(self) -> None:
        if self._left and not self._landed:
            self._call.peers.unfinished += [transfer for *_, transfer in self._arriving]


def _made(call: Call, trade: Trade, step: int, peer: int, subslice: int) -> Tensor:
    call.begin_product()
    piece = trade.make(peer, subslice)
    call.end_product(step, subslice, peer)
    return piece
