"""Ctrl-C and SIGTERM as a wish that the loop fulfils at the end of an iteration.

The first signal is noted and said; the loop polls `caught`, leaves a checkpoint and calls `reraise`. A second
one stops at once. The hazard is a handler that stays behind: the former ones are put back on the way out.
Outside the main thread Python allows no handlers, and signals act as they would have.
"""

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupted", "Signals"]


class Interrupted(KeyboardInterrupt):
    """The run was stopped by a signal, after it had left its checkpoint."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


class Signals:
    """While entered: the first SIGINT or SIGTERM sets `caught`, the second raises `Interrupted` where it
    strikes."""

    def __init__(self) -> None:
        self.caught: int | None = None
        self._former: dict[int, Any] = {}

    def reraise(self) -> None:
        """Raise `Interrupted` if a signal was caught."""
        if self.caught is not None:
            raise Interrupted(self.caught)

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
            raise Interrupted(number)
        self.caught = number
        name = signal.Signals(number).name
        # os.write, for a handler may strike in the middle of a print.
        with contextlib.suppress(OSError):
            os.write(2, f"\n{name}: a checkpoint at the end of this iteration; again to stop at once\n".encode())
