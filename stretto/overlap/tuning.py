"""`schedule="auto"`: an operation is measured once for each shape, and the law says how it communicates.

The first call of a shape runs its loop a few times in every way that may be chosen; the product's seconds and the
messages' seconds, the greatest over ranks, go into the law, and its choice is kept with the group. The hazard: every
rank must come to the same choice at the same call. So a choice is kept by facts that are equal on all ranks (never by
a rank's own number of features), and what was measured is exchanged before it is used. Source: the law of this
library.
"""

import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from stretto.overlap.inputs import How
from stretto.overlap.law import Choice, choose
from stretto.overlap.p2p import Call

__all__ = ["tuned"]

Result = TypeVar("Result")
_WAYS = (("plain", 1), ("direct", 1), ("direct", 2), ("direct", 4))
_REPEATS = 3


def tuned(call: Call, how: How, num_rows: int, facts: Hashable, run: Callable[[How], Result]) -> tuple[How, Result]:
    """Run one direction of an operation as `how` says, or, if it says "auto", as the law does.

    Args:
        call: the call that the loop belongs to.
        how: as the user asked.
        num_rows: of the whole tensor: shapes whose rows round up to the same power of two share a choice, so that
            lengths that change from call to call are not measured one by one.
        facts: whatever else decides the work, equal on every rank.
        run: does it in the given way; may be called more than once.

    Returns:
        The way that was taken, never "auto", and what `run` returned.
    """
    call.tuned_as, call.facts = how.tuned_as, (facts, max(1, num_rows - 1).bit_length())
    if how.schedule != "auto":
        return how, run(how)
    key = (call.operation, call.tuned_as, call.facts)
    choices = call.peers.choices
    if key not in choices:
        choices[key] = _measured(call, how, run)
        _say(call, choices[key])
    choice = choices[key]
    call.choice = choice
    taken = replace(how, schedule=choice.schedule, num_subslices=choice.num_subslices)  # type: ignore[arg-type]
    return taken, run(taken)


def _say(call: Call, choice: Choice) -> None:
    if choice.why:
        name = f"{call.operation} ({call.tuned_as})" if call.tuned_as else call.operation
        call.peers.records.say_once(call.peers.group, f"{name} is not overlapped: {choice.why} ({choice})")


def _measured(call: Call, how: How, run: Callable[[How], object]) -> Choice:
    if call.peers.world_size == 1:
        return choose(0.0, 0.0, 1)
    if torch.are_deterministic_algorithms_enabled():
        return Choice("direct", 1, 0.0, 0.0)
    call.is_trial, before = True, (call.exposed_s, call.products_s)
    products = {}
    messages_s = float("inf")
    for schedule, m in _WAYS:
        way = replace(how, schedule=schedule, num_subslices=m)  # type: ignore[arg-type]
        times = [_timed(call, partial(run, way)) for _ in range(_REPEATS)]
        products[schedule, m] = min(total - waits for total, waits in times)
        if schedule == "plain":
            messages_s = min(waits for _, waits in times)
    call.is_trial, (call.exposed_s, call.products_s) = False, before
    messages_s, *seconds = call.greatest([messages_s, *products.values()], how.device)
    cut = {m: s for (schedule, m), s in zip(_WAYS, seconds) if schedule == "direct"}
    return choose(seconds[0], messages_s, call.peers.world_size, cut_compute_s=cut)


def _timed(call: Call, run: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a run, and those of them spent waiting."""
    before, start = call.exposed_s, time.perf_counter()
    run()
    call.finish()
    return time.perf_counter() - start, call.exposed_s - before
