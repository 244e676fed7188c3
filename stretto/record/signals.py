"""Ctrl-C and SIGTERM as a wish that the loop fulfils at the end of an iteration.

The first signal only sets a flag, and is said; the loop polls `caught`, agrees with the other ranks, leaves a
checkpoint and calls `reraise`. A second one stops at once. Under a launcher a signal comes more than once: Ctrl-C
goes to torchrun and to its ranks, and torchrun sends on what it gets; so what comes within `echo_s` of the first is
the same wish. torchrun also sends SIGTERM to those that outlive a dead rank: the flag is then set, but the ranks
cannot agree, so nobody saves, and the error ends them. The hazards: a handler that stays behind (the former ones are
put back on the way out), and a launcher that does not wait for the iteration's end (torchrun kills 30 s after its
SIGTERM, or `--shutdown-timeout`). Outside the main thread Python allows no handlers, and signals act as they would
have.
"""

import contextlib
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupted", "Signals"]


class Interrupted(KeyboardInterrupt):
    """The run was stopped by a signal: after it had left its checkpoint, or `at_once`, by this process alone."""

    def __init__(self, signal_number: int, at_once: bool = False) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number, self.at_once = signal_number, at_once

    def __reduce__(self) -> tuple[type["Interrupted"], tuple[int, bool]]:
        return type(self), (self.signal_number, self.at_once)


class Signals:
    """While entered: the first SIGINT or SIGTERM sets `caught`, the second raises `Interrupted` where it strikes.

    echo_s: signals that come so soon after the first are that one again; 0 for a process without a launcher.
    """

    def __init__(self, *, echo_s: float = 0.0) -> None:
        self.caught: int | None = None
        self.echo_s = echo_s
        self._caught_at_s = 0.0
        self._former: dict[int, Any] = {}

    def reraise(self, caught: int | None = None) -> None:
        """Raise `Interrupted` if a signal was caught, here or, as `caught` tells, on another rank."""
        number = self.caught or caught
        if number:
            raise Interrupted(number)

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.caught is not None:
            if time.monotonic() - self._caught_at_s >= self.echo_s:
                raise Interrupted(number, at_once=True)
            return
        self.caught, self._caught_at_s = number, time.monotonic()
        name = signal.Signals(number).name
        # os.write, for a handler may strike in the middle of a print.
        with contextlib.suppress(OSError):
            os.write(2, f"\n{name}: a checkpoint at the end of this iteration; again to stop at once\n".encode())
