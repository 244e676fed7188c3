"""Hybrid: retain the graphs of the last k trained steps, reweight those before.

Between the two: the held graphs bound the memory at k steps, and those steps cost no gradient in flight and, with
KL, no second vector-Jacobian product.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from stretto.policy.loss import TrainedStep
from stretto.policy.rollout import Batch, Policy, Score, Trajectory
from stretto.policy.schedules.base import UpdateStats, make_gradient
from stretto.policy.schedules.reweight import Provisional, Reweight, add_weighted

__all__ = ["Hybrid"]


class Hybrid(Reweight):
    """T forwards, |S| backwards a sample; the last `retain_last` backwards wait for the advantages."""

    name = "hybrid"

    def __init__(self, policy: Policy, retain_last: int = 1) -> None:
        super().__init__(policy)
        self.retain_last = retain_last
        self._graphs: list[Tensor] = []
        self._bytes_per_graph: dict[int, int] = {}

    def during(self, index: int, batch: Batch) -> AbstractContextManager[Any]:
        """As reweight's before the last steps; a plain gradient forward, weighed the first time, for those."""
        if not self._is_retained(index, batch):
            return super().during(index, batch)
        return torch.enable_grad()

    def trained(self, index: int, step: TrainedStep, velocity: Tensor, batch: Batch) -> None:
        """Backpropagate at once, or keep the graph."""
        if self._is_retained(index, batch):
            self._graphs.append(velocity)
        else:
            super().trained(index, step, velocity, batch)

    def update(self, trajectories: Sequence[Trajectory], advantages: Sequence[Tensor], scale: float) -> UpdateStats:
        """See `Schedule.update`."""
        with self.policy.stopwatch.phase("update"):
            for trajectory, values in zip(trajectories, advantages):
                self.require_current(trajectory)
                kept, trajectory.kept = trajectory.kept, None
                for part in kept:
                    add_weighted(self.parameters, part.gradients, values[part.rows] * scale)
                    self._backpropagate(trajectory, part, values[part.rows], scale)
                self._charge(trajectory, values, scale)
            return self._settle(scale)

    def _is_retained(self, index: int, batch: Batch) -> bool:
        return index >= len(batch.trained_steps) - self.retain_last

    def _rollout(self, batch: Batch, score: Score) -> Trajectory:
        self._graphs = []
        trajectory = super()._rollout(batch, score)
        trajectory.kept[0].graphs, self._graphs = self._graphs, []
        return trajectory

    def _backpropagate(self, trajectory: Trajectory, part: Provisional, values: Tensor, scale: float) -> None:
        if not bool(values.any()) and not self.policy.objective.kl_beta:
            self._stats.skipped_backwards += len(values) * len(part.graphs)
            return
        rows = torch.arange(part.rows.start, part.rows.stop, device=trajectory.latents.device)
        first = len(trajectory.steps) - len(part.graphs)
        for step in trajectory.steps[first:]:
            velocity = part.graphs.pop(0)
            make_gradient(self.policy, step.rows(rows), velocity, values.to(velocity), scale, self._stats)
