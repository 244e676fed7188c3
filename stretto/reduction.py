"""What a run asks of the sum over its ranks' gradients; for one process there is none.

Every engine gives the same gradient: the sum over all ranks that make different samples or hold different tokens of
one. The hazard is a rank that reduces when the others do not: nothing here depends on what a rank's own samples are
worth.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from stretto.choose import Choice, make_chosen
from stretto.config import Config
from stretto.models.ema import Ema
from stretto.models.gradient_norm import gradient_norm
from stretto.overlap import FsdpReducer, GradientReducer
from stretto.policy import AdvantageRule, Policy
from stretto.policy.schedules import Late, LateHybrid, Schedule

__all__ = ["Kind", "Reduction", "make_late", "settled"]

Kind = Literal["none", "late", "coalesced", "per_step"]


class Reduction:
    """One process, or ranks that all share their samples: nothing to reduce. The base of the others.

    kind: see `kind_of`. parameters: by name, what the optimizer steps. in_step: whether all ranks must run the same
    forwards and backwards. columns: the data rank of every rank that is summed over.
    """

    in_step = False

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.columns = [0]
        self.kind: Kind = "none"
        self.parameters: dict[str, nn.Parameter] = dict(policy.parameters)

    @property
    def blocked_s(self) -> float:
        """Seconds blocked since the run began."""
        return 0.0

    @property
    def num_sent(self) -> int:
        """Reductions of a bucket's or a module's gradient that this rank has begun; FSDP2's own are not counted."""
        return 0

    def make_schedule(self, choice: Choice, config: Config, rule: AdvantageRule) -> Schedule:
        """The chosen schedule, whose gradients this reduction takes."""
        return make_chosen(choice, config, self.policy, rule)

    def quiet(self) -> AbstractContextManager[None]:
        """Inside, backwards stay on this rank."""
        return nullcontext()

    def finish(self, *, was_provisional: bool) -> None:
        """Give `parameters` the gradient of all ranks: what was added since the last optimizer step.

        was_provisional: it was made before its advantages were known.
        """

    def moved(self) -> None:
        """Say that the optimizer has moved `parameters`."""

    def norm(self) -> Tensor:
        """The norm of the gradient over all that trains, the same on every rank; ()."""
        return gradient_norm(self.parameters.values())

    @contextmanager
    def averaged(self, ema: Ema | None) -> Iterator[None]:
        """Inside, the model holds the averaged weights (the live ones where there is no average)."""
        with ema.swapped() if ema is not None else nullcontext():
            yield

    def whole(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Values that go with `parameters` (moments, averages) by the names and shapes of the policy's parameters."""
        return values

    def own(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The way back from `whole`."""
        return values

    def close(self) -> None:
        """Give the model back as it was."""


def settled(reducer: GradientReducer | FsdpReducer, was_provisional: bool) -> None:
    """Deliver what was settled; a gradient whose advantages were known counts as it is."""
    if not was_provisional:
        reducer.settle(torch.ones(1, reducer.world_size, dtype=torch.float64))
    reducer.deliver()


def make_late(
    choice: Choice, policy: Policy, reducer: GradientReducer | FsdpReducer, config: Config, rule: AdvantageRule
) -> Late:
    """The schedule whose gradients a reducer takes before their advantages are known; Ulysses ranks share samples."""
    num_samples, sharing = config.prompts.samples, config.parallel.ulysses
    if choice.name == "hybrid":
        k = config.schedule.retain_last
        return LateHybrid(policy, reducer, rule, num_samples, ranks_per_sample=sharing, retain_last=k)
    return Late(policy, reducer, rule, num_samples, ranks_per_sample=sharing)
