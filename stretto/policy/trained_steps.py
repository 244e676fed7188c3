"""Which transitions of a trajectory carry gradient.

Drawn before the rollout from a stream of its own, so that every schedule trains the same steps. One draw holds for
a whole prompt group: a window per sample inflates the group's reward spread and collapses training. The last
transition is left out by rule (its noise is nearly none and its log-probability explodes) unless a list names it.
Source: Flow-GRPO-Fast, MixGRPO (arXiv 2507.21802), DanceGRPO.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from stretto.policy.noise import generator

__all__ = ["TrainedStepsRule"]


@dataclass(frozen=True)
class TrainedStepsRule:
    """A rule that gives the trained steps S of each prompt group; see `draw`.

    rule: `all_but_last`; `fraction` (that share of the steps before the last, drawn); `random_window` (`size`
    consecutive steps, start drawn in 0..start_max); `progressive_window` (start moves by `stride` every
    `move_every` iterations and returns to 0 at the end); `list` (`steps`).
    """

    rule: Literal["all_but_last", "fraction", "random_window", "progressive_window", "list"] = "all_but_last"
    fraction: float = 0.6
    size: int = 2
    start_max: int | None = None
    move_every: int = 25
    stride: int = 1
    steps: Sequence[int] = field(default_factory=tuple)
    drawn_per: Literal["group", "iteration"] = "group"

    def draw(self, seed: int, num_steps: int, iteration: int, prompt: int) -> tuple[int, ...]:
        """S for one prompt group, ascending; the same for every sample of the group, rank and schedule."""
        key = (iteration, prompt if self.drawn_per == "group" else -1)
        random = generator(seed, "trained_steps", *key)
        last_start = num_steps - 1 - self.size
        match self.rule:
            case "all_but_last":
                return tuple(range(num_steps - 1))
            case "list":
                return tuple(sorted(self.steps))
            case "fraction":
                count = max(1, round(self.fraction * (num_steps - 1)))
                return tuple(sorted(torch.randperm(num_steps - 1, generator=random)[:count].tolist()))
            case "random_window":
                latest = last_start if self.start_max is None else min(self.start_max, last_start)
                start = int(torch.randint(latest + 1, (1,), generator=random))
            case "progressive_window":
                start = iteration // self.move_every * self.stride % (last_start + 1)
            case _:
                raise ValueError(f"trained_steps.rule = {self.rule!r} is not a rule")
        return tuple(range(start, start + self.size))

    def check(self, num_steps: int) -> None:
        """Raise ValueError where the rule cannot give steps of a trajectory of `num_steps`."""
        if self.rule == "list":
            outside = [s for s in self.steps if not 0 <= s < num_steps]
            if not self.steps or outside or len(set(self.steps)) < len(self.steps):
                raise ValueError(
                    f"trained_steps.steps = {list(self.steps)}: list distinct steps in 0..{num_steps - 1}, "
                    "at least one"
                )
        elif num_steps < 2:
            raise ValueError(f"sampling.steps = {num_steps}: the last step is never trained, so take at least 2")
        elif self.rule.endswith("window") and not 1 <= self.size <= num_steps - 1:
            raise ValueError(
                f"trained_steps.size = {self.size}: a window of a {num_steps}-step trajectory holds 1 to "
                f"{num_steps - 1} steps"
            )
        elif self.rule == "fraction" and not 0 < self.fraction <= 1:
            raise ValueError(f"trained_steps.fraction = {self.fraction}: take a share in (0, 1]")
