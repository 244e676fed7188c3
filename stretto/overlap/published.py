"""Parameters of which every rank owns a shard, sent to everyone behind the next forward.

Each module waits for its own before its forward, and a state dict for those that it holds. The hazard is a module
that reads a submodule's parameters without calling it: name it as a unit, inside of which modules stay unhooked, as
layers that take hooked ones for strangers want it. Source: ZeRO-1; this library's direct gather.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from stretto.overlap.buckets import Bucket, in_order_of_use, like, local, spread
from stretto.overlap.p2p import Peers
from stretto.overlap.streams import Made, Worker, made

__all__ = ["Published", "shards_of", "whole_of"]


class Published:
    """The parameters of `buckets` on their way; `awaited(future)` gives what a future holds once it is there."""

    def __init__(
        self,
        module: nn.Module,
        buckets: Sequence[Bucket],
        units: Sequence[nn.Module],
        awaited: Callable[["Future[Made]"], Tensor],
    ) -> None:
        self._buckets, self._awaited = buckets, awaited
        self._by_use = in_order_of_use(buckets, [p for p in module.parameters() if p.requires_grad])
        self._bucket_of = {id(p): index for index, b in enumerate(buckets) for p in b.parameters}
        self._arriving: dict[int, Future[Made]] = {}
        self.handles: list[Any] = []
        inside = {m for unit in units for m in unit.modules() if m is not unit}  # its unit has waited for it
        for m in module.modules():
            recurse = any(m is unit for unit in units) or isinstance(m, nn.MultiheadAttention)
            mine, own = self._buckets_of(m, recurse), self._buckets_of(m, recurse=False)
            if mine and m not in inside:
                self.handles.append(m.register_forward_pre_hook(partial(self._before, mine)))
            self.handles.append(m.register_state_dict_pre_hook(partial(self._before, own)))

    def send(self, owned: Sequence[Tensor], thread: Worker, peers: Peers, *, check: bool) -> None:
        """Start to send every bucket's own shard, the first layers' first.

        The parameters count as changed from here on, and not once more when they arrive: what was made of the old
        ones is stale now, and a forward that begins now is one of the new ones.
        """
        increment_version([local(p) for bucket in self._buckets for p in bucket.parameters])
        for index in self._by_use:
            bucket, shard = self._buckets[index], made(owned[index].detach().clone())
            self._arriving[index] = thread.submit(bucket.device, spread, peers, bucket, shard, check=check)

    def receive(self) -> None:
        """Wait for all."""
        self._receive(list(self._arriving))

    def forget(self) -> None:
        """Wait for none, from now on."""
        for handle in self.handles:
            handle.remove()
        self._arriving.clear()

    def _buckets_of(self, module: nn.Module, recurse: bool) -> set[int]:
        """Looked up here and not in a forward, where other tensors may stand in for the parameters."""
        ids = (id(p) for p in module.parameters(recurse=recurse))
        return {self._bucket_of[i] for i in ids if i in self._bucket_of}

    def _before(self, mine: set[int], *_: Any) -> None:
        self._receive([index for index in list(self._arriving) if index in mine])

    def _receive(self, indices: list[int]) -> None:
        for index in indices:
            bucket, flat = self._buckets[index], self._awaited(self._arriving.pop(index))
            for parameter, part in zip(bucket.parameters, bucket.parts(flat)):
                local(parameter).data.copy_(part)


def whole_of(buckets: Sequence[Bucket], parameters: Sequence[Tensor], flat: Sequence[Tensor]) -> list[Tensor]:
    """Flat vectors, one a bucket, as one tensor a parameter, in the order of `parameters`."""
    whole: dict[int, Tensor] = {}
    for bucket, vector in zip(buckets, flat):
        whole |= {id(p): like(p, part) for p, part in zip(bucket.parameters, bucket.parts(vector))}
    return [whole[id(p)] for p in parameters]


def shards_of(
    buckets: Sequence[Bucket], parameters: Sequence[Tensor], values: Sequence[Tensor], rank: int
) -> list[Tensor]:
    """Of one tensor a parameter, the elements that `rank` owns: a new flat vector a bucket."""
    by_id = {id(p): local(value) for p, value in zip(parameters, values)}
    flat = [torch.cat([by_id[id(p)].flatten() for p in bucket.parameters]) for bucket in buckets]
    return [vector[bucket.slices.rows(rank)].clone() for vector, bucket in zip(flat, buckets)]
