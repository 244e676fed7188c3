"""Moments of the host, or of what a device has reached; both end up in seconds of the host's monotonic clock.

A host that queues work for a device knows when it asked, not when it ran. So a moment of a device is an event in its
current stream, and becomes seconds when somebody waits for it at the end. The hazard: an event costs little, reading
it stops the host until the device is there. Source: torch.cuda.Event.
"""

import time
from collections.abc import Sequence
from typing import TypeAlias

import torch

__all__ = ["Moment", "now", "seconds"]

Moment: TypeAlias = float | torch.cuda.Event


def now(device: torch.device) -> Moment:
    """When the device's current stream has done what it was given so far; on the host, the time."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds(moments: Sequence[Moment]) -> list[float]:
    """Every moment in seconds of `time.perf_counter`; waits until all have come."""
    events = [moment for moment in moments if not isinstance(moment, float)]
    for event in events:
        event.synchronize()
    zeros = {device: _zero(device) for device in {event.device for event in events}}
    found = []
    for moment in moments:
        if isinstance(moment, float):
            found.append(moment)
        else:
            zero, zero_s = zeros[moment.device]
            found.append(zero_s - moment.elapsed_time(zero) * 1e-3)
    return found


def _zero(device: torch.device) -> tuple[torch.cuda.Event, float]:
    """An event that all others precede, and when it was, by the host's clock."""
    zero = torch.cuda.Event(enable_timing=True)
    zero.record(torch.cuda.current_stream(device))
    zero.synchronize()
    return zero, time.perf_counter()
