"""What an operation that was started gives: its result, when that was waited for.

The hazard is a result that nobody waits for: its buffers stay with the group until the next call on it. Source: the
works of torch.distributed.
"""

from collections.abc import Callable, Sequence
from typing import Any

from stretto.overlap.p2p import Call
from stretto.overlap.transfers import Transfer

__all__ = ["Left", "Pending"]


class Pending:
    """A tensor, or a list of them, that is still arriving."""

    out: Any = None
    """What is arriving; not to be read before `wait`."""

    def __init__(self, complete: Callable[[], Any], transfers: Sequence[Transfer] = ()) -> None:
        self._complete: Callable[[], Any] | None = complete
        self.transfers = transfers
        """What of an all-reduce is under way."""

    def wait(self) -> Any:
        """The tensor or tensors, complete. `PeerError` if a peer was lost on the way. May be called again."""
        if self._complete is not None:
            self.out = self._complete()
            self._complete = None
        return self.out


class Left:
    """Transfers that outlive their call; dropped before they were waited for, they are the group's next call's."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.transfers: list[Transfer] = []
        self.then: Callable[[], None] | None = None
        """What is left to do with what arrived."""

    def wait(self) -> None:
        """Until none is in flight."""
        if self.transfers:
            with self._call.peers.resume(self._call):
                while self.transfers:
                    self._call.wait(self.transfers[0])
                    self.transfers.pop(0)
        if self.then is not None:
            self.then()
            self.then = None

    def __del__(self) -> None:
        self._call.peers.unfinished += self.transfers
