"""Which rank failed first and why, told by every rank, and an end within a bound.

A rank that fails enters one line into the job's store by compare-and-set and reports the line that it finds there.
A rank that only lost another (a closed connection, a timeout) does not enter itself: it calls the roll, every living
rank's watching thread answers, busy or not, and those that stay silent were killed. The hazards: a store whose host
died with the fault, so that each rank can only tell its own side (torchrun's agent hosts one that outlives the
workers); and a thread inside gloo that never returns, so that a failed process ends by `os._exit` and runs nothing
after it.
"""

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist

__all__ = ["FirstFailure", "is_of_a_peer"]

POLL_S, SETTLE_S = 0.5, 1.0
_OF_A_PEER = re.compile(r"gloo/|NCCL|ncclRemoteError|TCPStore")


def is_of_a_peer(error: BaseException) -> bool:
    """Whether an error says that another rank is gone or late, and not what is wrong with this one.

    Backends raise such as RuntimeError, so their words decide; so does what an error was raised from.
    """
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, dist.DistError) or type(chain).__name__ == "PeerError":
            return True
        if type(chain) is RuntimeError and _OF_A_PEER.search(str(chain)):
            return True
        chain = chain.__cause__
    return False


class FirstFailure:
    """The job's one account of its first failure; a context, inside which a thread of it watches.

    store: the job's, of which clones are used. attempt: how often the job was restarted, equal on all ranks; each has
    an account of its own. roll_s: how long a rank may take to answer before it counts as gone. bound_s: every rank's
    process ends at most so long after a failure was entered, whatever it waits for.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        attempt: int = 0,
        *,
        roll_s: float = 3.0,
        bound_s: float = 10.0,
    ) -> None:
        self.rank, self.world_size, self.roll_s, self.bound_s = rank, world_size, roll_s, bound_s
        self._store, self._watching = (_clone(store, attempt, bound_s) for _ in range(2))
        self._phase = "setup"
        self._is_here, self._lock, self._stop = False, threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="first failure", daemon=True)

    def phase(self, name: str) -> None:
        """Say what this rank does from here on: "rollout", "reduction", ...; costs nothing."""
        self._phase = name

    def report(self, error: BaseException) -> str:
        """The line to print, the same on every rank, that tells which rank failed first, in what phase and why.

        Takes at most `roll_s` and a poll, longer only where the store does not answer.
        """
        phase, cause = self._phase, one_line(error)
        try:
            self._answer(self._store)
            self._store.set("roll", "")
            if isinstance(error, KeyboardInterrupt) and error.args:
                return self._enter(f"rank {self.rank} was stopped by {error}, in {phase}")
            if not is_of_a_peer(error):
                return self._enter(f"rank {self.rank} failed first, in {phase}: {cause}")
            return self._first_or_gone(phase, f"rank {self.rank} noticed in {phase}: {cause}")
        except RuntimeError:
            return self._own_side(phase, cause, "is gone")

    def leave(self, error: BaseException) -> NoReturn:
        """`report` on stderr and end the process, within `bound_s`.

        Code 2 for what a user can mend, 128 + n for signal n, else 1. The traceback is shown by the rank that failed
        first, and not for what a user can mend.
        """
        if threading.current_thread() is threading.main_thread():  # torchrun tells survivors to stop, as they do
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        is_mendable = isinstance(error, ValueError | OSError | ImportError)
        code = 2 if is_mendable else 1
        if isinstance(error, KeyboardInterrupt):
            code = 128 + getattr(error, "signal_number", signal.SIGINT)
        own_side = self._own_side(self._phase, one_line(error), "does not answer")
        threading.Timer(self.bound_s, _end, (own_side, code)).start()
        line = self.report(error)
        if line.startswith(f"rank {self.rank} failed") and not is_mendable:
            traceback.print_exception(error)
        _end(line, code)

    def __enter__(self) -> "FirstFailure":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _own_side(self, phase: str, cause: str, fate: str) -> str:
        """What this rank alone can tell, where the store `fate`."""
        told = f"rank {self.rank} failed, in {phase}: {cause}"
        return f"{told}; which rank failed first is not known, for the job's store {fate}"

    def _enter(self, line: str) -> str:
        """Enter a line as the first unless there is one; the line that stands."""
        return self._store.compare_set("first", "", line).decode()

    def _first_or_gone(self, phase: str, noticed: str) -> str:
        """The first failure as another rank tells it, or which ranks do not answer."""
        start = time.monotonic()
        while (passed := time.monotonic() - start) < self.roll_s:
            if self._store.check(["first"]):
                return self._store.get("first").decode()
            if passed > SETTLE_S and self._store.add("num_here", 0) == self.world_size:
                return self._enter(f"{noticed}; {self._all_alive(phase)}")
            time.sleep(POLL_S / 5)
        gone = [rank for rank in range(self.world_size) if not self._store.check([f"here/{rank}"])]
        if not gone:
            return self._enter(f"{noticed}; {self._all_alive(phase)}")
        told = ", ".join(
            f"rank {rank} is gone (killed, or cut off?), last seen in {self._last_seen(rank)}" for rank in gone[:4]
        )
        more = f", and {len(gone) - 4} more" if len(gone) > 4 else ""
        return self._enter(f"{told}{more}; {noticed}")

    def _all_alive(self, phase: str) -> str:
        """That nobody is gone, and who was waited for: a rank that is in another phase than this one."""
        seen = {rank: self._last_seen(rank) for rank in range(self.world_size) if rank != self.rank}
        late = [f"rank {rank} is in {there}" for rank, there in seen.items() if there != phase]
        if not late:
            return "every rank is alive"
        return f"every rank is alive, {', '.join(late[:4])}; where that takes long, raise parallel.timeout_s"

    def _last_seen(self, rank: int) -> str:
        key = f"phase/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else "setup"

    def _answer(self, store: dist.Store) -> None:
        """Say once that this rank lives."""
        with self._lock:
            if not self._is_here:
                self._is_here = True
                store.set(f"here/{self.rank}", "")
                store.add("num_here", 1)

    def _watch(self) -> None:
        """Tell the phase, answer the roll, and end the process where its first thread does not."""
        told = ""
        with contextlib.suppress(RuntimeError):  # the store is gone
            while not self._stop.wait(POLL_S):
                if self._phase != told:
                    told = self._phase
                    self._watching.set(f"phase/{self.rank}", told)
                if self._watching.check(["roll"]):
                    self._answer(self._watching)
                if self._is_here and self._watching.check(["first"]):
                    line = self._watching.get("first").decode()
                    if not self._stop.wait(self.bound_s):
                        _end(line, 1)


def one_line(error: BaseException) -> str:
    """An error as one line; of what a user can mend its message alone."""
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else str(error.strerror)
    name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return " ".join(f"{name}{error}".split()) or type(error).__name__


def _clone(store: Any, attempt: int, timeout_s: float) -> dist.Store:
    """The part of the store that is this attempt's, over a connection of its own."""
    clone = dist.PrefixStore(f"stretto/failure/{attempt}", store.clone())
    clone.set_timeout(timedelta(seconds=timeout_s))
    return clone


def _end(line: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"stretto: error: {line}\n")  # at once: under `python -u` print would write twice
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
