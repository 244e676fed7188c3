"""Data and Ulysses ranks that hold one model between them by FSDP2.

`FsdpReducer` takes the gradients by FSDP2's own door; `per_step` is FSDP2's own reduction. Copies of the model beside
each other are summed over after the advantages are known, never by FSDP2, which would do it before. The hazard: all
ranks must run the same forwards and backwards.
"""

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from stretto.choose import Choice
from stretto.config import Config
from stretto.overlap import FsdpReducer
from stretto.overlap.buckets import local
from stretto.policy import AdvantageRule, Policy
from stretto.policy.schedules import Schedule
from stretto.ranks import Ranks
from stretto.reduction import Kind, Reduction, make_late, settled

__all__ = ["Sharded"]


class Sharded(Reduction):
    """Data and Ulysses ranks hold one model between them by FSDP2, whose gradients `FsdpReducer` takes.

    per_step is FSDP2's own reduction. Copies of the model beside each other are summed over after the weights are
    known, never by FSDP2.
    """

    def __init__(self, policy: Policy, ranks: Ranks, kind: Kind) -> None:
        super().__init__(policy)
        self.kind, self.ranks = kind, ranks
        self.in_step = policy.in_lockstep = True
        self.columns = ranks.summed_over
        self.copies = ranks.group_of("replicate") if ranks.sizes["replicate"] > 1 else None
        self.reducer: FsdpReducer | None = None
        if kind != "per_step":
            modules = [module for module in policy.module.modules() if isinstance(module, FSDPModule)]
            self.reducer = FsdpReducer(
                modules,
                ranks.group_of("shard", "ulysses"),
                hold="late" if kind == "late" else "coalesced",
                replicate_group=self.copies,
            )

    @property
    def blocked_s(self) -> float:
        """See `Reduction.blocked_s`."""
        return 0.0 if self.reducer is None else self.reducer.exposed_s

    @property
    def num_sent(self) -> int:
        """See `Reduction.num_sent`."""
        return 0 if self.reducer is None else self.reducer.num_sent

    def make_schedule(self, choice: Choice, config: Config, rule: AdvantageRule) -> Schedule:
        """See `Reduction.make_schedule`; provisional gradients are held by the reducer."""
        if choice.name in ("reweight", "two_sum", "hybrid"):
            assert self.reducer is not None
            return make_late(choice, self.policy, self.reducer, config, rule)
        return super().make_schedule(choice, config, rule)

    def finish(self, *, was_provisional: bool) -> None:
        """See `Reduction.finish`."""
        if self.reducer is not None:
            if not was_provisional:
                self.reducer.finish()
            settled(self.reducer, was_provisional)
        elif self.copies is not None:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    dist.all_reduce(local(parameter.grad), group=self.copies)

    def close(self) -> None:
        """See `Reduction.close`."""
        if self.reducer is not None:
            self.reducer.close()
