"""Rewards behind the rollout: submitted when a batch is decoded, asked for when they are needed.

One worker thread scores in the order of submission, so a reward that draws from the global generators draws what it
would have drawn at once, and the results are bitwise those of `behind=False`, the slow thing beside this fast one.
That holds as long as nobody else draws from or seeds those generators while something is pending: take the results
before the iteration ends. The hazard is memory: media wait until they are scored, so rewards slower than the rollout
pile them up, until `result` is called. And a thread that is inside torch when the interpreter ends aborts the process
(SIGABRT, "terminate called without an active exception"): so `close` waits, and is called at exit where it was
forgotten.

A reward in this process shares the rollout's interpreter and, on the CPU, its cores: one that waits (for a service,
for a GPU) is hidden whole, one that computes takes its time from somewhere.
"""

import atexit
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from stretto.rewards.remote import RemoteReward
from stretto.rewards.retries import Retries, Scoring
from stretto.rewards.scoring import score

__all__ = ["Pending", "Scorer"]

CLOSING_S = 10.0
"""How long `close` waits for a reward that is being computed."""


class Pending:
    """Rewards that are asked for: what `Scorer.submit` returns."""

    def __init__(self, scorer: "Scorer", work: Callable[[], Tensor]) -> None:
        self._scorer, self._work = scorer, work
        self._is_done = threading.Event()
        self._rewards: Tensor | None = None
        self._error: BaseException | None = None

    def result(self) -> Tensor:
        """The rewards, (B, K) float64 on the CPU, waited for; the same each time.

        Raises what `stretto.rewards.scoring.score` raises: RewardError, or SkippedGroup where no attempt succeeded
        under `on_failure = "skip"`. RuntimeError where the scorer was closed first.
        """
        started = time.perf_counter()
        try:
            self._is_done.wait()
        finally:
            self._scorer._add(waited_s=time.perf_counter() - started)
        self._scorer._told(self)
        if self._error is not None:
            raise self._error
        assert self._rewards is not None
        return self._rewards

    def _run(self) -> None:
        """Score; whatever is raised is kept for `result`."""
        work, self._work = self._work, _nothing
        try:
            self._rewards = work()
        except BaseException as error:
            self._error = error
        self._is_done.set()

    def _drop(self) -> None:
        self._work = _nothing
        self._error = RuntimeError("the scorer was closed before these samples were scored")
        self._is_done.set()


class Scorer:
    """The rewards of a run; a context that ends its thread.

    Args:
        rewards: functions by name, as for `score`; a RemoteReward is bound by `scoring.timeout_s`.
        behind: score on a thread of its own. False: at once, within `submit`.
        scoring: how services are asked.
    """

    def __init__(
        self, rewards: Mapping[str, Callable[..., Any]], *, behind: bool, scoring: Scoring | None = None
    ) -> None:
        scoring = scoring or Scoring()
        self.behind, self.scoring = behind, scoring
        self.rewards = {
            name: function.within(scoring.timeout_s) if isinstance(function, RemoteReward) else function
            for name, function in rewards.items()
        }
        self._is_closed = threading.Event()
        self._retries = Retries(scoring, self._is_closed)
        self._lock = threading.Lock()
        self._seconds = {"busy_s": 0.0, "waited_s": 0.0}
        self._untold: list[Pending] = []
        self._queue: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None

    def submit(
        self,
        media: Tensor,
        prompts: list[str],
        sample_names: list[str],
        metadata: Mapping[str, Any] | None = None,
    ) -> Pending:
        """Ask for the rewards of one batch; arguments as of `stretto.rewards.scoring.score`.

        Media must not be written to before the result is there. On CUDA the thread scores on a stream of its own,
        after what the present stream holds, on the present device. Failures are raised by `Pending.result`, whether
        behind or not; only an exception that is not one of Python's errors (Ctrl-C) is raised here.
        """
        if self._is_closed.is_set():
            raise RuntimeError("the scorer is closed")
        ready = _Ready(media) if self.behind else None
        pending = Pending(self, lambda: self._score(ready, media, prompts, sample_names, metadata))
        with self._lock:
            self._untold.append(pending)
        if not self.behind:
            started = time.perf_counter()
            pending._run()
            self._add(waited_s=time.perf_counter() - started)
            if pending._error is not None and not isinstance(pending._error, Exception):
                self._told(pending)
                raise pending._error
            return pending
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="stretto rewards", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        self._queue.put(pending)
        return pending

    def take(self) -> dict[str, float]:
        """What happened since the last call, and start again at zero.

        busy_s: seconds in rewards, retries included. waited_s: seconds that the caller was kept waiting for them;
        busy_s - waited_s were hidden. Beside them what `Retries.take` counts.
        """
        with self._lock:
            seconds, self._seconds = self._seconds, {"busy_s": 0.0, "waited_s": 0.0}
        return {**seconds, **self._retries.take()}

    def close(self) -> None:
        """End the thread: what has not begun is dropped, a wait between attempts ends, and a reward that is being
        computed is waited for, ten seconds at most. Never raises what a reward raised."""
        self._is_closed.set()
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join(CLOSING_S)
        atexit.unregister(self.close)
        if self._thread.is_alive():
            warnings.warn(f"a reward was still computing {CLOSING_S:g} s after the run; it was left", stacklevel=2)

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; where all went well but for a failure that nobody asked for, raise that."""
        self.close()
        if kind is None:
            for pending in self._untold:
                if pending._error is not None and not isinstance(pending._error, RuntimeError):
                    raise pending._error

    def _work(self) -> None:
        while (pending := self._queue.get()) is not None:
            pending._drop() if self._is_closed.is_set() else pending._run()
            del pending  # or the last batch's media would be kept until the next comes

    def _score(
        self,
        ready: "_Ready | None",
        media: Tensor,
        prompts: list[str],
        sample_names: list[str],
        metadata: Mapping[str, Any] | None,
    ) -> Tensor:
        started = time.perf_counter()
        try:
            with self._placed(ready, media):
                return score(self.rewards, media, prompts, sample_names, metadata, how=self._retries.ask)
        finally:
            self._add(busy_s=time.perf_counter() - started)

    @contextmanager
    def _placed(self, ready: "_Ready | None", media: Tensor) -> Iterator[None]:
        """On the thread: the device of the one who submitted and, for media of CUDA, a stream after its own."""
        if ready is None or ready.device is None:
            yield
            return
        with torch.cuda.device(ready.device):
            if ready.event is None:
                yield
                return
            if self._stream is None or self._stream.device != media.device:
                self._stream = torch.cuda.Stream(media.device)
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready.event)
                media.record_stream(self._stream)
                yield

    def _add(self, **seconds: float) -> None:
        with self._lock:
            for key, value in seconds.items():
                self._seconds[key] += value

    def _told(self, pending: Pending) -> None:
        with self._lock:
            if pending in self._untold:
                self._untold.remove(pending)


class _Ready:
    """Where media were made, and when they are there: the device and stream of the thread that submits."""

    def __init__(self, media: Tensor) -> None:
        self.device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self.event: torch.cuda.Event | None = None
        if media.is_cuda:
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(media.device))


def _nothing() -> Tensor:
    raise AssertionError("scored twice")
