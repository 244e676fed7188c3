"""Native: roll out without gradients, then run every trained step again with them.

The schedule of every published trainer, and the reference for the others. `replay_batch` is its best form: the
update runs several trained steps and samples in one forward, which on small models costs far less than one by one.
Any trajectory can be updated natively, whoever rolled it out and however the weights have moved: the ratio clip is
active here. Source: Flow-GRPO, DanceGRPO.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from stretto.policy.loss import TrainedStep
from stretto.policy.rollout import Batch, Condition, Policy, Score, Trajectory, roll
from stretto.policy.schedules.base import Schedule, make_gradient
from stretto.policy.schedules.stats import UpdateStats

__all__ = ["Native", "replay"]


class Native(Schedule):
    """T forwards without gradient, then |S| forwards and backwards a sample.

    replay_batch: rows of one update forward. 1 keeps the rollout's batches (one trained step at a time, bitwise
    comparable with retain); more packs that many rows of any steps and samples; 0 packs all.
    """

    name = "native"

    def __init__(self, policy: Policy, replay_batch: int = 1) -> None:
        super().__init__(policy)
        self.replay_batch = replay_batch

    def during(self, index: int, batch: Batch) -> AbstractContextManager[Any]:
        """No forward of the rollout has a gradient."""
        return torch.no_grad()

    def trained(self, index: int, step: TrainedStep, velocity: Tensor, batch: Batch) -> None:
        """Nothing beyond the record."""

    def rollout(self, batch: Batch, score: Score) -> Trajectory:
        """See `Schedule.rollout`."""
        version = self.policy.version
        latents, steps = roll(self.policy, batch, self)
        return Trajectory(batch, latents, steps, score(batch, latents), version)

    def update(self, trajectories: Sequence[Trajectory], advantages: Sequence[Tensor], scale: float) -> UpdateStats:
        """See `Schedule.update`; trajectories of another policy version are welcome."""
        stats = self.stats()
        with self.policy.stopwatch.phase("update"):
            if self.replay_batch == 1:
                for trajectory, values in zip(trajectories, advantages):
                    for step in trajectory.steps:
                        replay(self.policy, step, trajectory.batch.condition, values, scale, stats)
                return stats
            all_rows = self.policy.in_lockstep or bool(self.policy.objective.kl_beta)
            for trajectory, values in zip(trajectories, advantages):
                stats.skipped_backwards += 0 if all_rows else int((values == 0).sum()) * len(trajectory.steps)
            for chunk in _packed(trajectories, advantages, self.replay_batch, all_rows):
                replay(self.policy, *chunk, scale, stats)
        return stats


def replay(
    policy: Policy,
    step: TrainedStep,
    condition: Condition,
    advantages: Tensor,
    scale: float,
    stats: UpdateStats,
    *,
    with_kl: bool = True,
) -> None:
    """The second forward: run B stored rows again with gradient, and differentiate.

    Rows without advantage and without KL have no gradient: where that holds for all rows, nothing is run, unless
    ranks run in lockstep.
    """
    if not policy.has_gradient(advantages, with_kl=with_kl):
        stats.skipped_backwards += len(advantages)
        return
    with torch.enable_grad():
        velocity = policy.forward(step.latents, step.steps, condition)
        make_gradient(policy, step, velocity, advantages.to(velocity), scale, stats, with_kl=with_kl)


def _packed(
    trajectories: Sequence[Trajectory], advantages: Sequence[Tensor], size: int, all_rows: bool
) -> Iterator[tuple[TrainedStep, Condition, Tensor]]:
    """All rows of all trained steps that have a gradient, in chunks of `size` rows (0: one chunk)."""
    steps, conditions, weights = [], [], []
    for trajectory, values in zip(trajectories, advantages):
        rows = torch.arange(len(values)) if all_rows else values.nonzero().flatten()
        for step in trajectory.steps:
            steps.append(step.rows(rows.to(step.latents.device)))
            conditions.append({k: v[rows.to(v.device)] for k, v in trajectory.batch.condition.items()})
            weights.append(values[rows])
    if not steps or not sum(len(w) for w in weights):
        return
    step, weight = TrainedStep.cat(steps), torch.cat(weights)
    condition = {k: torch.cat([c[k] for c in conditions]) for k in conditions[0]}
    for start in range(0, len(weight), size or len(weight)):
        rows = torch.arange(start, min(start + (size or len(weight)), len(weight)))
        chunk = {k: v[rows.to(v.device)] for k, v in condition.items()}
        yield step.rows(rows.to(step.latents.device)), chunk, weight[rows]
