"""The two loops of every schedule: `gather` hands out slices as they come, `Scatter` takes partial sums.

Between two sub-slices the caller does its product: that is what the transfers hide behind. Rows come first in
every tensor here, (rows, ...), contiguous. A gather starts with the rank's own slice, a scatter ends with it; no
message waits for a part of it, so it is one product, however others' slices are cut.
Under "plain" both have one piece, all rows, and every message travels before it or after it. The hazard: both
must be driven to their end on every rank, one product after the other. Source: CommFuse (arXiv 2604.24013);
the direct scatter's fixed order of summation and the m sub-slices in flight are this library's.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stretto.overlap.faults import Header
from stretto.overlap.lane import Lane
from stretto.overlap.p2p import Call
from stretto.overlap.routes import Route, Slices
from stretto.overlap.transfers import Shape, Transfer

__all__ = ["Piece", "Scatter", "gather", "send_everywhere", "sum_dtype"]


@dataclass(frozen=True)
class Piece:
    """One sub-slice in the order of a loop."""

    step: int
    subslice: int
    owner: int
    local: slice
    """Its rows within its owner's slice."""
    rows: slice
    """Its rows within the whole tensor."""


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over ranks and slices are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def whole(slices: Slices) -> Piece:
    """All rows as one piece."""
    rows = slice(0, slices.total)
    return Piece(0, 0, 0, rows, rows)


def of_step(lane: Lane, slices: Slices, step: int, cut_own: bool = False) -> Iterator[Piece]:
    """The pieces of one step of a loop; the own slice is cut in its sub-slices if `cut_own`."""
    owner, rank = lane.routes[step].compute, lane.call.peers.rank
    if owner == rank and not cut_own:
        rows = slices.rows(owner)
        yield Piece(step, 0, owner, slice(0, slices.sizes[owner]), rows)
        return
    for s in range(slices.num_subslices):
        yield Piece(step, s, owner, slices.local(owner, s), slices.rows(owner, s))


def gather(
    call: Call,
    header: Header,
    own: Tensor,
    slices: Slices,
    *,
    check: bool,
    into: Tensor | None = None,
    cut_own: bool = False,
) -> Iterator[tuple[Piece, Tensor]]:
    """Every slice of a row-sharded tensor, own first, each handed out while the next is on its way.

    Args:
        call: the call that this loop belongs to.
        header: operation, dtype, schedule and gradients; the shape is filled in here.
        own: this rank's slice, (slices.sizes[rank], ...), contiguous.
        slices: the rows of every rank.
        check: send headers.
        into: (slices.total, ...), contiguous: all slices are written there. Without it a slice's buffer is
            released after its product and, on the ring, its forwarding.
        cut_own: hand out the own slice in sub-slices too.

    Yields:
        The place of a piece and its rows, to be read until the next is asked for.
    """
    rank, ring, rest = call.peers.rank, header.schedule == "ring", tuple(own.shape[1:])

    def shapes(here: Route) -> tuple[Shape, Shape]:
        return (slices.sizes[here.send], *rest), (slices.sizes[here.recv], *rest)

    lane = Lane(call, "gather", header, shapes, device=own.device, check=check)
    if header.schedule == "plain":
        gathered = own.new_empty(slices.total, *rest) if into is None else into
        for transfer in _send_to_all(call, lane, own, slices, gathered):
            call.wait(transfer)
        call.begin_product()
        yield whole(slices), gathered
        call.end_product(0, 0, rank)
        return
    if into is not None:
        into[slices.rows(rank)] = own
    arriving: dict[int, tuple[Transfer, Tensor, Tensor | None]] = {}

    def post(step: int, s: int, outgoing: Tensor, forwarded: Tensor | None = None) -> None:
        rows = slices.rows(lane.routes[step].recv, s)
        incoming = own.new_empty(rows.stop - rows.start, *rest) if into is None else into[rows]
        arriving[s] = lane.post(step, s, outgoing, incoming), incoming, forwarded

    def own_part(s: int) -> Tensor:
        return own[slices.local(rank, s)]

    if lane.last > 0:
        for s in range(slices.num_subslices):
            post(0, s, own_part(s))
    for step in range(lane.last + 1):
        for piece in of_step(lane, slices, step, cut_own):
            s, data, owned = piece.subslice, own[piece.local], into is None and step > 0
            if step > 0:
                transfer, data, forwarded = arriving.pop(s)
                call.wait(transfer)
                if forwarded is not None:
                    call.release(forwarded)
                if step < lane.last:
                    post(step, s, data if ring else own_part(s), data if ring and owned else None)
            call.begin_product()
            yield piece, data
            call.end_product(step, s, piece.owner)
            if owned and (step == lane.last or not ring):
                call.release(data)


def send_everywhere(
    call: Call, header: Header, own: Tensor, slices: Slices, into: Tensor, *, check: bool
) -> list[Transfer]:
    """Post a whole direct gather at once, for a caller who waits for all of it later.

    `own` (slices.sizes[rank], ...) is sent to every rank, and every slice arrives in `into` (slices.total,
    ...). The transfers outlive the call. Posted together they share the egress and arrive together: fit only
    where nobody needs the first before the last.
    """
    rest = tuple(own.shape[1:])

    def shapes(here: Route) -> tuple[Shape, Shape]:
        return (slices.sizes[here.send], *rest), (slices.sizes[here.recv], *rest)

    lane = Lane(call, "gather", replace(header, schedule="direct"), shapes, device=own.device, check=check)
    transfers = _send_to_all(call, lane, own, slices, into)
    call.leave(transfers)
    return transfers


def _send_to_all(call: Call, lane: Lane, own: Tensor, slices: Slices, into: Tensor) -> list[Transfer]:
    into[slices.rows(call.peers.rank)] = own
    return [lane.post(step, 0, own, into[slices.rows(lane.routes[step].recv)]) for step in range(lane.last)]


class Scatter:
    """Sums of row slices over ranks, each slice's to its owner: others' partials first, own last.

    When direct, partials go straight to the owner, who adds them in the fixed order r-1, r-2, ..., r+1, own
    last, in `sum_dtype`: one rounding at the end, bitwise the same every time. A step's arrivals are
    awaited `window` steps later, so that ranks whose products take unequally long do not wait for each
    other at every step; the last are awaited in `result`, so that the caller has until then for other
    products. On the ring running sums travel, and are rounded to the dtype on the wire at every hop.

    Buffers are the sum of the own slice, the own partial, which waits for `result`, and what is sent and received:
    one slice each on the ring, `window` slices and a sub-slice each when direct.
    """

    def __init__(
        self,
        call: Call,
        header: Header,
        shape: Shape,
        slices: Slices,
        device: torch.device,
        *,
        check: bool,
        window: int = 2,
        cut_own: bool = False,
    ) -> None:
        """`shape` is that of the whole tensor, rows first; `header` and `cut_own` as in `gather`."""
        rest, self._rank = shape[1:], call.peers.rank

        def shapes(here: Route) -> tuple[Shape, Shape]:
            return (slices.sizes[here.send], *rest), (slices.sizes[here.recv], *rest)

        self._call, self._slices, self._dtype, self._window = call, slices, header.dtype, window
        self._cut_own = cut_own
        self._ring, self._plain = header.schedule == "ring", header.schedule == "plain"
        self._lane = Lane(call, "scatter", header, shapes, device=device, check=check)
        kept = header.dtype if self._ring else sum_dtype(header.dtype)
        self._sum = torch.zeros(slices.sizes[self._rank], *rest, dtype=kept, device=device)
        self._arriving: dict[tuple[int, int], tuple[Transfer, Tensor, Tensor]] = {}
        self._own: list[tuple[Piece, Tensor]] = []

    @property
    def waits_in_result(self) -> bool:
        """Whether no `put` waits for an arrival: so few ranks, directly, that all of them fit in the window."""
        return not (self._ring or self._plain) and self._lane.last <= self._window

    def pieces(self) -> Iterator[Piece]:
        """The order in which partials must be put; what the caller does until it puts one is its product."""
        for step in self.steps():
            yield from step

    def steps(self) -> Iterator[Iterator[Piece]]:
        """The same in steps, of which a gather of uncut slices has as many."""
        if self._plain:
            yield self._begun([whole(self._slices)])
            return
        for step in range(self._lane.last + 1):
            yield self._begun(of_step(self._lane, self._slices, step, self._cut_own))

    def _begun(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            self._call.begin_product()
            yield piece

    def put(self, piece: Piece, partial: Tensor) -> None:
        """Give one piece's partial sum, (its rows, ...), contiguous; from here on it belongs to the loop."""
        self._call.end_product(piece.step, piece.subslice, piece.owner)
        if self._plain:
            self._put_whole(partial)
        elif self._ring:
            self._put_ring(piece, partial)
        else:
            self._put_direct(piece, partial)

    def result(self, bias: Tensor | None = None) -> Tensor:
        """The own slice, summed over ranks, plus `bias` before the last rounding; what has not arrived is awaited."""
        for step, s in sorted(self._arriving):
            received = self._receive(step, s)
            self._sum[self._slices.local(self._rank, s)] += received
            self._call.release(received)
        for piece, partial in self._own:
            self._sum[piece.local] += partial
        self._own.clear()
        if bias is not None:
            self._sum += bias
        return self._sum.to(self._dtype)

    def _put_whole(self, partial: Tensor) -> None:
        slices, lane = self._slices, self._lane
        transfers = []
        for step in range(lane.last):
            incoming = partial.new_empty(slices.sizes[self._rank], *partial.shape[1:])
            outgoing = partial[slices.rows(lane.routes[step].send)]
            transfers.append((lane.post(step, 0, outgoing, incoming), incoming))
        for transfer, incoming in transfers:
            self._call.wait(transfer)
            self._sum += incoming
            self._call.release(incoming)
        self._sum += partial[slices.rows(self._rank)]
        self._call.release(partial)

    def _put_ring(self, piece: Piece, partial: Tensor) -> None:
        if piece.step == self._lane.last:
            self._own.append((piece, partial))
            return
        if piece.step > 0:
            running = self._receive(piece.step - 1, piece.subslice)
            partial += running
            self._call.release(running)
        self._send(piece, partial)

    def _put_direct(self, piece: Piece, partial: Tensor) -> None:
        if piece.step == self._lane.last:
            self._own.append((piece, partial))
            return
        self._send(piece, partial)
        own = self._sum[self._slices.local(self._rank, piece.subslice)]
        for step in range(max(0, piece.step - self._window), piece.step - self._window + 1):
            received = self._receive(step, piece.subslice)
            own += received
            self._call.release(received)

    def _send(self, piece: Piece, partial: Tensor) -> None:
        size = self._slices.size(self._lane.routes[piece.step].recv, piece.subslice)
        incoming = partial.new_empty(size, *partial.shape[1:])
        transfer = self._lane.post(piece.step, piece.subslice, partial, incoming)
        self._arriving[piece.step, piece.subslice] = (transfer, incoming, partial)

    def _receive(self, step: int, subslice: int) -> Tensor:
        transfer, received, sent = self._arriving.pop((step, subslice))
        self._call.wait(transfer)
        self._call.release(sent)
        return received
