"""The steps of one loop within a call: who sends what to whom, each step announced a step ahead.

A header says what a payload will be and is compared before the payload's receive is posted. It travels beside the
payload of the step before, so that it costs no waiting. The hazard: the first step's header has nothing to travel
beside. Source: what gloo does with a message longer than its receive (it ends the process).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from stretto.overlap.faults import Header
from stretto.overlap.p2p import Call
from stretto.overlap.routes import Kind, Route, Schedule, route
from stretto.overlap.transfers import Shape, Transfer

__all__ = ["Lane"]


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
        call.describe(header)
        self.call = call
        self.routes = [route(kind, schedule, peers.rank, peers.world_size, i) for i in range(peers.world_size)]
        self.last = peers.world_size - 1
        self._header, self._shapes = replace(header, lane=kind), shapes
        call.device = device
        if not check:
            peers.records.note("check=False: no headers; ranks that disagree hang, abort or compute wrong numbers")
        self._device, self._home, self._check = device, peers.words(device), check
        self._buffer = Header.blank(self._home)
        self._incoming = self._announce(0)
        if peers.world_size > 1:
            peers.wire(device)  # opened, where it must be, after all have met for the first word

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
        words = replace(self._header, step=step, shape=self._shapes(here)[0]).pack(self._home)
        self._buffer = Header.blank(self._home)
        return self.call.tell([(words, here.send_to)], [(self._buffer, here.recv_from)], self._device)
