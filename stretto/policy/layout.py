"""Which rank makes which sample in which round, which samples share a forward, which are trained together.

Pure index arithmetic. The samples of an optimizer step are dealt to the ranks like cards, one after another, so that
no rank has more than one sample more than another, whatever the numbers. In a round every rank runs one forward's
batch; all batches of a round share their trained steps, so that ranks that must run in step can. A wave is the fewest
rounds that complete their prompt groups: what must be rolled out before its advantages exist, so that memory is
bounded by a wave. The hazard is a sample whose numbers depend on the rank that makes it: a place names none. Source:
the shared-prompt layout of LeanGRPO (arXiv 2609.03528); where its samples and ranks do not divide, ours.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Place", "Round", "Wave", "parts", "waves"]


class Place(NamedTuple):
    """One sample of an iteration: its prompt group and its number there."""

    prompt: int
    sample: int


Round = tuple[tuple[Place, ...], ...]
"""Of every rank, the samples of one forward; empty for a rank that has none in this round."""


class Wave(NamedTuple):
    """Complete prompt groups, and the rounds that make their samples."""

    prompts: tuple[int, ...]
    rounds: tuple[Round, ...]


def parts(num_prompts: int, num_parts: int) -> list[range]:
    """Disjoint parts of the prompt groups, one an optimizer step, balanced to within one group."""
    bounds = [i * num_prompts // num_parts for i in range(num_parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def waves(
    trained_steps: Mapping[int, tuple[int, ...]],
    num_samples: int,
    num_rows: int,
    num_ranks: int = 1,
    *,
    together: bool = False,
) -> list[Wave]:
    """The waves of the prompt groups in `trained_steps` (group -> its trained steps), `num_samples` samples each.

    Groups of equal trained steps follow one another in batches of at most `num_rows`. With one row a forward and M >=
    R, rank r makes sample q R + r of the first group in round q, and a later group begins with the rank whose turn it
    is; with M < R, a wave holds ceil(R / M) groups. Every rank
    makes, over all waves, as many samples as any other, or one fewer. together: one wave of everything, for
    statistics over all groups.
    """
    by_steps: dict[tuple[int, ...], list[int]] = {}
    for prompt, steps in trained_steps.items():
        by_steps.setdefault(steps, []).append(prompt)
    result: list[Wave] = []
    num_dealt = 0
    for prompts in by_steps.values():
        size = _groups_a_wave(num_samples, num_rows, num_ranks)
        for start in range(0, len(prompts), size):
            chosen = tuple(prompts[start : start + size])
            places = [Place(prompt, sample) for prompt in chosen for sample in range(num_samples)]
            result.append(Wave(chosen, _dealt(places, num_rows, num_ranks, num_dealt)))
            num_dealt += len(places)
    if not together:
        return result
    return [Wave(tuple(p for w in result for p in w.prompts), tuple(r for w in result for r in w.rounds))]


def _groups_a_wave(num_samples: int, num_rows: int, num_ranks: int) -> int:
    """The fewest groups whose samples fill whole batches and occupy every rank."""
    size = 1
    while size * num_samples % num_rows or size * num_samples < num_ranks:
        size += 1
    return size


def _dealt(places: Sequence[Place], num_rows: int, num_ranks: int, num_dealt: int) -> tuple[Round, ...]:
    """Rounds of a wave; the first place goes to the rank that is next after `num_dealt` samples."""
    rounds = []
    for start in range(0, len(places), num_rows * num_ranks):
        batches: list[list[Place]] = [[] for _ in range(num_ranks)]
        for number, place in enumerate(places[start : start + num_rows * num_ranks], start=num_dealt + start):
            batches[number % num_ranks].append(place)
        rounds.append(tuple(tuple(batch) for batch in batches))
    return tuple(rounds)
