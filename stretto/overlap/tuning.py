"""`schedule="auto"`: an operation is measured once for each shape, and the law says how it communicates.

The first call of a shape runs its loop a few times in every way that may be chosen, the ways in turn; the product's
seconds and the messages' seconds, the greatest over ranks, go into the law, and its choice is kept with the group.
The hazard: every rank must come to the same choice at the same call. So a choice is kept by facts that are equal on
all ranks (never by a rank's own number of features), and what was measured is exchanged before it is used. The law
knows no price of a message, so its choice must also have been faster than plain when it was tried: few rows often are
not. And ways that are within twice what trials of one way differ by of the middle of all ways count as equally long:
there are more trials for as long as that alone decides. Fewer rows than ranks, as in decoding, are left plain
untried: a rank without rows has no product that hides anything. On CUDA seconds are those of the device's stream,
which waits while the host does not. Source: the law of this library.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TypeVar

import torch

from stretto.overlap.inputs import How
from stretto.overlap.law import Choice, choose
from stretto.overlap.moments import seconds
from stretto.overlap.p2p import Call

__all__ = ["greatest", "tuned"]

Result = TypeVar("Result")
_WAYS = (("plain", 1), ("direct", 1), ("direct", 2), ("direct", 4))
_LEAST_TRIALS, _MOST_TRIALS = 3, 9

Trials = dict[tuple[str, int], list[tuple[float, float]]]
"""Of each way its runs: seconds of all, and of waiting."""


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
    if num_rows < call.peers.world_size:
        call.why = "fewer rows than ranks"
        _say(call, call.why)
        plain = replace(how, schedule="plain", num_subslices=1)
        return plain, run(plain)
    key = (call.operation, call.tuned_as, call.facts)
    choices = call.peers.choices
    if key not in choices:
        choices[key] = _measured(call, how, run)
        _say(call, choices[key].why, f" ({choices[key]})")
    choice = choices[key]
    call.choice, call.why = choice, choice.why
    taken = replace(how, schedule=choice.schedule, num_subslices=choice.num_subslices)  # type: ignore[arg-type]
    return taken, run(taken)


def _say(call: Call, why: str, predicted: str = "") -> None:
    if why:
        name = f"{call.operation} ({call.tuned_as})" if call.tuned_as else call.operation
        call.peers.records.say_once(call.peers.group, f"{name} is not overlapped: {why}{predicted}")


def _measured(call: Call, how: How, run: Callable[[How], object]) -> Choice:
    if torch.are_deterministic_algorithms_enabled():
        return Choice("direct", 1, 0.0, 0.0)
    call.is_trial, call.device, before = True, how.device, call.exposed_s
    trials: Trials = {way: [] for way in _WAYS}
    generators = [how.device] if how.device.type == "cuda" else []
    with torch.random.fork_rng(generators):  # what an attention draws in a trial is thrown away with it
        for turn in range(1, _MOST_TRIALS + 1):
            for schedule, m in _WAYS:  # in turn: a machine that slows down does so for all
                way = replace(how, schedule=schedule, num_subslices=m)  # type: ignore[arg-type]
                trials[schedule, m].append(_timed(call, partial(run, way)))
            if turn < _LEAST_TRIALS:
                continue
            choice, is_settled = _judged(call, trials, how.device)
            if is_settled:
                break
    call.is_trial, call.exposed_s = False, before
    return choice


def _judged(call: Call, trials: Trials, device: torch.device) -> tuple[Choice, bool]:
    """The law's choice after these trials, and whether it would be the same if every difference counted."""
    products = [sorted(total - waits for total, waits in times) for times in trials.values()]
    mine = [
        min(waits for _, waits in trials["plain", 1]),
        median(second - least for least, second, *_ in products),
        *(second for _, second, *_ in products),
        *(min(total for total, _ in times) for times in trials.values()),
    ]
    messages_s, differ_s, *numbers = greatest(call, mine, device)
    products_s, totals_s = numbers[: len(_WAYS)], dict(zip(_WAYS, numbers[len(_WAYS) :]))
    middle_s = median(products_s)
    alike_s = [middle_s if abs(s - middle_s) <= 2 * differ_s else s for s in products_s]

    def law(seconds: Sequence[float]) -> Choice:
        cut = {m: s for (schedule, m), s in zip(_WAYS, seconds) if schedule == "direct"}
        return choose(seconds[0], messages_s, call.peers.world_size, cut_compute_s=cut)

    choice, sharp = law(alike_s), law(products_s)
    is_settled = (choice.schedule, choice.num_subslices) == (sharp.schedule, sharp.num_subslices)
    return _believed(choice, totals_s, messages_s), is_settled


def _believed(choice: Choice, totals_s: dict[tuple[str, int], float], messages_s: float) -> Choice:
    """The law's choice, unless in the trial it took longer than plain: the law knows no price of a message."""
    tried_s, plain_s = totals_s[choice.schedule, choice.num_subslices], totals_s["plain", 1]
    if tried_s <= plain_s:
        return choice
    why = f"when it was tried it took {tried_s * 1e3:.4g} ms, plain {plain_s * 1e3:.4g}"
    plain, direct = choice.plain_s, choice.overlapped_s
    return Choice("plain", 1, plain, plain, messages_s, why, direct)


def _timed(call: Call, run: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a run, and those of them spent waiting: of the device's stream, where there is one.

    The host waits for a run's end before the next begins, so that none queues behind another.
    """
    call.waits, start = [], call.now()
    run()
    call.finish()
    start_s, end_s, *waits_s = seconds([start, call.now(), *(moment for wait in call.waits for moment in wait)])
    return end_s - start_s, sum(waits_s[1::2]) - sum(waits_s[0::2])


def greatest(call: Call, numbers: Sequence[float], device: torch.device) -> list[float]:
    """Each number's greatest over the ranks, from one small message to and from every peer."""
    peers = call.peers
    mine = torch.tensor(numbers, dtype=torch.float64, device=peers.words(device))
    theirs = [torch.empty_like(mine) for _ in range(peers.world_size)]
    others = [peer for peer in range(peers.world_size) if peer != peers.rank]
    theirs[peers.rank] = mine
    call.wait(call.tell([(mine, peer) for peer in others], [(theirs[peer], peer) for peer in others], device))
    found: list[float] = torch.stack(theirs).amax(0).tolist()
    return found
