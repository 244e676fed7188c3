"""One step of sends and receives, and what a group remembers between calls.

Each step's send and receive leave in one batch, in the same order on all ranks, and are described to the peer
by a header that travels one step ahead. The hazard is a buffer: it belongs to its transfer until that was
waited for. Source: the batch of one send and one receive a step is what kept naive loops from hanging at four
and more ranks.
"""

import time
import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.overlap import tracing
from stretto.overlap.faults import Header, PeerError, enter, refuse
from stretto.overlap.law import Choice
from stretto.overlap.moments import Moment, now
from stretto.overlap.records import Record, Records, Report
from stretto.overlap.transfers import Transfer
from stretto.overlap.waits import keep_lead
from stretto.overlap.wires import HOST, Message, Wire, messages_of, open_wire, open_words

__all__ = ["Call", "Peers", "peers_of", "report"]


class Peers:
    """What belongs to a process group and to no call: ranks, the number of calls, the fault that ended it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.rank = dist.get_rank(group)
        self.backends = dict(pair.split(":") for pair in str(dist.get_backend_config(group)).split(","))
        self.world_size = dist.get_world_size(group)
        self.store: dist.Store = group.get_group_store()
        self.num_calls = 0
        self.fault = ""
        self.unfinished: list[Transfer] = []
        """Transfers whose call has ended and that nobody waits for: the next call does."""
        self.records = Records()
        self.choices: dict[Hashable, Choice] = {}
        self.wires: dict[torch.device | str, Wire] = {}  # by the device of what they carry, and "words"

    @property
    def group(self) -> dist.ProcessGroup:
        """The group itself, which owns this object and not the other way round."""
        group = self._group()
        assert group is not None
        return group

    def backend(self, device: torch.device) -> str:
        """The name of what carries the group's messages for a device: "gloo", "nccl", ..."""
        return self.backends.get(device.type, "none")

    def wire(self, device: torch.device) -> Wire:
        """What carries tensors of a device. Every rank must come here in the same call: the first time opens it."""
        if device not in self.wires:
            self.wires[device] = open_wire(self.group, self.rank, self.world_size, self.backends, device)
        return self.wires[device]

    def words(self, device: torch.device) -> torch.device:
        """Where the small messages live that go beside tensors of a device and that the host reads."""
        return HOST if self.backend(device) in ("gloo", "nccl") else device

    def hang_up(self) -> None:
        """Make peers that wait for this rank fail now."""
        if HOST.type in self.backends:
            self.wire(HOST)
        for wire in self.wires.values():
            wire.hang_up()

    @contextmanager
    def call(self, operation: str, *, background: bool = False) -> Iterator["Call"]:
        """One call of an operation. Every rank of the group enters it, in the same order.

        A `ValueError` or `TypeError` raised before anything was sent leaves the group usable; any later error ends
        it. In the `background`, in a thread that only communicates, waits expose nothing.
        """
        call = Call(self, operation, self.num_calls, background=background)
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
            if isinstance(error, (ValueError, TypeError)) and call.num_posts == 0:
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
        way_out = "" if dist.is_initialized() else "; call torch.distributed.init_process_group first"
        raise ValueError(f"group must be a torch.distributed.ProcessGroup, not {type(group).__name__}{way_out}")
    if group not in _peers:
        if dist.get_rank(group) < 0:
            raise ValueError("this rank is not in the group; only its members may call an operation on it")
        keep_lead()
        _peers[group] = Peers(group)
    return _peers[group]


def report(group: dist.ProcessGroup) -> Report:
    """What every kind of call on a group did so far on this rank; `print` it."""
    return peers_of(group).records.report()


class Call:
    """The transfers of one call, posted and waited for in program order."""

    def __init__(self, peers: Peers, operation: str, number: int, *, background: bool = False) -> None:
        self.peers = peers
        self.background = background
        self.is_trial = False
        """What runs is measured and thrown away: it does not enter the report."""
        self.operation = operation
        self.number = number
        self.num_posts = 0
        self.position = "the first step"
        self.tuned_as = ""
        self.facts: Hashable = ()
        self.choice: Choice | None = None
        self.why = ""
        self.exposed_s = 0.0
        """Seconds in which the host did nothing but wait for messages."""
        self.device = HOST
        """Of the tensors that it sends."""
        self.waits: list[tuple[Moment, Moment]] = []
        """In a trial: when the caller, or its stream, began and ended to wait."""
        self._in_flight: list[Transfer] = []
        self._record: Record | None = None
        self._recorded_s = 0.0
        self._start_s = time.perf_counter()
        self._product: Moment = self._start_s

    def post(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Transfer:
        """Start one batch of (tensor, peer) messages; empty tensors are left out on both sides."""
        messages = messages_of(sends, receives)
        return self._start(messages, self.peers.wire(messages[0][1].device) if messages else None)

    def tell(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], device: torch.device
    ) -> Transfer:
        """Start one batch of small messages that go beside tensors of a device; the host's wait behind no payload."""
        messages = messages_of(sends, receives)
        return self._start(messages, self._words_wire(device) if messages else None)

    def _words_wire(self, device: torch.device) -> Wire:
        peers, home = self.peers, self.peers.words(device)
        if home != HOST or peers.backends.get(HOST.type, "gloo") != "gloo":
            return peers.wire(home)
        if "words" not in peers.wires:
            if HOST.type in peers.backends:
                self._meet()
            peers.wires["words"] = open_words(peers.group, peers.rank, peers.world_size, peers.backends)
        return peers.wires["words"]

    def _meet(self) -> None:
        """Until all are here: who refused, never comes or died is missed now, as ever, and not while opening."""
        others = [peer for peer in range(self.peers.world_size) if peer != self.peers.rank]
        here, there = ([(torch.zeros(1, device=HOST), peer) for peer in others] for _ in range(2))
        self.wait(self._start(messages_of(here, there), self.peers.wire(HOST)))

    def _start(self, messages: list[Message], wire: Wire | None) -> Transfer:
        self.num_posts += 1
        transfer = Transfer(wire.post(messages) if wire is not None else [], messages, wire)
        if tracing.is_tracing():
            transfer.watch(self.position, self.name, self.operation, now(self.device))
        self._in_flight.append(transfer)
        return transfer

    def wait(self, transfer: Transfer) -> None:
        """Until the transfer's messages have arrived and left; a peer that is gone ends the group."""
        each = len(transfer.works) == len(transfer.messages)  # NCCL gives one work for the whole batch
        start_s, start = time.perf_counter(), self.now()
        for index in range(len(transfer.works)):
            try:
                transfer.wait(index)
            except RuntimeError as error:
                messages = transfer.messages[index:] if each else transfer.messages
                doing = " and ".join(f"{verb} rank {peer} {tuple(t.shape)}" for verb, t, peer in messages)
                self.fail(f"{doing}: {str(error).splitlines()[0]}", error)
        if not self.background:
            end = self.now()
            self.exposed_s += time.perf_counter() - start_s
            if self.is_trial:
                self.waits.append((start, end))
            if tracing.is_tracing():
                tracing.stamp("wait", self.position, start, end, self.name, self.operation)
        self.leave([transfer])

    @property
    def name(self) -> str:
        """The group and the call's number on it."""
        return f"{self.peers.group.group_name}, call {self.number}"

    def begin_product(self) -> None:
        """The caller starts to compute."""
        self._product = self.now()

    def now(self) -> Moment:
        """The time; of the device's stream where somebody will ask when its work ran, else of the host."""
        return now(self.device if self.is_trial or tracing.is_tracing() else HOST)

    def end_product(self, step: int, subslice: int, owner: int) -> None:
        """The caller has computed one piece."""
        if tracing.is_tracing():
            name = f"slice {owner}, sub-slice {subslice}, step {step}"
            tracing.stamp("product", name, self._product, self.now(), self.name, self.operation)

    def release(self, buffer: Tensor) -> None:
        """The end of a buffer that this call allocated: nobody reads it after this. (The tests poison it.)"""

    def leave(self, transfers: Sequence[Transfer]) -> None:
        """Let transfers outlive the call: whoever holds them waits for them."""
        self._in_flight = [t for t in self._in_flight if not any(t is left for left in transfers)]

    def finish(self) -> None:
        """Wait for whatever is still in flight, and note what the call did."""
        self._in_flight += self.peers.unfinished
        self.peers.unfinished.clear()
        while self._in_flight:
            self.wait(self._in_flight[0])
        if self._record is not None:
            self._record.exposed_s += self.exposed_s - self._recorded_s
            self._recorded_s = self.exposed_s
            if tracing.is_tracing():
                tracing.stamp("call", self.operation, self._start_s, time.perf_counter(), self.name, self.operation)

    def describe(self, header: Header) -> None:
        """Enter the call into the group's report; once, when its first loop begins."""
        if self._record is not None or self.is_trial:
            return
        peers, choice = self.peers, self.choice
        record = peers.records.of(self.operation, self.tuned_as, self.facts, header.schedule, header.num_subslices)
        record.num_calls, record.why = record.num_calls + 1, self.why
        if choice is not None:
            record.predicted_s, record.predicted_exposed_s = choice.predicted_s, choice.predicted_exposed_s
        self._record = record
        tracing.describe(self.name, peers.world_size, header.num_subslices)

    def fail(self, cause: str, error: BaseException | None = None) -> NoReturn:
        """End the group and raise."""
        raise PeerError(self.end(cause)) from error

    def end(self, cause: str) -> str:
        """End the group: enter the fault in its store, hang up; a message with all ranks' first fault."""
        peers = self.peers
        place = f"rank {peers.rank} of {peers.world_size}, {self.operation}, call {self.number}"
        mine = f"{place}, {self.position}: {cause}"
        peers.fault = enter(peers.store, mine, self.number)
        peers.unfinished += self._in_flight
        peers.hang_up()
        seen = "" if peers.fault == mine else f"; seen here: {mine}"
        return f"{peers.fault}{seen}; this group is dead and must be made anew"

    def compare(self, expected: Header, received: Header, peer: int) -> None:
        """Fail unless a peer announced what this rank expects."""
        differences = expected.differences(received)
        if differences:
            self.fail(f"expected from rank {peer} [{expected}], which announced [{received}]: {differences} differ")
