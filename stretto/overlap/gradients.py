"""Data parallelism whose gradients leave during backward and leave no tail.

`GradientReducer` sends each bucket as soon as backward has made it, every shard straight to its owner. The
weight gradients of some layers are computed slice by slice for their owners, and the own slices, which need no
message, when backward is over: so something is left to compute while the last messages travel, an embedding's
among them. Shards of parameters are published behind the next forward. With `late_bound` the pieces
are kept as they came and weighted when the weights are known; until then nobody waits for them. The hazard: the
group must be the reducer's own, and `finish` must follow every backward, also one that failed.
Source: the data-parallel row of this library's schedules; "late-bound reduction".
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from stretto.overlap import tracing
from stretto.overlap.buckets import Bucket, Pieces, in_buckets, spread, sum_in_order
from stretto.overlap.inputs import can_overlap
from stretto.overlap.late_sums import LateBound, LateSums, as_rows
from stretto.overlap.owned_shards import OwnedShards
from stretto.overlap.p2p import peers_of
from stretto.overlap.published import Published
from stretto.overlap.sliced import SlicedWeight, sliced_layers
from stretto.overlap.streams import Made, Worker, made

__all__ = ["GradientReducer"]


class GradientReducer(LateBound, OwnedShards):
    """Reduces a module's gradients over a group while backward makes them.

    Args:
        module: its parameters that need gradients are reduced; they must be the same on every rank.
            Parameters that are DTensors are reduced by their local parts.
        group: a group of its own: no other operation may use it.
        bucket_bytes: gradients are sent in buckets of this size, in the reverse order of registration.
        last: the `nn.Linear` layers, one or several, whose weight gradients are computed row slice by row
            slice: others' rows in the backward, each sent to its owner at once, the own rows in `finish`,
            beside what is still on its way. Take some that backward comes to late, with products as long as
            sending what comes after them, embeddings included. Inputs and outputs' gradients are kept until
            `finish`. They leave in the order of backward, so then no rank may go without one.
        units: modules that use the parameters of their submodules without calling them, as
            `nn.MultiheadAttention` does: after `publish` all of a unit's parameters are awaited before its forward.
            What is inside gets no hook of its own, so it must be called by its unit alone.
        sharded: leave each rank the gradient of its own shard, in `owned`, instead of every gradient
            everywhere; parameters' own are None from when they leave.
        late_bound: keep every rank's pieces apart until `settle` or `fold` says what they are worth;
            `deliver` then gives the gradients. Costs one gradient's worth of memory on every rank for each
            backward that waits.
        average: divide the sum by the number of ranks; not with `late_bound`.
        check: precede payloads by headers, as everywhere in this room.

    Attributes:
        owned: sharded only: one flat parameter a bucket, in float32 (float64 for float64), holding this
            rank's shard and, after `finish` (`deliver` if late-bound), its gradient. An optimizer takes
            these; `publish` sends them to everyone. Load a checkpoint before the reducer is made.
        num_sent: bucket reductions begun so far.
        exposed_s: seconds in which this rank did nothing but wait for gradients or parameters.

    Raises:
        ValueError: for a module without trainable parameters, or a `last` that is not one of its linear
            layers or shares its weight.
        PeerError: from `finish` (late-bound: `settle`, `fold`), `deliver` and the forward after `publish`, if ranks
            disagree or one is gone.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        *,
        bucket_bytes: int = 25 << 20,
        last: nn.Linear | Sequence[nn.Linear] = (),
        units: Sequence[nn.Module] = (),
        sharded: bool = False,
        late_bound: bool = False,
        average: bool = True,
        check: bool = True,
    ) -> None:
        self._peers = peers_of(group)
        self._late_bound, self._check = late_bound, check
        self._scale = 1.0 / self._peers.world_size if average and not late_bound else 1.0
        self._parameters: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        if not self._parameters:
            raise ValueError("the module has no parameter that needs a gradient")
        can_overlap(self._peers, self._parameters[0].device)  # or says why not
        layers = sliced_layers(module, last)
        rest = [p for p in reversed(self._parameters) if not any(p is layer.weight for layer in layers)]
        self._buckets = in_buckets(rest, bucket_bytes, self._peers.world_size)
        self._sliced: dict[int, SlicedWeight] = {}
        for number, layer in enumerate(layers, len(self._buckets)):
            launch = partial(self._launch, number)
            self._sliced[number] = SlicedWeight(layer, self._peers, launch, lambda: self._accumulating)
            self._buckets.append(self._sliced[number].bucket)
        self.owned = [nn.Parameter(shard) for shard in self._wide_shards()] if sharded else []
        self._handles = [
            p.register_post_accumulate_grad_hook(partial(self._on_gradient, bucket, index))
            for bucket in self._buckets[: len(self._buckets) - len(layers)]  # a sliced weight leaves by itself
            for index, p in enumerate(bucket.parameters)
        ]
        self._published = Published(module, self._buckets, units, self._awaited)
        self._thread = Worker("stretto gradients")
        self._accumulating, self.exposed_s, self.num_sent = False, 0.0, 0
        # Sums for every rank leave at once, and with several peers messages of two buckets would share the link.
        self._runs_ahead = self._peers.world_size == 2 and (sharded or late_bound)
        self._left: dict[int, tuple[Pieces, Future[Made]]] = {}
        self._landed: dict[int, Future[Made]] = {}
        self._results: dict[int, Future[Made]] = {}
        self._late = LateSums(len(self._buckets), self._awaited)
        self._beside: dict[str, list[Tensor | None]] = {}

    @property
    def world_size(self) -> int:
        """Of the group."""
        return self._peers.world_size

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Within, backwards only add to the local gradients; the next one outside sends the sum."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Within, backwards add to local gradients of that name, which `finish(aside=name)` sends.

        For a term of the loss that is worth something else, as a KL term is. `.grad` is left alone.
        """
        awaited = {number: sliced.awaited for number, sliced in self._sliced.items()}
        self._swap(name)
        try:
            with self.accumulate():
                yield
        finally:
            self._swap(name)
            for number, sliced in self._sliced.items():
                sliced.awaited = awaited[number]  # one forward may go backward twice

    def finish(self, *, aside: str | None = None) -> None:
        """End a backward: send what it left (no gradient counts as zero) and wait for the rest.

        Then every gradient (or the own shards') is the sum or the average over ranks. With `late_bound` nothing
        is awaited: pieces go on travelling until `settle` or `fold` asks for them, and the parameters' gradients
        are None again. `aside`, late-bound only: send what backwards in `aside(name)` left instead.
        """
        if aside is not None and not self._late_bound:
            raise ValueError("only with late_bound=True have gradients aside a reduction of their own")
        if aside is not None:
            self._swap(aside)
        self._launch_all()
        if aside is not None:
            self._swap(aside)
        if self._late_bound:
            return
        for index, bucket in enumerate(self._buckets):
            result = self._awaited(self._results.pop(index))
            if self.owned:
                self.owned[index].grad = result
            else:
                bucket.write_gradients(result)

    def reset(self) -> None:
        """Forget what waits and what was folded or begun; what was settled stays. Late-bound only.

        Nothing is called back: what is on its way arrives and is dropped, and of a backward that was not ended
        the rest is sent. So every rank must do it, at the same place.
        """
        if any(bucket.launched for bucket in self._buckets):
            self._launch_all()
        self._late.forget()
        self._beside.clear()
        for bucket in self._buckets:
            bucket.drop_gradients()

    def deliver(self) -> None:
        """End the settling: the own shards' gradients become those of `owned`, or every rank's parameters'.

        Replaces gradients that are there.
        """
        settled = self._late.take()
        if self.owned:
            for owned, gradient in zip(self.owned, settled):
                owned.grad = gradient
            return
        submit, peers, pairs = self._thread.submit, self._peers, zip(self._buckets, settled)
        arriving = [submit(b.device, spread, peers, b, made(g), check=self._check) for b, g in pairs]
        for bucket, future in zip(self._buckets, arriving):
            bucket.write_gradients(self._awaited(future))

    def close(self) -> None:
        """Give the module back as it was, whatever became of the group; again it does nothing."""
        try:
            self._published.receive()
        finally:
            self._published.forget()
            for handle in self._handles:
                handle.remove()
            for sliced in self._sliced.values():
                sliced.layer.__dict__.pop("forward", None)
            self._land()
            self._thread.shutdown()

    def _awaited(self, future: "Future[Made]") -> Tensor:
        """What the thread has made, once it has; the time until then is exposed."""
        with tracing.blocked("gradient reduction") as span:
            result = future.result().take()
        self.exposed_s += span.seconds
        self._peers.records.of("gradient reduction", "", (), "direct", 1).exposed_s += span.seconds
        return result

    def _on_gradient(self, bucket: Bucket, index: int, parameter: Tensor) -> None:
        if self._accumulating:
            return
        bucket.arrived(index)
        for number in range(len(self._buckets)):
            if not self._launch_up_to(number, whole=False):
                return

    def _launch_up_to(self, number: int, *, whole: bool) -> bool:
        """Send a bucket that is complete, or as it is; whether it is on its way."""
        bucket = self._buckets[number]
        if bucket.launched:
            return True
        if not whole and len(bucket.ready) < len(bucket.parameters):
            return False
        flat = made(bucket.flat_gradient())
        self._launch(number, lambda peer: flat.take()[bucket.slices.rows(peer)])
        return True

    def _launch(self, number: int, make: Callable[[int], Tensor]) -> None:
        self.num_sent += 1
        bucket = self._buckets[number]
        bucket.launched = True
        if self._late_bound or self.owned:  # what leaves is a copy
            bucket.drop_gradients()
        pieces = Pieces(self._peers, bucket, make, check=self._check)
        self._left[number] = pieces, self._thread.submit(bucket.device, pieces.send)
        self._land(but=number if self._runs_ahead else None)

    def _land(self, but: int | None = None) -> None:
        """Have the thread await what left, but for what runs ahead: with one peer, whose link then never pauses."""
        for number in [n for n in self._left if n != but]:
            (pieces, sent), device = self._left.pop(number), self._buckets[number].device
            landed = self._thread.submit(device, pieces.land, sent)
            if number in self._sliced and self._sliced[number].waits:
                self._landed[number] = landed
            else:
                self._complete(number, landed, None)

    def _complete(self, number: int, landed: "Future[Made]", own: Made | None) -> None:
        """Have the thread make what is wanted of pieces: themselves, the own sum, or every sum, flat."""
        bucket = self._buckets[number]

        def complete(own: Tensor | None) -> Tensor:
            pieces = landed.result().take()
            if own is not None:
                pieces[self._peers.rank] = own
            if self._late_bound:
                return pieces
            shard = sum_in_order(pieces, self._peers.rank).mul_(self._scale)
            return shard if self.owned else spread(self._peers, bucket, shard, check=self._check)

        made_of_them = self._thread.submit(bucket.device, complete, own)
        if self._late_bound:
            self._late.add(number, made_of_them)
        else:
            self._results[number] = made_of_them

    def _launch_all(self) -> None:
        """Send every bucket that has not left; compute the own rows of sliced weights meanwhile."""
        for index in range(len(self._buckets)):
            if index in self._sliced:
                self._sliced[index].flush()
            self._launch_up_to(index, whole=True)
        self._land()
        for index in list(self._landed):
            own = self._sliced[index].own()
            self._complete(index, self._landed.pop(index), made(own))
        for bucket in self._buckets:
            bucket.ready.clear()
            bucket.launched = False

    def _swap(self, name: str) -> None:
        """Exchange the parameters' gradients with those of that name beside them."""
        beside = self._beside.setdefault(name, [None] * len(self._parameters))
        for index, parameter in enumerate(self._parameters):
            parameter.grad, beside[index] = beside[index], parameter.grad

    def _columns(self, weights: Tensor) -> Tensor:
        if not self._late_bound:
            raise ValueError("the gradients are summed already; make the reducer with late_bound=True")
        return as_rows(weights, self.world_size)
