"""Asking again: what may be asked again, how often, how long it may take, and what is known at the end.

Only a ServiceError is asked again. A function that raises, and a service that refuses, would do so again: those stop
at once, as without this file. Before attempt k + 1 it waits between half and all of backoff_s * 2^(k - 1), at most a
minute; the draw is its own and moves no generator. The hazard is patience without end: `Scoring.bound_s` is the most
that one reward of one batch can take, and every attempt is counted.
"""

import random
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from stretto.rewards.failures import RewardError, ServiceError, SkippedGroup, span
from stretto.rewards.scoring import ask

__all__ = ["LONGEST_WAIT_S", "Retries", "Scoring"]

LONGEST_WAIT_S = 60.0


@dataclass(frozen=True)
class Scoring:
    """How a reward's service is asked. Raises ValueError for values that cannot be."""

    attempts: int = 5
    """How often one batch is asked for, the first time included."""
    backoff_s: float = 1.0
    """Wait after the first failed attempt; doubled after each further one, a minute at most."""
    timeout_s: float = 60.0
    """Bound of one attempt in all; of a remote reward. A function in this process cannot be cut short."""
    on_failure: Literal["stop", "skip"] = "stop"
    """After the last attempt: end the run, or go on without these samples."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"scoring.attempts = {self.attempts}: take at least 1")
        if not 0 <= self.backoff_s < float("inf"):
            raise ValueError(f"scoring.backoff_s = {self.backoff_s}: take 0 or more seconds")
        if not 0 < self.timeout_s < float("inf"):
            raise ValueError(f"scoring.timeout_s = {self.timeout_s}: take more than 0 seconds")
        if self.on_failure not in ("stop", "skip"):
            raise ValueError(f'scoring.on_failure = {self.on_failure!r}: take "stop" or "skip"')

    def longest_wait_s(self, failed: int) -> float:
        """The most that is waited after the `failed`-th failed attempt (from 1)."""
        return min(self.backoff_s * 2.0 ** min(failed - 1, 60), LONGEST_WAIT_S)

    @property
    def bound_s(self) -> float:
        """Seconds after which one remote reward of one batch is known or given up."""
        waits = sum(self.longest_wait_s(failed) for failed in range(1, self.attempts))
        return self.attempts * self.timeout_s + waits


class Retries:
    """Asks by the rules of `scoring`, and counts; `ask` is for `stretto.rewards.scoring.score(how=...)`.

    Safe to use from several threads. `stopping`, once set, ends a wait at once (as a RewardError).
    """

    def __init__(self, scoring: Scoring, stopping: threading.Event | None = None) -> None:
        self.scoring = scoring
        self._stopping = stopping or threading.Event()
        self._lock = threading.Lock()
        self._start_again()

    def ask(
        self,
        name: str,
        function: Callable[..., Any],
        media: Tensor,
        prompts: list[str],
        sample_names: list[str],
        metadata: Mapping[str, Any],
    ) -> list[float]:
        """B finite floats; arguments as of `stretto.rewards.scoring.score`.

        Raises:
            SkippedGroup: no attempt succeeded, under `on_failure = "skip"`.
            RewardError: no attempt succeeded (chained to the last cause), or what is not asked again.
        """
        attempts, started = self.scoring.attempts, time.perf_counter()
        for attempt in range(1, attempts + 1):
            try:
                rewards = ask(name, function, media, prompts, sample_names, metadata)
            except ServiceError as error:
                last = error
            else:
                return rewards
            self._count(failures=1)
            if attempt < attempts and self._wait(name, attempt, last):
                self._count(retries=1, lost_s=time.perf_counter() - started)
                started = time.perf_counter()
                continue
            break
        kind = SkippedGroup if self.scoring.on_failure == "skip" else RewardError
        is_skipped = kind is SkippedGroup
        self._count(skipped=int(is_skipped), lost_s=time.perf_counter() - started)
        told = f"{attempt} of {attempts} attempts failed; at the last the service {last}"
        raise kind(name, span(sample_names), None, told) from last

    def take(self) -> dict[str, float]:
        """What happened since the last call, and start again at zero.

        failures: attempts that failed. retries: attempts made again. skipped: batches given up under "skip".
        lost_s: seconds in failed attempts and in waits after them.
        """
        with self._lock:
            counts = {**self._counts, "lost_s": self._lost_s}
            self._start_again()
        return counts

    def _wait(self, name: str, failed: int, error: ServiceError) -> bool:
        """Wait after a failed attempt; False where there is no use in asking again."""
        seconds = self.scoring.longest_wait_s(failed) * random.Random().uniform(0.5, 1.0)
        warnings.warn(
            f"reward {name!r}: attempt {failed} of {self.scoring.attempts}: the service {error}; "
            f"again in {seconds:.1f} s",
            stacklevel=2,
        )
        return not self._stopping.wait(seconds)

    def _count(self, *, lost_s: float = 0.0, **counts: int) -> None:
        with self._lock:
            self._lost_s += lost_s
            for key, count in counts.items():
                self._counts[key] += count

    def _start_again(self) -> None:
        self._counts = {"failures": 0, "retries": 0, "skipped": 0}
        self._lost_s = 0.0
