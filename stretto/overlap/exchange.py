"""All-to-alls in steps: a piece for every peer, made just before it leaves, and a piece from every peer.

`own_last` makes others' pieces first, for a product that comes before its communication; `own_first` hands
out the own piece first, for one that comes after. Both go the direct routes, one peer a step. Under "plain" every
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

__all__ = ["Trade", "own_first", "own_last"]

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
    ) -> None:
        """Say what is traded.

        `make(peer, subslice)` computes the contiguous piece for a peer, `room(peer, subslice)` is the
        contiguous place for the piece from it; `sent` and `received` are the shapes of all sub-slices
        together, rows first.
        """
        self.make, self.room = make, room
        self.num_subslices = num_subslices
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
    lane = trade.lane(call, "gather", header, check)
    if header.schedule == "plain":
        yield from _all_at_once(call, lane, trade)
        return
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


def own_last(call: Call, header: Header, trade: Trade, *, check: bool) -> Iterator[tuple[int, int, Tensor]]:
    """Make and send others' pieces, then yield (peer, sub-slice, piece): own first, rank-1, rank-2, ...

    Nothing is awaited before the own piece is made: pieces may take unequally long, as under a causal mask,
    and ranks do not wait for each other at every step. Their rooms are the caller's, so that costs no memory.
    """
    lane = trade.lane(call, "scatter", header, check)
    if header.schedule == "plain":
        yield from _all_at_once(call, lane, trade)
        return
    arriving: list[tuple[int, int, Tensor, Transfer]] = []
    for step, here in enumerate(lane.routes[:-1]):
        for s in range(trade.num_subslices):
            piece, room = _made(call, trade, step, here.send_to, s), trade.room(here.recv_from, s)
            arriving.append((here.recv_from, s, room, lane.post(step, s, piece, room)))
    rank = call.peers.rank
    for s in range(trade.num_subslices):
        call.begin_product()
        yield rank, s, trade.make(rank, s)
        call.end_product(lane.last, s, rank)
    for peer, s, room, transfer in arriving:
        call.wait(transfer)
        call.begin_product()
        yield peer, s, room
        call.end_product(lane.last, s, peer)


def _all_at_once(call: Call, lane: Lane, trade: Trade) -> Iterator[tuple[int, int, Tensor]]:
    rank, subslices = call.peers.rank, range(trade.num_subslices)
    steps = [(step, here, s) for step, here in enumerate(lane.routes[:-1]) for s in subslices]
    pieces = [_made(call, trade, step, here.send_to, s) for step, here, s in steps]
    found = [(rank, s, _made(call, trade, lane.last, rank, s)) for s in subslices]
    transfers = []
    for (step, here, s), piece in zip(steps, pieces):
        room = trade.room(here.recv_from, s)
        transfers.append(lane.post(step, s, piece, room))
        found.append((here.recv_from, s, room))
    for transfer in transfers:
        call.wait(transfer)
    for peer, s, piece in found:
        call.begin_product()
        yield peer, s, piece
        call.end_product(lane.last, s, peer)


def _made(call: Call, trade: Trade, step: int, peer: int, subslice: int) -> Tensor:
    call.begin_product()
    piece = trade.make(peer, subslice)
    call.end_product(step, subslice, peer)
    return piece
