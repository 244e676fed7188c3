"""Gloo ranks for tests, each a process: `Ranks.run(4, function, case)` calls `function(case)` on 4 ranks.

The processes are started once for the whole suite and are shared by every world size: going from one size to another
costs one rendezvous, on loopback, through a store that the parent holds on a free port. They are forked from a server
that has imported what cases need and has run nothing (a fork of a process that has used gloo would deadlock): one
import for all of them, and for those that replace them. `function` must live in a module that a child can import;
cases and results are plain picklable data. Every call has a deadline: when it passes, each rank tells where it stands
(a second thread in the child answers while the first is stuck). After any error the world is made anew, and a child
that died or hung is replaced. The hazard: a module that only some cases need is imported once in every child.
"""

import contextlib
import multiprocessing
import os
import pickle
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

LARGEST_WORLD = 8
IMPORTED_ONCE = [
    "torch.distributed.tensor",
    "stretto.train",
    "stretto.models.digits",
    "stretto.rewards.digits",
    "tests.tiny",
]


@dataclass(frozen=True)
class Outcome:
    """What one rank made of a case: a value, or the text of its error and when it failed."""

    rank: int
    value: Any = None
    error: str = ""
    traceback: str = ""
    failed_at_s: float = 0.0


class RanksError(AssertionError):
    """Some rank failed or never answered; the text opens with the first failure."""


class Ranks:
    """Up to eight child processes that make one gloo world at a time."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._children: list[_Child | None] = [None] * LARGEST_WORLD
        self._world: tuple[int, float] | None = None
        self._num_worlds = 0

    def run(
        self,
        num_ranks: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
        group_timeout_s: float = 30.0,
    ) -> list[Any]:
        """The values of `function(*args)` by rank; any error on any rank raises `RanksError`."""
        outcomes = self.outcomes(num_ranks, function, *args, timeout_s=timeout_s, group_timeout_s=group_timeout_s)
        failed = sorted((o for o in outcomes if o.error), key=lambda o: o.failed_at_s)
        if failed:
            rest = "\n".join(f"rank {o.rank}: {o.error}" for o in failed[1:])
            raise RanksError(
                f"{num_ranks} ranks, {args}\nrank {failed[0].rank} failed first:\n{failed[0].traceback}\n{rest}"
            )
        return [o.value for o in outcomes]

    def outcomes(
        self,
        num_ranks: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
        group_timeout_s: float = 30.0,
    ) -> list[Outcome]:
        """What each rank made of it, errors and deaths included; only a hang past `timeout_s` raises."""
        self._make_world(num_ranks, group_timeout_s)
        children = [child for child in self._children[:num_ranks] if child is not None]
        for child in children:
            child.send(("case", sys.path, pickle.dumps((function, args))))
        outcomes = self._collect(children, timeout_s)
        if any(o.error for o in outcomes):
            self._world = None
        return outcomes

    def close(self) -> None:
        """End every child; the next `run` spawns new ones."""
        for child in self._children:
            if child is not None:
                child.end()
        self._children = [None] * LARGEST_WORLD
        self._world = None

    def _make_world(self, num_ranks: int, group_timeout_s: float) -> None:
        if self._world == (num_ranks, group_timeout_s):
            return
        self._num_worlds += 1
        for rank in range(num_ranks):
            if self._children[rank] is None:
                self._children[rank] = _Child(rank, self._store.port)
        children = [child for child in self._children[:num_ranks] if child is not None]
        for child in children:
            child.send(("world", self._num_worlds, num_ranks, group_timeout_s))
        failed = [o for o in self._collect(children, 120.0) if o.error]
        if failed:
            raise RanksError(f"no world of {num_ranks}: {failed[0].traceback}")
        self._world = (num_ranks, group_timeout_s)

    def _collect(self, children: list["_Child"], timeout_s: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout_s
        while len(outcomes) < len(children):
            pending = [child for child in children if child.rank not in outcomes]
            ready = wait([child.pipe for child in pending], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._give_up(children, outcomes, timeout_s)
            for child in pending:
                if child.pipe in ready:
                    outcomes[child.rank] = child.answer()
                    if outcomes[child.rank].error == "died":
                        self._children[child.rank] = None
        return [outcomes[child.rank] for child in children]

    def _give_up(self, children: list["_Child"], outcomes: dict[int, Outcome], timeout_s: float) -> None:
        lines = []
        for child in children:
            if child.rank in outcomes:
                outcome = outcomes[child.rank]
                lines.append(f"rank {child.rank}: {outcome.traceback or 'done'}")
            else:
                lines.append(f"rank {child.rank} stands at:\n{child.where()}")
                child.end()
                self._children[child.rank] = None
        self._world = None
        raise RanksError(f"no answer within {timeout_s} s\n" + "\n".join(lines))


class _Child:
    """The parent's end of one rank's process."""

    def __init__(self, rank: int, port: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED_ONCE)
        self.rank = rank
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(rank, theirs, port), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, message: tuple[Any, ...]) -> None:
        """Ship one message; a child that is already dead answers for itself in `answer`."""
        with contextlib.suppress(OSError):
            self.pipe.send(message)

    def answer(self) -> Outcome:
        """The outcome that has arrived, or the news that the process died."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(5)
            return Outcome(self.rank, None, "died", f"exit code {self.process.exitcode}", time.time())

    def where(self) -> str:
        """The stack of the child's first thread."""
        self.send(("where",))
        while self.pipe.poll(5):
            try:
                answer = self.pipe.recv()
            except (EOFError, OSError):
                return "dead"
            if isinstance(answer, str):
                return answer
        return "no answer"

    def end(self) -> None:
        """Kill the process that was started here."""
        self.process.kill()
        self.process.join(5)
        self.pipe.close()


def _serve(rank: int, pipe: Connection, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=60))
    messages: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, messages), daemon=True).start()
    while True:
        kind, *message = messages.get()
        try:
            value = _enter_world(rank, store, *message) if kind == "world" else _run_case(*message)
            outcome = Outcome(rank, value)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            outcome = Outcome(rank, None, text, traceback.format_exc(), time.time())
        pipe.send(outcome)


def _listen(pipe: Connection, messages: "queue.SimpleQueue[tuple[Any, ...]]") -> None:
    main = threading.main_thread().ident
    assert main is not None
    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        if message[0] == "where":
            pipe.send("".join(traceback.format_stack(sys._current_frames()[main])[-8:]))
        else:
            messages.put(message)


def _enter_world(rank: int, store: dist.Store, number: int, num_ranks: int, timeout_s: float) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"world {number}", store),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )


def _forget_shardings() -> None:
    """DTensor keeps what it found out by mesh, and to it a mesh of a former case, its groups gone, equals a new."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def _run_case(path: list[str], pickled: bytes) -> Any:
    sys.path.extend(entry for entry in path if entry not in sys.path)
    _forget_shardings()
    function, args = pickle.loads(pickled)
    return function(*args)
