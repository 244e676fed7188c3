"""Medians of interleaved repeats with bootstrap intervals.

Repeats are resampled whole, so that what was measured in the same repeat stays together and a slow minute of the
machine hits both sides of a ratio. The hazard is few repeats: with 9 the interval is coarse, and honest about it.
Source of the percentile bootstrap: Efron (1979).
"""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

__all__ = ["Interval", "bootstrap", "median_ratio"]


@dataclass(frozen=True)
class Interval:
    """A statistic of all repeats and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def reaches(self, target: float) -> bool:
        """Whether the interval reaches `target` from below: the data do not rule it out."""
        return self.high >= target

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def bootstrap(
    statistic: Callable[[Sequence[int]], float], num_repeats: int, draws: int = 2000, seed: int = 0
) -> Interval:
    """`statistic` of a list of repeats (their indices, drawn with replacement) over `draws` resamples."""
    generator = random.Random(seed)
    values = sorted(statistic(generator.choices(range(num_repeats), k=num_repeats)) for _ in range(draws))
    low, high = values[round(0.025 * (draws - 1))], values[round(0.975 * (draws - 1))]
    return Interval(statistic(range(num_repeats)), low, high)


def median_ratio(over: Sequence[float], under: Sequence[float]) -> Callable[[Sequence[int]], float]:
    """The median over repeats of over[i] / under[i], for `bootstrap`."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return lambda repeats: statistics.median(ratios[i] for i in repeats)
