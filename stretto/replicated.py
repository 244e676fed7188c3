"""Data parallelism with a whole model on every data rank: pieces of gradients go straight to their owners.

The owners step their shards of the weights and publish them behind the next iteration's first forward (ZeRO-1), or
every rank steps everything. The hazard is a reduction at every trained step, the baseline: every rank must then run
as many backwards as any other.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.choose import Choice
from stretto.config import Config
from stretto.models.ema import Ema
from stretto.overlap import GradientReducer
from stretto.overlap.buckets import local
from stretto.policy import AdvantageRule, Policy
from stretto.policy.schedules import Schedule
from stretto.policy.schedules.base import HeldGradients
from stretto.ranks import Ranks
from stretto.reduction import Kind, Reduction, make_late, settled

__all__ = ["Replicated"]


class Replicated(Reduction):
    """Every data rank holds the whole model; pieces go straight to their owners (`GradientReducer`).

    The owners step their shards and publish them behind the next forward (ZeRO-1), or every rank steps everything.
    """

    def __init__(self, policy: Policy, ranks: Ranks, kind: Kind, *, is_sharded: bool) -> None:
        super().__init__(policy)
        self.kind, self.ranks, self.is_sharded = kind, ranks, is_sharded
        self.in_step = policy.in_lockstep = kind == "per_step"
        self.columns = ranks.summed_over
        self.reducer = GradientReducer(
            policy.module,
            ranks.group_of("replicate", "shard", "ulysses"),
            units=read_from_outside(policy.module) if ranks.world_size > ranks.num_data_ranks else (),
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

    @property
    def num_sent(self) -> int:
        """See `Reduction.num_sent`."""
        return self.reducer.num_sent

    def make_schedule(self, choice: Choice, config: Config, rule: AdvantageRule) -> Schedule:
        """See `Reduction.make_schedule`."""
        if self.kind == "late":
            return make_late(choice, self.policy, self.reducer, config, rule)
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


def read_from_outside(module: nn.Module) -> list[nn.Module]:
    """The blocks, whose split layers read one another's parameters without calling one another."""
    return [block for blocks in module.modules() if isinstance(blocks, nn.ModuleList) for block in blocks]


def is_split(tensor: Tensor) -> bool:
    """Whether the ranks of a DTensor hold different parts of it."""
    return isinstance(tensor, DTensor) and not all(placement.is_replicate() for placement in tensor.placements)
