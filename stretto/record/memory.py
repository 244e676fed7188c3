"""Peak memory of a stretch of code: the device's on CUDA, the process's resident set on Linux.

The hazard is an allocator that keeps what was freed: a peak measured after a larger one can read 0. Run what is
compared in an order that grows, or in processes of their own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

__all__ = ["PeakBytes", "peak_bytes"]


class PeakBytes:
    """Bytes above what was in use at the start; None where it cannot be measured."""

    value: int | None = None


@contextmanager
def peak_bytes(device: torch.device) -> Iterator[PeakBytes]:
    """Measure the code inside; the result is filled in at the end."""
    peak = PeakBytes()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.value = torch.cuda.max_memory_allocated(device) - before
        return
    before_resident = _reset_resident_peak()
    yield peak
    if before_resident is not None:
        peak.value = max(0, _status("VmHWM") - before_resident)


def _reset_resident_peak() -> int | None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return None


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")
