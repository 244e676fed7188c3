"""Matrix products that sleep: each takes the time of its multiplications, and no processor.

So that schedules are measured and not the cores that the ranks of one machine share. `asleep` puts functions
that wait in the place of this process's CPU kernels of mm and addmm, for all threads, autograd's included;
`sleeping_attention` is for operations that take an attention. The hazard: results are zeros or whatever was
there. A sleep that ends late shortens the next one,
by half a millisecond at most, so that their sum is exact.
"""

import ctypes
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["asleep", "pace", "sleeping_attention", "wake_in_time"]

_LATEST_S = 5e-4
_TIMER_SLACK = 29  # of prctl: wake within a microsecond, not 50


class _Pace:
    """How long a multiplication takes, how many there were, and what the last sleep owes to the next."""

    asleep = False
    seconds_per_flop = 0.0
    flops = 0
    late_s = 0.0

    def spend(self, flops: int, start_s: float) -> None:
        """Sleep until so many floating-point operations that began at `start_s` are over."""
        self.flops += flops
        if not self.seconds_per_flop:
            return
        self.sleep_until(start_s + flops * self.seconds_per_flop)

    @contextmanager
    def unspent(self) -> Iterator[None]:
        """Within, multiplications are counted and take no time."""
        before, self.seconds_per_flop = self.seconds_per_flop, 0.0
        try:
            yield
        finally:
            self.seconds_per_flop = before

    def sleep_until(self, end_s: float) -> None:
        """Sleep until `time.perf_counter()` says so, less what the last sleep was late."""
        end_s -= self.late_s
        time.sleep(max(0.0, end_s - time.perf_counter()))
        self.late_s = min(time.perf_counter() - end_s, _LATEST_S)


pace = _Pace()


def wake_in_time() -> None:
    """From now on this thread's sleeps end within a microsecond, not 50."""
    ctypes.CDLL(None).prctl(_TIMER_SLACK, 1, 0, 0, 0)


@contextmanager
def asleep() -> Iterator[None]:
    """Within, `torch.mm`, `torch.addmm` and whatever calls them on the CPU sleep at the pace of `pace`."""
    wake_in_time()
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # overriding is the purpose
        for name, kernel in (("mm", _mm), ("mm.out", _mm), ("addmm", _addmm), ("addmm_", _into), ("addmm.out", _out)):
            library.impl(name, kernel, "CPU")
    pace.asleep = True
    try:
        yield
    finally:
        library._destroy()
        pace.asleep, pace.seconds_per_flop, pace.late_s = False, 0.0, 0.0


def sleeping_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> Tensor:
    """The two products of an attention of query (batch, heads, n, d) to key (batch, heads, rows, d)."""
    start_s, result = time.perf_counter(), torch.zeros_like(query)
    pace.spend(4 * query.numel() * key.shape[2], start_s)
    return result


def _mm(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
    start_s = time.perf_counter()
    result = left.new_zeros(left.shape[0], right.shape[1]) if out is None else out
    pace.spend(2 * left.numel() * right.shape[1], start_s)
    return result


def _addmm(into: Tensor, left: Tensor, right: Tensor, **scales: Any) -> Tensor:
    return _mm(left, right)


def _into(into: Tensor, left: Tensor, right: Tensor, **scales: Any) -> Tensor:
    return _mm(left, right, out=into)


def _out(into: Tensor, left: Tensor, right: Tensor, *, out: Tensor, **scales: Any) -> Tensor:
    return _mm(left, right, out=out)
