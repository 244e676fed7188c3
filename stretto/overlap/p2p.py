"""One step of sends and receives, and what a group remembers between calls.

Each step's send and receive leave in one batch, in the same order on all ranks, and are described to the peer
by a header that travels one step ahead. The hazard is a buffer: it belongs to its transfer until that was
waited for. Source: the batch of one send and one receive a step is what kept naive loops from hanging at four
and more ranks.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.overlap.faults import Header, PeerError, hang_up, refuse, report
from stretto.overlap.routes import Kind, Route, Schedule, route

__all__ = ["Call", "Lane", "Peers", "Transfer", "peers_of"]

Shape = tuple[int, ...]


class Peers:
    """What belongs to a process group and to no call: ranks, the number of calls, the fault that ended it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.store: dist.Store = group.get_group_store()
        self.num_calls = 0
        self.fault = ""
        self.unfinished: list[Transfer] = []

    @property
    def group(self) -> dist.ProcessGroup:
        """The group itself, which owns this object and not the other way round."""
        group = self._group()
        assert group is not None
        return group

    @contextmanager
    def call(self, operation: str) -> Iterator["Call"]:
        """One call of an operation. Every rank of the group enters it, in the same order.

        A `ValueError` raised before anything was sent leaves the group usable; any later error ends it.
        """
        call = Call(self, operation, self.num_calls)
        with self.guard(call):
            self.num_calls += 1
            yield call
            call.finish()

    @contextmanager
    def resume(self, call: "Call") -> Iterator[None]:
        """The rest of a call begun with `call`; inside an autograd function, around its transfers alone.

        What autograd does around the function, such as ending a recomputation early, is none of the call's
        faults.
        """
        with self.guard(call):
            yield
            call.finish()

    @contextmanager
    def guard(self, call: "Call") -> Iterator[None]:
        """Turn whatever goes wrong within into the end of the group, told to all ranks."""
        if self.fault:
            raise PeerError(f"this group is dead and must be made anew; it ended with: {self.fault}")
        try:
            yield
        except PeerError:
            raise
        except BaseException as error:
            if isinstance(error, ValueError) and call.num_posts == 0:
                place = f"rank {self.rank} of {self.world_size}, {call.operation}, call {call.number}"
                refuse(self.store, f"{place}: {error}", call.number)
                raise
            message = call.end(f"{type(error).__name__}: {error}")
            if isinstance(error, Exception):
                raise PeerError(message) from error
            raise


_peers: "weakref.WeakKeyDictionary[dist.ProcessGroup, Peers]" = weakref.WeakKeyDictionary()


def peers_of(group: dist.ProcessGroup) -> Peers:
    """The state of a group, made at its first use and gone with it.

    It is kept beside the group, not by the caller, because a count of calls and a death are facts of the
    group: two models on one group must share them, two groups must not.
    """
    if not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("this rank is not in the group; only its members may call an operation on it")
        raise ValueError(f"group must be a torch.distributed.ProcessGroup, not {type(group).__name__}")
    if group not in _peers:
        if dist.get_rank(group) < 0:
            raise ValueError("this rank is not in the group; only its members may call an operation on it")
        _peers[group] = Peers(group)
    return _peers[group]


@dataclass
class Transfer:
    """Works in flight, and the messages whose tensors belong to them until they were waited for."""

    works: list[dist.Work]
    messages: list[tuple[str, Tensor, int]]
    """("sending to" or "receiving from", tensor, peer)."""


class Call:
    """The transfers of one call, posted and waited for in program order."""

    def __init__(self, peers: Peers, operation: str, number: int) -> None:
        self.peers = peers
        self.operation = operation
        self.number = number
        self.num_posts = 0
        self.position = "the first step"
        self._in_flight: list[Transfer] = []

    def post(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Transfer:
        """Start one batch of (tensor, peer) messages; empty tensors are left out on both sides."""
        group = self.peers.group
        messages = [("sending to", tensor, peer) for tensor, peer in sends if tensor.numel()]
        messages += [("receiving from", tensor, peer) for tensor, peer in receives if tensor.numel()]
        batch = [
            dist.P2POp(dist.isend if verb == "sending to" else dist.irecv, t, group=group, group_peer=peer)
            for verb, t, peer in messages
        ]
        self.num_posts += 1
        transfer = Transfer(dist.batch_isend_irecv(batch) if batch else [], messages)
        self._in_flight.append(transfer)
        return transfer

    def wait(self, transfer: Transfer) -> None:
        """Until the transfer's messages have arrived and left; a peer that is gone ends the group."""
        each = len(transfer.works) == len(transfer.messages)  # NCCL gives one work for the whole batch
        for index, work in enumerate(transfer.works):
            try:
                work.wait()
            except RuntimeError as error:
                messages = transfer.messages[index:] if each else transfer.messages
                doing = " and ".join(f"{verb} rank {peer} {tuple(t.shape)}" for verb, t, peer in messages)
                self.fail(f"{doing}: {str(error).splitlines()[0]}", error)
        self.leave([transfer])

    def release(self, buffer: Tensor) -> None:
        """The end of a buffer that this call allocated: nobody reads it after this. (The tests poison it.)"""

    def leave(self, transfers: Sequence[Transfer]) -> None:
        """Let transfers outlive the call: whoever holds them waits for them."""
        self._in_flight = [t for t in self._in_flight if not any(t is left for left in transfers)]

    def finish(self) -> None:
        """Wait for whatever is still in flight."""
        while self._in_flight:
            self.wait(self._in_flight[0])

    def fail(self, cause: str, error: BaseException | None = None) -> NoReturn:
        """End the group and raise."""
        raise PeerError(self.end(cause)) from error

    def end(self, cause: str) -> str:
        """End the group: enter the fault in its store, hang up; a message with all ranks' first fault."""
        peers = self.peers
        place = f"rank {peers.rank} of {peers.world_size}, {self.operation}, call {self.number}"
        mine = f"{place}, {self.position}: {cause}"
        peers.fault = report(peers.store, mine, self.number)
        peers.unfinished += self._in_flight
        hang_up(peers.group, peers.rank, peers.world_size)
        seen = "" if peers.fault == mine else f"; seen here: {mine}"
        return f"{peers.fault}{seen}; this group is dead and must be made anew"

    def exchange_sizes(self, header: Header, device: torch.device) -> list[int]:
        """The number of rows of every rank's slice, from one header to and from every peer.

        All else in the headers, the shape behind the rows included, must agree.
        """
        rank, world_size = self.peers.rank, self.peers.world_size
        routes = [route("scatter", "direct", rank, world_size, step) for step in range(world_size - 1)]
        received = {r.recv_from: Header.blank(device) for r in routes}
        words = header.pack(device)
        self.position = "exchange of sizes"
        self.wait(self.post([(words, r.send_to) for r in routes], [(received[p], p) for p in received]))
        sizes = [header.shape[0]] * world_size
        for peer, buffer in received.items():
            theirs = Header.unpack(buffer)
            self.compare(replace(header, shape=(*theirs.shape[:1], *header.shape[1:])), theirs, peer)
            sizes[peer] = theirs.shape[0]
        return sizes

    def compare(self, expected: Header, received: Header, peer: int) -> None:
        """Fail unless a peer announced what this rank expects."""
        differences = expected.differences(received)
        if differences:
            self.fail(f"expected from rank {peer} [{expected}], which announced [{received}]: {differences} differ")


class Lane:
    """The steps of one loop within a call: each step's header travels one step ahead of its payload.

    `shapes(route)` is the pair (sent, received) of slice shapes of a step, rows first. With `check=False` no
    header is sent: ranks that disagree then hang, abort or compute wrong numbers.
    """

    def __init__(
        self,
        call: Call,
        kind: Kind,
        header: Header,
        shapes: Callable[[Route], tuple[Shape, Shape]],
        *,
        device: torch.device,
        check: bool,
    ) -> None:
        peers = call.peers
        schedule: Schedule = "ring" if header.schedule == "ring" else "direct"
        self.call = call
        self.routes = [route(kind, schedule, peers.rank, peers.world_size, i) for i in range(peers.world_size)]
        self.last = peers.world_size - 1
        self._header, self._shapes = replace(header, lane=kind), shapes
        self._device, self._check = device, check
        self._buffer = Header.blank(device)
        self._incoming = self._announce(0)

    def post(self, step: int, subslice: int, outgoing: Tensor, incoming: Tensor) -> Transfer:
        """Send and receive one sub-slice of a step; before its first, the header is awaited and compared."""
        call, here = self.call, self.routes[step]
        sent, received = self._shapes(here)
        place = f"{self._header.lane} step {step}, sub-slice {subslice}"
        call.position = f"{place} (slices {sent} to rank {here.send_to}, {received} from rank {here.recv_from})"
        if self._incoming is not None and subslice == 0:
            call.wait(self._incoming)
            expected = replace(self._header, step=step, shape=received)
            call.compare(expected, Header.unpack(self._buffer), here.recv_from)
            self._incoming = self._announce(step + 1)
        return call.post([(outgoing, here.send_to)], [(incoming, here.recv_from)])

    def _announce(self, step: int) -> Transfer | None:
        if not self._check or step >= self.last:
            return None
        here = self.routes[step]
        words = replace(self._header, step=step, shape=self._shapes(here)[0]).pack(self._device)
        self._buffer = Header.blank(self._device)
        return self.call.post([(words, here.send_to)], [(self._buffer, here.recv_from)])
