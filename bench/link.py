"""Ranks whose messages take the time they would take on a link of a set rate: emulated on one machine.

    with Link(4) as link:
        link.set_rate(1e9, message_bytes=4 << 20)
        seconds = link.run("bench.link:bare_transfer", 4 << 20)

One process a rank, each in its own network namespace and on one thread, in one gloo world whose store lives
beside the bridge. The rate holds for what a rank sends and may be changed between runs; a burst is at most 2 %
of a message. The hazard is the processors: ranks share them, and moving bytes costs some too. The threads that
move bytes take none from a thread that computes (`unhurried`). After an error the link is closed.
"""

import faulthandler
import functools
import importlib
import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from bench.namespaces import HUB_ADDRESS, INTERFACE, LinkError, Network, unavailable

__all__ = ["Link", "LinkError", "bare_transfer", "start_together", "unavailable"]

BURST_SHARE = 0.02
PATIENCE_S = 5.0


class Link:
    """`num_ranks` processes that run functions `module:function(*args)`; use it in a `with`."""

    def __init__(
        self, num_ranks: int, bits_per_s: float = 2e8, message_bytes: int = 2 << 20, *, tolerance: float = 0.05
    ) -> None:
        """Make the network and the ranks, and check that a message takes the time that it should.

        `tolerance`, relative, is for machines that others use too; what is measured on one is no result.
        """
        self._tolerance = tolerance
        self._network = Network(num_ranks)
        self._ranks: list[_Rank] = []
        self._store: dist.Store | None = None
        try:
            self._start()
            self.set_rate(bits_per_s, message_bytes)
            self.check_rate()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def num_ranks(self) -> int:
        """Ranks, and so processes."""
        return len(self._ranks)

    def set_rate(self, bits_per_s: float, message_bytes: int) -> None:
        """From now on every rank sends at `bits_per_s`; `message_bytes` is the smallest message that matters.

        The burst is 2 % of it, or one frame of 9 kB where that is more.
        """
        self.bits_per_s = bits_per_s
        self.burst_bytes = self._network.shape(bits_per_s, int(BURST_SHARE * message_bytes))

    def run(self, task: str, *args: Any, timeout_s: float = 600.0) -> list[Any]:
        """What `module:function(*args)` gives on every rank; any error on any rank raises `LinkError`."""
        if not self._ranks:
            raise LinkError("this link is closed")
        for rank in self._ranks:
            rank.send((sys.path, task, args))
        try:
            return self._collect(task, timeout_s)
        except BaseException:
            self.close()
            raise

    def check_rate(self) -> float:
        """Seconds over what they should be, of a message to the next rank; `LinkError` unless within 5 %.

        The first of eight tries within bounds counts.
        """
        num_bytes = max(int(self.bits_per_s / 8 * 0.1), int(self.burst_bytes / BURST_SHARE))
        should = num_bytes * 8 / self.bits_per_s
        ratios = []
        for _ in range(8):
            ratios.append(max(self.run("bench.link:bare_transfer", num_bytes)) / should)
            if abs(ratios[-1] - 1) <= self._tolerance:
                return ratios[-1]
        raise LinkError(
            f"the link was set to {self.bits_per_s / 1e6:.1f} Mbit/s, but {num_bytes} bytes took "
            f"{', '.join(f'{ratio:.2f}' for ratio in ratios)} times as long as they should; quiet the machine"
        )

    def close(self) -> None:
        """End the processes and remove their network. Another thread's `run` then raises `LinkError`."""
        ranks, self._ranks, self._store = self._ranks, [], None
        for rank in ranks:
            rank.end()
        self._network.close()

    def _start(self) -> None:
        network = self._network
        with network.inside(network.hub):
            self._store = dist.TCPStore(HUB_ADDRESS, 0, None, True, wait_for_workers=False)
        multiprocessing.resource_tracker.ensure_running()
        for index, name in enumerate(network.ranks):
            with network.inside(name):
                self._ranks.append(_Rank(index, len(network.ranks), self._store.port))
        self._collect("making the world", 120.0)

    def _collect(self, task: str, timeout_s: float) -> list[Any]:
        values: dict[int, Any] = {}
        ranks, cause, deadline = self._ranks, "", time.monotonic() + timeout_s
        while len(values) < len(ranks):
            pending = {rank.pipe: rank for rank in ranks if rank.index not in values}
            left = PATIENCE_S if cause else deadline - time.monotonic()
            ready = wait(list(pending), max(0.0, left))
            if not ready:
                break
            for pipe in ready:
                rank = pending[pipe]  # type: ignore[index]
                values[rank.index], error, died = rank.answer()
                if error and (died or not cause):
                    cause = f"rank {rank.index} of {len(ranks)} failed in {task}: {error}"
        if cause:
            raise LinkError(cause)
        if len(values) < len(ranks):
            raise self._late([rank for rank in ranks if rank.index not in values], task, timeout_s)
        return [values[rank.index] for rank in ranks]

    def _late(self, late: Sequence["_Rank"], task: str, timeout_s: float) -> LinkError:
        for rank in late:
            print(f"rank {rank.index} stands at:", file=sys.stderr, flush=True)
            rank.tell()
        names = ", ".join(str(rank.index) for rank in late)
        return LinkError(f"no answer from rank {names} within {timeout_s:g} s in {task}")


class _Rank:
    """The parent's end of a rank's process, which starts in the namespace of the thread that makes it."""

    def __init__(self, index: int, num_ranks: int, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.index = index
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(index, num_ranks, port, theirs), daemon=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: only the parent hears it
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def send(self, message: Any) -> None:
        """Ship a task; a process that is dead says so in `answer`."""
        try:
            self.pipe.send(message)
        except OSError:
            return

    def answer(self) -> tuple[Any, str, bool]:
        """The value, or the error and whether the process died of it: then it is the others' cause."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(5)
            return None, f"its process died, exit code {self.process.exitcode}", True

    def tell(self) -> None:
        """Have its stacks written to the standard error."""
        if self.process.is_alive():
            os.kill(self.process.pid or 0, signal.SIGUSR1)
            time.sleep(0.2)

    def end(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.pipe.close()


def _serve(rank: int, num_ranks: int, port: int, pipe: Connection) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    torch.set_num_threads(1)
    dist.new_group, dist.init_process_group = unhurried(dist.new_group), unhurried(dist.init_process_group)
    task, args = "", ()
    while True:
        try:
            value = _function(task)(*args) if task else _enter_world(rank, num_ranks, port)
            pipe.send((value, "", False))
        except Exception:
            pipe.send((None, traceback.format_exc(), False))
        try:
            path, task, args = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        sys.path.extend(entry for entry in path if entry not in sys.path)


def _enter_world(rank: int, num_ranks: int, port: int) -> None:
    store = dist.TCPStore(HUB_ADDRESS, port, None, False, timeout=timedelta(seconds=60))
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)


def unhurried(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make` a group whose own threads, when they wake, take no processor from another (Linux's SCHED_BATCH).

    gloo's thread that finds a connection in use by a thread that posts asks again without a pause. Had it woken on
    that very thread's processor, both would stand still until the scheduler's next tick, 4 ms at 250 Hz.
    """

    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> Any:
        before, quiet = os.sched_getscheduler(0), os.sched_param(0)
        os.sched_setscheduler(0, os.SCHED_BATCH, quiet)  # of this thread; those it starts meanwhile inherit it
        try:
            return make(*args, **options)
        finally:
            os.sched_setscheduler(0, before, quiet)

    return made


def _function(task: str) -> Any:
    module, _, name = task.partition(":")
    return getattr(importlib.import_module(module), name)


def start_together() -> float:
    """Leave at one instant on all ranks of the world, by the machine's one clock: `time.monotonic()` of it."""
    dist.barrier()
    start = torch.tensor([time.monotonic() + 2e-3], dtype=torch.float64)
    dist.broadcast(start, 0)
    time.sleep(max(0.0, float(start) - time.monotonic()))
    return float(start)


def bare_transfer(num_bytes: int) -> float:
    """In a rank: seconds to send `num_bytes` to the next rank and receive as many from the one before."""
    rank, n = dist.get_rank(), dist.get_world_size()
    out, into = torch.zeros(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
    start = start_together()
    receive, send = dist.irecv(into, (rank - 1) % n), dist.isend(out, (rank + 1) % n)
    assert receive is not None
    assert send is not None
    receive.wait()
    send.wait()
    return time.monotonic() - start
