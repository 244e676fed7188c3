"""Gradients of an FSDP2 model, reduced when and as the caller says, not after every backward.

`FsdpReducer` stands in for FSDP2's reduce-scatter. "late": pieces go straight to their owners during the backward and
are weighted when their weights are known, so that nothing is left to send then. "coalesced": a rank adds its whole
gradients up by itself, and they are reduced once, when they are asked for. FSDP2 itself is called with gradient
synchronisation on at every backward; nothing is sent unless this class does it, and `num_sent` counts. The hazards:
ranks must run the same forwards and backwards; `.grad` is zero until `deliver`; with one rank FSDP2 does not call
anybody, and the class refuses. Source: torch's custom reduce-scatter; this library's late-bound reduction.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from stretto.overlap import tracing
from stretto.overlap.buckets import Bucket, sum_in_order, trade_pieces
from stretto.overlap.fsdp_door import doors_of
from stretto.overlap.late_sums import LateBound, LateSums, as_rows
from stretto.overlap.p2p import Peers, peers_of
from stretto.overlap.streams import Made, Worker, made

__all__ = ["FsdpReducer"]


class FsdpReducer(LateBound):
    """Reduces the gradients of modules that `fully_shard` wrapped; `.grad` holds them after `deliver`.

    Backwards of a sample run outside of `accumulate()` but for all that are not to send; `finish()` ends the sample.
    Then `settle`, or `fold` and `combine`, say what samples are worth, and `deliver()` puts every rank's shard of the
    weighted sum into `.grad`. Where weights are known before the backward (they are in the loss): all backwards,
    `finish()`, `settle(ones)`, `deliver()`.

    Args:
        modules: wrapped modules; those without anything to train are left alone. Gradients must be divided by 1.
        group: the ranks among which they are sharded, in that order, in a group that nothing else uses.
        hold: "late": pieces of every sample wait with their owners, N shards a sample (folded: one shard a sum).
            "coalesced": each rank holds whole gradients, one a waiting sample (folded: one a sum) and their sum, and
            `deliver` reduces once.
        send: late only. "last": a backward inside `accumulate()` adds to a whole gradient on its rank. "every": it
            sends as well; no whole gradient is kept, and as many times the bytes travel.
        replicate_group: ranks that hold the same shards of other copies of the model: `deliver` sums over it.
        check: precede payloads by headers.

    Attributes:
        num_sent: reductions of one module's gradients begun so far, all-reduces over `replicate_group` not counted.
        exposed_s: seconds in which this rank did nothing but wait for gradients.

    Raises:
        ValueError: for modules that are not wrapped, a group of other ranks or of one (there FSDP2 reduces nothing:
            accumulate on the one rank), from `finish` where FSDP2 has not left `.grad` to the reducer.
        PeerError: from `settle`, `fold` and `deliver`, if ranks disagree or one is gone.
    """

    def __init__(
        self,
        modules: Sequence[FSDPModule],
        group: dist.ProcessGroup,
        *,
        hold: Literal["late", "coalesced"],
        send: Literal["last", "every"] = "last",
        replicate_group: dist.ProcessGroup | None = None,
        check: bool = True,
    ) -> None:
        if hold not in ("late", "coalesced") or send not in ("last", "every"):
            raise ValueError(f"hold={hold!r}, send={send!r}: hold is late or coalesced, send is last or every")
        self._peers, self._check = peers_of(group), check
        if self._peers.world_size == 1:
            raise ValueError("one rank has no reduction, and FSDP2 calls none; leave the model unsharded there")
        self._hold, self._sends_always = hold, hold == "late" and send == "every"
        self._replicate_group = replicate_group
        self._doors = doors_of(modules, self._take)
        if not self._doors:
            raise ValueError("no module has a parameter that needs a gradient")
        ranks = dist.get_process_group_ranks(group)
        theirs = dist.get_process_group_ranks(self._doors[0].process_group)
        if ranks != theirs:
            self._close_doors()
            raise ValueError(f"group has the ranks {ranks}, but the modules are sharded over {theirs}")
        self._thread = Worker("stretto sharded gradients")
        self._is_accumulating = False
        self._aside: str | None = None
        self._present: dict[int, Made] = {}
        self._beside: dict[str, dict[int, Made]] = {}
        self._sent: dict[int, Future[Made]] = {}
        self._late = LateSums(len(self._doors), self._awaited)
        self.num_sent, self.exposed_s = 0, 0.0

    @property
    def world_size(self) -> int:
        """As many columns have weights: copy by copy of the model, within each the ranks that share it."""
        copies = 1 if self._replicate_group is None else dist.get_world_size(self._replicate_group)
        return copies * self._peers.world_size

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Within, backwards add to a whole gradient on this rank; the next one outside sends the sum."""
        before, self._is_accumulating = self._is_accumulating, not self._sends_always
        try:
            yield
        finally:
            self._is_accumulating = before

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Within, backwards add to a whole gradient of that name on this rank, which `finish(aside=name)` ends."""
        before, self._aside = self._aside, name
        try:
            yield
        finally:
            self._aside = before

    def finish(self, *, aside: str | None = None) -> None:
        """End a sample, or what ran in `aside(name)`: what has not left yet is sent if it is to be.

        No backward counts as zeros. Nothing is awaited.
        """
        held = self._held(aside)
        for number, door in enumerate(self._doors):
            door.check()
            left = held.pop(number, None)
            if self._hold == "late":
                if left is not None or number not in self._sent:
                    self._send(number, left or made(_zeros(door.bucket)))
                self._late.add(number, self._sent.pop(number))
            else:
                whole: Future[Made] = Future()
                left = left or made(_zeros(door.bucket))
                whole.set_result(Made(left.tensor.unsqueeze(0), left.event))
                self._late.add(number, whole)

    def deliver(self) -> None:
        """Make this rank's shards of what was settled the parameters' gradients; replaces what is there.

        "coalesced" sends now, once; over a `replicate_group` the shards are summed now.
        """
        shards = self._late.take()
        if self._hold == "coalesced":
            leaving = [self._reduced(number, made(whole)) for number, whole in enumerate(shards)]
            shards = [self._awaited(future) for future in leaving]
        if self._replicate_group is not None:
            with tracing.blocked("gradient reduction") as span:
                works = [dist.all_reduce(s, group=self._replicate_group, async_op=True) for s in shards]
                for work in works:
                    work.wait()
            self.exposed_s += span.seconds
        for door, shard in zip(self._doors, shards):
            door.put(shard.to(door.bucket.dtype))

    def reset(self) -> None:
        """Forget what waits and what was folded or begun; what was settled stays.

        Nothing is called back, so every rank must do it, at the same place.
        """
        self._present.clear()
        self._beside.clear()
        self._sent.clear()
        self._late.forget()

    def close(self) -> None:
        """Give the modules FSDP2's own reduction back."""
        self._close_doors()
        self._thread.shutdown()

    def _close_doors(self) -> None:
        for door in self._doors:
            door.close()

    def _held(self, aside: str | None) -> dict[int, Made]:
        """What has not left of the present sample, or of what ran aside under a name, by module."""
        return self._present if aside is None else self._beside.setdefault(aside, {})

    def _take(self, number: int, flat: Tensor) -> None:
        """A module's gradients, from within its backward."""
        held = self._held(self._aside)
        if number in held:
            flat = held.pop(number).take().add_(flat)
        if self._hold == "coalesced" or self._aside is not None or self._is_accumulating:
            held[number] = made(flat)
        else:
            self._send(number, made(flat))

    def _send(self, number: int, flat: Made) -> None:
        """Start to send pieces to their owners; a second time within a sample the owners add them up."""
        self.num_sent += 1
        bucket = self._doors[number].bucket
        pieces = self._thread.submit(bucket.device, _trade, self._peers, bucket, flat, self._check)
        before = self._sent.get(number)
        if before is not None:
            first, second = before, pieces
            pieces = self._thread.submit(bucket.device, lambda: first.result().take().add_(second.result().take()))
        self._sent[number] = pieces

    def _reduced(self, number: int, flat: Made) -> "Future[Made]":
        self.num_sent += 1
        bucket, peers = self._doors[number].bucket, self._peers

        def sum_up(flat: Tensor) -> Tensor:
            return sum_in_order(_trade(peers, bucket, flat, self._check), peers.rank)

        return self._thread.submit(bucket.device, sum_up, flat)

    def _columns(self, weights: Tensor) -> Tensor:
        """ "late": of this copy's ranks, whose pieces come here. "coalesced": of this rank alone."""
        copy = 0 if self._replicate_group is None else dist.get_rank(self._replicate_group)
        first = copy * self._peers.world_size
        here = slice(first, first + self._peers.world_size)
        if self._hold == "coalesced":
            here = slice(first + self._peers.rank, first + self._peers.rank + 1)
        return as_rows(weights, self.world_size)[:, here]

    def _awaited(self, future: "Future[Made]") -> Tensor:
        """What a future holds, (num_columns, elements) or flat, once it is there; the time until then is exposed."""
        with tracing.blocked("gradient reduction") as span:
            result = future.result().take()
        self.exposed_s += span.seconds
        self._peers.records.of("gradient reduction", "", (), "direct", 1).exposed_s += span.seconds
        return result


def _zeros(bucket: Bucket) -> Tensor:
    return torch.zeros(bucket.slices.total, dtype=bucket.dtype, device=bucket.device)


def _trade(peers: Peers, bucket: Bucket, flat: Tensor, check: bool) -> Tensor:
    """Pieces (world_size, own elements) of the own shard, for `flat` (slices.total,)."""
    return trade_pieces(peers, bucket, lambda peer: flat[bucket.slices.rows(peer)], check=check)
