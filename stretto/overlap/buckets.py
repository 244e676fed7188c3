"""Gradients in buckets: each cut by owner, its shards sent straight to their owners and summed there.

One thread does a reducer's transfers in the order in which they were asked for, so that the backward never
waits. The pieces that arrive are kept apart until they are summed: what each is worth may be known only
later. The hazard: the group belongs to that thread; any other operation on it would run beside it. Source:
the late-bound reduction of this library (a reduce-scatter made of direct sends need not know its weights when
it sends).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stretto.overlap.exchange import Flight, Trade
from stretto.overlap.faults import Header
from stretto.overlap.loops import gather, sum_dtype
from stretto.overlap.p2p import Peers
from stretto.overlap.routes import Slices, slice_sizes

__all__ = [
    "Bucket",
    "Pieces",
    "in_buckets",
    "in_order_of_use",
    "like",
    "local",
    "spread",
    "sum_in_order",
    "trade_pieces",
]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """This rank's part of something that goes with a parameter, as a DTensor where the parameter is one."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


@dataclass
class Bucket:
    """Some parameters of one dtype, flattened one after the other and cut by owner."""

    parameters: list[Tensor]
    slices: Slices
    """The elements of the flat bucket that every rank owns."""
    ready: set[int] = field(default_factory=set)
    launched: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters and of what is sent."""
        return self.parameters[0].dtype

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return self.parameters[0].device

    def arrived(self, index: int) -> None:
        """One parameter's gradient is there; `RuntimeError` if the bucket has left without it."""
        if self.launched:
            raise RuntimeError(
                f"a gradient of shape {tuple(self.parameters[index].shape)} came after its bucket had left; call "
                f"finish() after every backward, also one that failed, use accumulate() to add several up, and no "
                f"reentrant checkpoint around modules that share a parameter"
            )
        self.ready.add(index)

    def flat_gradient(self) -> Tensor:
        """All gradients in one new vector, (slices.total,); zeros where a parameter has none."""
        grads = [p.grad for p in self.parameters]
        flat = [
            torch.zeros_like(local(p)).flatten() if g is None else local(g).flatten()
            for p, g in zip(self.parameters, grads)
        ]
        return torch.cat(flat)

    def flat_parameters(self) -> Tensor:
        """All parameters in one new vector, (slices.total,)."""
        return torch.cat([local(p.detach()).flatten() for p in self.parameters])

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat vector in the shapes of the parameters."""
        shapes = [local(p).shape for p in self.parameters]
        return [part.view(s) for part, s in zip(flat.split([s.numel() for s in shapes]), shapes)]

    def drop_gradients(self) -> None:
        """The parameters' gradients become None."""
        for parameter in self.parameters:
            parameter.grad = None

    def write_gradients(self, flat: Tensor) -> None:
        """Make a flat vector the parameters' gradients."""
        for parameter, part in zip(self.parameters, self.parts(flat)):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local(parameter.grad).copy_(part)


def in_buckets(parameters: Sequence[Tensor], bucket_bytes: int, world_size: int) -> list[Bucket]:
    """Buckets of at most `bucket_bytes` or one parameter, in this order; dtypes, devices do not mix."""
    buckets: list[list[Tensor]] = []
    held = 0
    for parameter in parameters:
        num_bytes = local(parameter).numel() * parameter.element_size()
        fits = buckets and held + num_bytes <= bucket_bytes
        if fits and (buckets[-1][0].dtype, buckets[-1][0].device) == (parameter.dtype, parameter.device):
            buckets[-1].append(parameter)
            held += num_bytes
        else:
            buckets.append([parameter])
            held = num_bytes
    totals = [sum(local(p).numel() for p in bucket) for bucket in buckets]
    return [Bucket(bucket, Slices(tuple(slice_sizes(total, world_size)))) for bucket, total in zip(buckets, totals)]


def in_order_of_use(buckets: Sequence[Bucket], parameters: Sequence[Tensor]) -> list[int]:
    """The numbers of the buckets, those first that hold the parameters registered first."""
    first_of = {id(p): place for place, p in enumerate(parameters)}
    places = [min(first_of[id(p)] for p in bucket.parameters) for bucket in buckets]
    return sorted(range(len(places)), key=places.__getitem__)


class Pieces:
    """A bucket's pieces, one a rank, on their way to their owners."""

    def __init__(self, peers: Peers, bucket: Bucket, make: Callable[[int], Tensor], *, check: bool) -> None:
        """`make(peer)` gives (slices.sizes[peer],); the own piece is made where the others are awaited."""
        self._peers, self._bucket, self._make, self._check = peers, bucket, make, check

    def send(self) -> Tensor:
        """Let them leave; the room (world_size, own elements), by sender, into which others' come."""
        peers, bucket, make = self._peers, self._bucket, self._make
        sizes = bucket.slices.sizes
        room = torch.empty(peers.world_size, sizes[peers.rank], dtype=bucket.dtype, device=bucket.device)
        trade = Trade(
            make=lambda peer, _: make(peer),
            room=lambda peer, _: room[peer],
            sent=lambda peer: (sizes[peer],),
            received=lambda peer: (sizes[peers.rank],),
            num_subslices=1,
            device=bucket.device,
        )
        with peers.call("gradient reduction", background=True) as self._call:
            header = Header(self._call.operation, self._call.number, "scatter", 0, (), bucket.dtype, 1, "direct", ())
            self._flight = Flight(self._call, header, trade, "scatter", check=self._check).leave()
        self._room = room
        return room

    def land(self, sent: "Future[Any] | None" = None) -> Tensor:
        """The room, once all are there; `sent`: that of `send`, for the error that it may have had."""
        if sent is not None:
            sent.result()
        with self._peers.resume(self._call):
            for peer, _, piece in self._flight.pieces():
                if peer == self._peers.rank:
                    self._room[peer] = piece
        return self._room


def trade_pieces(peers: Peers, bucket: Bucket, make: Callable[[int], Tensor], *, check: bool) -> Tensor:
    """Send `make(peer)`, (slices.sizes[peer],), to each owner, own last; (world_size, own elements) by sender."""
    pieces = Pieces(peers, bucket, make, check=check)
    pieces.send()
    return pieces.land()


def sum_in_order(pieces: Tensor, rank: int) -> Tensor:
    """The sum over senders, (own elements,), in `sum_dtype`: rank-1, rank-2, ..., own last."""
    total = torch.zeros(pieces.shape[1], dtype=sum_dtype(pieces.dtype), device=pieces.device)
    for hop in range(1, len(pieces) + 1):
        total += pieces[(rank - hop) % len(pieces)]
    return total


def spread(peers: Peers, bucket: Bucket, shard: Tensor, *, check: bool, dtype: torch.dtype | None = None) -> Tensor:
    """Every owner's shard, sent in `dtype` (the bucket's), in one flat vector (slices.total,) on every rank."""
    own = shard.to(dtype or bucket.dtype)
    flat = own.new_empty(bucket.slices.total)
    with peers.call("parameter gather", background=True) as call:
        header = Header(call.operation, call.number, "gather", 0, (), own.dtype, 1, "direct", ())
        for _ in gather(call, header, own, bucket.slices, check=check, into=flat):
            pass
    return flat
