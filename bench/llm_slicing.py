"""Slicing as a schedule of the library's own operations, for whole models: what `bench.llm` compares with.

The loops of the library are replaced by ones that cut in k chunks and move each beside the product of its neighbour
(Megatron, MindSpeed CoC), under the same gradients and modules. To its advantage a chunk of gathered rows holds rows
of every rank side by side, so that a chunk is one product and nothing is copied. The hazard is that order: within a
tensor-parallel block rows come chunk by chunk, so that a causal mask means other rows than in one process. Times are
the same; losses are not. Slices must be equal.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from stretto.overlap import column, lookup, query_split, row, ulysses
from stretto.overlap.exchange import Trade
from stretto.overlap.faults import Header
from stretto.overlap.lane import Lane
from stretto.overlap.loops import Piece, sum_dtype
from stretto.overlap.p2p import Call
from stretto.overlap.products import input_partial
from stretto.overlap.routes import Route, Slices, slice_sizes
from stretto.overlap.transfers import Shape, Transfer

__all__ = ["sliced"]

ALL_REDUCES = ("matmul_all_reduce", "replicate_matmul backward")


@contextmanager
def sliced() -> Iterator[None]:
    """Within, "direct" with num_subslices=k is slicing in k."""
    replaced = [
        (column, "gather", gather),
        (column, "_input_and_weight_gradients", input_and_weight_gradients),
        (column, "_summed_input_gradient", summed_input_gradient),
        (row, "gather", gather),
        (row, "Scatter", Scatter),
        (row, "send_everywhere", send_everywhere),
        (query_split, "gather", gather),
        (query_split, "Scatter", Scatter),
        (lookup, "gather", gather),
        (ulysses, "own_first", own_first),
        (ulysses, "own_last", own_last),
    ]
    with ExitStack() as stack:
        for module, name, replacement in replaced:
            stack.enter_context(mock.patch.object(module, name, replacement))
        yield


def chunk_of(slices: Slices, chunk: int) -> slice:
    """The rows of a chunk: those of every rank side by side."""
    size = slices.total // slices.num_subslices
    return slice(chunk * size, (chunk + 1) * size)


def part_of(slices: Slices, chunk: int, rank: int) -> slice:
    """A rank's rows in a chunk."""
    size = slices.total // slices.num_subslices // len(slices.sizes)
    first = chunk_of(slices, chunk).start + rank * size
    return slice(first, first + size)


def lane_of(call: Call, kind: Any, header: Header, slices: Slices, rest: Shape, device: Any, check: bool) -> Lane:
    assert len(set(slices.sizes)) == 1, slices
    assert slices.sizes[0] % slices.num_subslices == 0, slices

    def shapes(here: Route) -> tuple[Shape, Shape]:
        return (slices.sizes[here.send], *rest), (slices.sizes[here.recv], *rest)

    return Lane(call, kind, header, shapes, device=device, check=check)


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
    """Chunk by chunk, each handed out while the next is on its way; `cut_own` says nothing here."""
    rank = call.peers.rank
    lane = lane_of(call, "gather", header, slices, tuple(own.shape[1:]), own.device, check)
    gathered = own.new_empty(slices.total, *own.shape[1:]) if into is None else into

    def post(chunk: int) -> list[Transfer]:
        mine = own[slices.local(rank, chunk)]
        gathered[part_of(slices, chunk, rank)] = mine
        places = [gathered[part_of(slices, chunk, here.recv)] for here in lane.routes[:-1]]
        return [lane.post(step, chunk, mine, place) for step, place in enumerate(places)]

    arriving = post(0)
    for chunk in range(slices.num_subslices):
        for transfer in arriving:
            call.wait(transfer)
        arriving = post(chunk + 1) if chunk + 1 < slices.num_subslices else []
        rows = chunk_of(slices, chunk)
        yield Piece(0, chunk, rank, slices.local(rank, chunk), rows), gathered[rows]


class Scatter:
    """Chunk by chunk, each leaving beside the product of the next."""

    def __init__(
        self, call: Call, header: Header, shape: Shape, slices: Slices, device: Any, *, check: bool, **order: Any
    ) -> None:
        self.call, self.slices, self.dtype, self.rank = call, slices, header.dtype, call.peers.rank
        self.lane = lane_of(call, "scatter", header, slices, shape[1:], device, check)
        self.sum = torch.empty(slices.sizes[self.rank], *shape[1:], dtype=sum_dtype(header.dtype), device=device)
        self.under_way: list[tuple[int, list[tuple[Transfer, Tensor]], Tensor]] = []
        self.back = None
        if call.operation in ALL_REDUCES:
            self.back = Back(call, header, shape, slices, device, check)

    def pieces(self) -> Iterator[Piece]:
        for chunk in range(self.slices.num_subslices):
            rows = chunk_of(self.slices, chunk)
            yield Piece(0, chunk, self.rank, self.slices.local(self.rank, chunk), rows)

    def put(self, piece: Piece, partial: Tensor) -> None:
        if self.back is not None and self.under_way:
            self.advance()
        by_rank = partial.view(len(self.slices.sizes), -1, *partial.shape[1:])
        coming = []
        for step, here in enumerate(self.lane.routes[:-1]):
            incoming = torch.empty_like(by_rank[self.rank])
            coming.append((self.lane.post(step, piece.subslice, by_rank[here.send_to], incoming), incoming))
        self.under_way.append((piece.subslice, coming, by_rank[self.rank]))

    def take(self) -> tuple[int, Tensor]:
        """The next chunk's own rows, summed."""
        chunk, coming, mine = self.under_way.pop(0)
        total = self.sum[self.slices.local(self.rank, chunk)]
        total.copy_(mine)
        for transfer, incoming in coming:
            self.call.wait(transfer)
            total += incoming
        return chunk, total

    def advance(self) -> None:
        """Of an all-reduce: sum the next chunk and send it back to everyone."""
        if self.back is not None and self.under_way:
            self.back.send(*self.take())

    def result(self, bias: Tensor | None = None) -> Tensor:
        while self.under_way:
            self.take() if self.back is None else self.advance()
        if self.back is not None:
            self.call.gathered = self.back.wait()  # type: ignore[attr-defined]
        if bias is not None:
            self.sum += bias
        return self.sum.to(self.dtype)


class Back:
    """The second half of an all-reduce: summed chunks on their way to everyone."""

    def __init__(self, call: Call, header: Header, shape: Shape, slices: Slices, device: Any, check: bool) -> None:
        self.call, self.slices, self.rank = call, slices, call.peers.rank
        self.lane = lane_of(call, "gather", header, slices, shape[1:], device, check)
        self.whole = torch.empty(shape, dtype=header.dtype, device=device)
        self.transfers: list[Transfer] = []

    def send(self, chunk: int, total: Tensor) -> None:
        mine = self.whole[part_of(self.slices, chunk, self.rank)]
        mine.copy_(total)
        for step, here in enumerate(self.lane.routes[:-1]):
            place = self.whole[part_of(self.slices, chunk, here.recv)]
            self.transfers.append(self.lane.post(step, chunk, mine, place))

    def wait(self) -> Tensor:
        for transfer in self.transfers:
            self.call.wait(transfer)
        return self.whole


def send_everywhere(
    call: Call, header: Header, own: Tensor, slices: Slices, into: Tensor, *, check: bool
) -> list[Transfer]:
    """What `Back` brought."""
    into.copy_(call.gathered)  # type: ignore[attr-defined]
    return []


def input_and_weight_gradients(
    call: Call, ctx: Any, how: Any, x: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[Tensor, list[Any]]:
    """Of a column layer: a chunk's gradient leaves, and the input's next one arrives, beside two products."""
    sums = column._started(ctx.needs_input_grad[5:], weights)
    slices, header = ctx.slices.cut(how.num_subslices), how.header(call, x.dtype)
    scatter = Scatter(call, header, (slices.total, *x.shape[1:]), slices, x.device, check=how.check)
    for piece, (_, rows) in zip(scatter.pieces(), gather(call, header, x, slices, check=how.check), strict=True):
        scatter.put(piece, input_partial(grads, weights, piece.rows, x.dtype))
        column._add(sums, grads, rows, piece.rows)
    return scatter.result(), sums


def summed_input_gradient(
    call: Call, ctx: Any, how: Any, x: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor], left: Any
) -> tuple[Tensor, list[Any]]:
    """Of a column layer without sharded rows: chunks are all-reduced beside each other and beside the weights'."""
    sums = column._started(ctx.needs_input_grad[4:], weights)
    slices = Slices(tuple(slice_sizes(x.shape[0], call.peers.world_size)), how.num_subslices)
    scatter = Scatter(call, how.header(call, x.dtype), tuple(x.shape), slices, x.device, check=how.check)
    for piece in scatter.pieces():
        scatter.put(piece, input_partial(grads, weights, piece.rows, x.dtype))
    for chunk in range(how.num_subslices):
        rows = chunk_of(slices, chunk)
        column._add(sums, grads, x[rows], rows)
        scatter.advance()
    scatter.result()
    return call.gathered, sums  # type: ignore[attr-defined]


def own_last(call: Call, header: Header, trade: Trade, *, check: bool) -> Iterator[tuple[int, int, Tensor]]:
    """Every chunk's pieces are made, others' and own, and leave beside those of the next."""
    lane = trade.lane(call, "scatter", header, check)
    rank, arriving = call.peers.rank, []
    for chunk in range(trade.num_subslices):
        pieces = [trade.make(here.send_to, chunk) for here in lane.routes[:-1]]
        yield rank, chunk, trade.make(rank, chunk)
        for step, (here, piece) in enumerate(zip(lane.routes, pieces)):
            room = trade.room(here.recv_from, chunk)
            arriving.append((here.recv_from, chunk, room, lane.post(step, chunk, piece, room)))
    for peer, chunk, room, transfer in arriving:
        call.wait(transfer)
        yield peer, chunk, room


def own_first(call: Call, header: Header, trade: Trade, *, check: bool) -> Iterator[tuple[int, int, Tensor]]:
    """Every chunk's pieces arrive beside the work on those of the one before."""
    lane = trade.lane(call, "gather", header, check)
    rank = call.peers.rank

    def post(chunk: int) -> list[tuple[int, Tensor, Transfer]]:
        coming = []
        for step, here in enumerate(lane.routes[:-1]):
            piece, room = trade.make(here.send_to, chunk), trade.room(here.recv_from, chunk)
            coming.append((here.recv_from, room, lane.post(step, chunk, piece, room)))
        return coming

    coming = post(0)
    for chunk in range(trade.num_subslices):
        for _, _, transfer in coming:
            call.wait(transfer)
        arrived, coming = coming, post(chunk + 1) if chunk + 1 < trade.num_subslices else []
        yield rank, chunk, trade.make(rank, chunk)
        for peer, room, _ in arrived:
            yield peer, chunk, room
