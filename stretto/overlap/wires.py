"""Where a group's messages travel: a wire for the tensors of the host, one for those of each device, one for words.

What the host reads, headers and measurements, is always a host tensor: read from a device it would stop the host at
every step, and nothing would be hidden. Such words have connections of their own: a word behind a payload comes only
after it, and the next payload waits for the word. A wire that the group lacks gets a gloo companion of the same
ranks, made from its own store at first use. Under NCCL payloads have a communicator of their own, so that they queue
behind no other collective. The hazard: a companion is made by all ranks at once, so a wire is opened where every rank
passes. Source: torch's ProcessGroupNCCL: its stream waits for what the current one was given before the message was
posted, and `Work.wait` makes the current stream wait for the message's end event; it blocks nobody on the host.
"""

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.overlap.faults import hang_up
from stretto.overlap.moments import Moment, now
from stretto.overlap.staged import Copies, DeviceCopies, Staged

__all__ = ["HOST", "Direct", "Message", "Nccl", "Wire", "messages_of", "open_wire", "open_words", "staged_wire"]

HOST = torch.device("cpu")
Message = tuple[str, Tensor, int]
"""("sending to" or "receiving from", tensor, peer)."""


def messages_of(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> list[Message]:
    """One batch of (tensor, peer) messages; empty tensors are left out on both sides.

    Receives come first: gloo sends a payload when its receiver has said that it is ready, and says so on the
    connection of its own payload. Behind that, two ranks that trade would take turns on the link.
    """
    messages = [("receiving from", tensor, peer) for tensor, peer in receives if tensor.numel()]
    return messages + [("sending to", tensor, peer) for tensor, peer in sends if tensor.numel()]


class Wire(Protocol):
    """What carries messages between the ranks of one group, in the order in which they are posted."""

    def post(self, messages: list[Message]) -> list[Any]:
        """Start a batch; one work a message, or one for all."""

    def end(self, work: Any) -> None:
        """Until a message has ended, as far as the host can know; `RuntimeError` if its peer is gone."""

    def settle(self, work: Any) -> None:
        """Let the caller's stream, and the one that it was posted on, go on only when the message has ended."""

    def end_of(self, work: Any) -> Moment | None:
        """When a message ends, where the host does not wait for that; None where it does."""

    def hang_up(self) -> None:
        """Make peers that wait for this rank fail now."""


class Direct:
    """Tensors as they are, given to a backend whose waits block the host, as gloo's do."""

    def __init__(self, backend: Any, rank: int, world_size: int) -> None:
        self._backend, self._rank, self._world_size = backend, rank, world_size

    def post(self, messages: list[Message]) -> list[Any]:
        """As `Wire`."""
        return _start(self._backend, messages)

    def end(self, work: Any) -> None:
        """As `Wire`."""
        work.wait()

    def settle(self, work: Any) -> None:
        """Nothing is left to do."""

    def end_of(self, work: Any) -> None:
        """The host waits."""

    def hang_up(self) -> None:
        """As `Wire`; gloo only."""
        hang_up(self._backend, self._rank, self._world_size)


class Nccl:
    """A communicator of its own, on a stream of high priority of its own, connected when it is made.

    Connected then because a batch of some ranks only must not be a communicator's first. NCCL knows no tags:
    messages match in the order of posting. A tensor may be freed once its transfer was settled: the stream that it
    was posted on, from whose memory it is, waits too, whichever stream is current by then.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, device: torch.device, timeout: timedelta
    ) -> None:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
        self._device = device
        self._backend = dist.ProcessGroupNCCL(dist.PrefixStore("stretto nccl", store), rank, world_size, options)
        self._backend._set_sequence_number_for_group()
        self._backend.eager_connect_single_device(device)
        self._aside = torch.cuda.Stream(device)
        weakref.finalize(self, self._backend.shutdown)

    def post(self, messages: list[Message]) -> list[Any]:
        """As `Wire`; one work for all messages, and the stream on which it was posted."""
        posted_on = torch.cuda.current_stream(self._device)
        return [(work, posted_on) for work in _start(self._backend, messages)]

    def end(self, work: Any) -> None:
        """The host cannot know, and need not."""

    def settle(self, work: Any) -> None:
        """As `Wire`."""
        sent, posted_on = work
        if torch.cuda.current_stream(self._device) != posted_on:
            with torch.cuda.stream(posted_on):
                sent.wait()
        sent.wait()

    def end_of(self, work: Any) -> Moment:
        """As `Wire`."""
        with torch.cuda.stream(self._aside):
            work[0].wait()
            return now(self._device)

    def hang_up(self) -> None:
        """End every message in flight; peers learn of it from the headers' wire."""
        self._backend.abort()


def open_wire(
    group: dist.ProcessGroup, rank: int, world_size: int, backends: dict[str, str], device: torch.device
) -> Wire:
    """The wire of a group for tensors of a device; `backends` names the group's own by type of device."""
    kind = backends.get(device.type, "none")
    if kind == "nccl":
        return Nccl(group.get_group_store(), rank, world_size, device, _timeout_of(group, backends))
    if kind == "gloo" and device.type == "cuda":
        return staged_wire(group, rank, world_size, backends, DeviceCopies(device))
    if kind == "none" and device == HOST:
        return Direct(_companion(group, rank, world_size, backends, "host"), rank, world_size)
    return Direct(group._get_backend(device), rank, world_size)


def open_words(group: dist.ProcessGroup, rank: int, world_size: int, backends: dict[str, str]) -> Direct:
    """A wire for small messages of the host: connections of their own, served by the thread of the group's own."""
    if backends.get(HOST.type) != "gloo":
        return Direct(_companion(group, rank, world_size, backends, "words"), rank, world_size)
    gloo: Any = dist.ProcessGroupGloo  # its stubs lack these options
    own: Any = group._get_backend(HOST).options
    options = gloo._Options()
    options._devices, options._timeout, options._threads = own._devices, own._timeout, 1
    return Direct(gloo(_store_of(group, "words"), rank, world_size, options), rank, world_size)


def staged_wire(
    group: dist.ProcessGroup, rank: int, world_size: int, backends: dict[str, str], copies: Copies
) -> Staged:
    """A wire through buffers on the host."""
    return Staged(_companion(group, rank, world_size, backends, "staged"), rank, world_size, copies)


def _companion(
    group: dist.ProcessGroup, rank: int, world_size: int, backends: dict[str, str], name: str
) -> dist.ProcessGroupGloo:
    """A gloo backend of the same ranks, which meet in the group's own store: no other group's name is touched."""
    return dist.ProcessGroupGloo(_store_of(group, name), rank, world_size, _timeout_of(group, backends))


def _store_of(group: dist.ProcessGroup, name: str) -> dist.Store:
    """Where a companion's ranks find each other; over a connection of its own, so that no other waits meanwhile."""
    store: Any = group.get_group_store()  # its stubs lack `clone`
    return dist.PrefixStore(f"stretto {name}", store.clone())


def _timeout_of(group: dist.ProcessGroup, backends: dict[str, str]) -> timedelta:
    """The group's own patience."""
    options = group._get_backend(torch.device(next(iter(backends)))).options
    timeout: timedelta = options._timeout
    return timeout


def _start(backend: Any, messages: list[Message]) -> list[Any]:
    """Post messages in order, in one batch where the backend has batches."""
    if backend.supports_coalescing:
        backend._start_coalescing()
    works = [
        backend.send([t], peer, 0) if verb == "sending to" else backend.recv([t], peer, 0)
        for verb, t, peer in messages
    ]
    return [backend._end_coalescing()] if backend.supports_coalescing else works
