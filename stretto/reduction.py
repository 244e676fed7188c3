"""How the gradients of a run's ranks become one, by the settings of [parallel].

`late`: a sample's gradient leaves during its last backward, before its advantage is known, and its owner scales when
it sums. `coalesced`: gradients are added up locally and summed over the ranks once an optimizer step. `per_step`: at
every trained step, as published trainers do; the baseline. Every engine gives the same gradient: the sum over all
ranks that make different samples or hold different tokens of one. The hazard is a rank that reduces when the others
do not: nothing here depends on what a rank's own samples are worth.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from stretto.choose import Choice, make_chosen
from stretto.config import Config
from stretto.models.ema import Ema
from stretto.models.gradient_norm import gradient_norm
from stretto.overlap import FsdpReducer, GradientReducer
from stretto.policy import AdvantageRule, Policy
from stretto.policy.schedules import Late, Schedule
from stretto.policy.schedules.base import HeldGradients
from stretto.ranks import Ranks

__all__ = ["Kind", "Reduction", "Replicated", "kind_of", "make_reduction"]

Kind = Literal["none", "late", "coalesced", "per_step"]


def kind_of(config: Config, ranks: Ranks, schedule: str) -> Kind:
    """The reduction that a run uses with a schedule: the recipe's, or the default for it."""
    if ranks.mesh is None:
        return "none"
    if ranks.num_data_ranks * ranks.sizes["ulysses"] == 1:  # tensor parallel alone
        return "coalesced"
    wanted = config.parallel.reduction
    if wanted != "auto":
        return wanted
    is_late = schedule == "two_sum" or (schedule == "reweight" and config.sampling.samples_per_forward == 1)
    return "late" if is_late else "coalesced"


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


class Replicated(Reduction):
    """Every data rank holds the whole model; pieces go straight to their owners (`GradientReducer`).

    The owners step their shards and publish them behind the next forward (ZeRO-1), or every rank steps everything.
    """

    def __init__(self, policy: Policy, ranks: Ranks, kind: Kind, *, is_sharded: bool) -> None:
        super().__init__(policy)
        self.kind, self.ranks, self.is_sharded = kind, ranks, is_sharded
        self.in_step = policy.in_lockstep = kind == "per_step"
        self.columns = [
            rank // ranks.sizes["ulysses"] for rank in range(ranks.num_data_ranks * ranks.sizes["ulysses"])
        ]
        self.reducer = GradientReducer(
            policy.module,
            ranks.group_of("replicate", "shard", "ulysses"),
            sharded=is_sharded,
            late_bound=kind == "late",
            average=False,
        )
        if is_sharded:
            self.parameters = {f"bucket{i}": owned for i, owned in enumerate(self.reducer.owned)}
        if kind == "per_step":
            policy.around_backward = self._reducing
        self._stack = ExitStack()
        if kind == "coalesced":
            self._stack.enter_context(self.reducer.accumulate())
        self._shares = self._find_shares() if is_sharded else {}

    @property
    def blocked_s(self) -> float:
        """See `Reduction.blocked_s`."""
        return self.reducer.exposed_s

    def make_schedule(self, choice: Choice, config: Config, rule: AdvantageRule) -> Schedule:
        """See `Reduction.make_schedule`."""
        if self.kind == "late":
            return Late(self.policy, self.reducer, rule, config.prompts.samples)
        return super().make_schedule(choice, config, rule)

    def quiet(self) -> AbstractContextManager[None]:
        """See `Reduction.quiet`."""
        return self.reducer.accumulate() if self.kind == "late" else nullcontext()

    def finish(self, *, was_provisional: bool) -> None:
        """See `Reduction.finish`."""
        if self.kind == "per_step":
            return
        if not was_provisional:
            self.reducer.finish()
        if self.kind == "late":
            settled(self.reducer, was_provisional)

    def moved(self) -> None:
        """See `Reduction.moved`."""
        if self.is_sharded:
            self.reducer.publish()

    def norm(self) -> Tensor:
        """See `Reduction.norm`."""
        if not self.is_sharded:
            return super().norm()
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        total = sum(float((g.double().square() * self._shares[name]).sum()) for name, g in gradients.items())
        return torch.tensor(self.ranks.sum(total), dtype=torch.float64).sqrt()

    @contextmanager
    def averaged(self, ema: Ema | None) -> Iterator[None]:
        """See `Reduction.averaged`."""
        with super().averaged(ema):
            if self.is_sharded:
                self.reducer.publish(wait=True)
            yield
        self.moved()

    def whole(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Reduction.whole`; gathers."""
        if not self.is_sharded or not values:
            return values
        parts = self.reducer.gather([values[name] for name in self.parameters])
        return dict(zip(self.policy.parameters, parts))

    def own(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `Reduction.own`."""
        if not self.is_sharded or not values:
            return values
        return dict(zip(self.parameters, self.reducer.shards([values[name] for name in self.policy.parameters])))

    def close(self) -> None:
        """See `Reduction.close`."""
        self._stack.close()
        self.reducer.close()

    def _find_shares(self) -> dict[str, Tensor]:
        """What the square of an owned element counts in a sum over all ranks: 1 / the ranks that own it."""
        copies = self.ranks.sizes["tensor"]
        shares = {
            name: torch.full_like(local(p.detach()), 1 if is_split(p) else 1 / copies, dtype=torch.float64)
            for name, p in self.policy.parameters.items()
        }
        return self.own(shares)

    @contextmanager
    def _reducing(self) -> Iterator[None]:
        """Around one backward: its gradient is summed over the ranks, then added to what was there."""
        totals = HeldGradients(list(self.parameters.values()))
        with totals.receiving():
            yield
            self.reducer.finish()
        for parameter, gradient in zip(self.parameters.values(), totals.take()):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class Sharded(Reduction):
    """Data and Ulysses ranks hold one model between them by FSDP2, whose gradients `FsdpReducer` takes.

    per_step is FSDP2's own reduction. Copies of the model beside each other are summed over after the weights are
    known, never by FSDP2.
    """

    def __init__(self, policy: Policy, ranks: Ranks, kind: Kind) -> None:
        super().__init__(policy)
        self.kind, self.ranks = kind, ranks
        self.in_step = policy.in_lockstep = True
        self.columns = [data_rank for data_rank in range(ranks.num_data_ranks) for _ in range(ranks.sizes["ulysses"])]
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

    def make_schedule(self, choice: Choice, config: Config, rule: AdvantageRule) -> Schedule:
        """See `Reduction.make_schedule`; provisional gradients are held by the reducer."""
        if choice.name in ("reweight", "two_sum"):
            assert self.reducer is not None
            return Late(self.policy, self.reducer, rule, config.prompts.samples)
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


def settled(reducer: GradientReducer | FsdpReducer, was_provisional: bool) -> None:
    """Deliver what was settled; a gradient whose advantages were known counts as it is."""
    if not was_provisional:
        reducer.settle(torch.ones(1, reducer.world_size, dtype=torch.float64))
    reducer.deliver()


def make_reduction(config: Config, policy: Policy, ranks: Ranks, choice: Choice) -> Reduction:
    """The reduction of a run."""
    kind = kind_of(config, ranks, choice.name)
    if kind == "none":
        return Reduction(policy)
    if ranks.sizes["shard"] > 1:
        return Sharded(policy, ranks, kind)
    return Replicated(policy, ranks, kind, is_sharded=config.parallel.optimizer_state == "sharded")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_split(tensor: Tensor) -> bool:
    """Whether the ranks of a DTensor hold different parts of it."""
    return isinstance(tensor, DTensor) and not all(placement.is_replicate() for placement in tensor.placements)
