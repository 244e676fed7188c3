"""Which samples share a forward, and which are trained together.

Pure index arithmetic. The samples of an optimizer step are packed into batches of B rows that share their trained
steps; a batch may hold samples of several prompt groups. A wave is the fewest consecutive batches that complete
their prompt groups: what must be rolled out before its advantages exist, so that memory is bounded by a wave.
"""

import itertools
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["Place", "parts", "waves"]


class Place(NamedTuple):
    """One sample of an iteration: its prompt group and its number there."""

    prompt: int
    sample: int


def parts(num_prompts: int, num_parts: int) -> list[range]:
    """Disjoint parts of the prompt groups, one an optimizer step, balanced to within one group."""
    bounds = [i * num_prompts // num_parts for i in range(num_parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def waves(
    trained_steps: Mapping[int, tuple[int, ...]], num_samples: int, num_rows: int, *, together: bool = False
) -> list[list[list[Place]]]:
    """Waves of batches of places for the prompt groups in `trained_steps` (group -> its trained steps).

    Groups of equal trained steps are packed one after another, `num_samples` each, into batches of `num_rows` (the
    last may be smaller). together: one wave of everything, for statistics over all groups.
    """
    by_steps: dict[tuple[int, ...], list[int]] = {}
    for prompt, steps in trained_steps.items():
        by_steps.setdefault(steps, []).append(prompt)
    result: list[list[list[Place]]] = []
    for prompts in by_steps.values():
        places = [Place(prompt, sample) for prompt in prompts for sample in range(num_samples)]
        wave: list[list[Place]] = []
        for start in range(0, len(places), num_rows):
            wave.append(places[start : start + num_rows])
            if wave[-1][-1].sample == num_samples - 1:
                result.append(wave)
                wave = []
    return [[batch for wave in result for batch in wave]] if together else result
