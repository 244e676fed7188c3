"""Retain: keep the rollout's graphs, and backpropagate them when the advantages are known.

The gradient is native's bit for bit: the same kernels on the same numbers, each step's graph differentiated on its
own in native's order. The price is memory, activations * |S| * samples in flight. Under autocast a float32 base is
cast anew at every forward and each retained graph keeps its own bf16 copy of the weights: store a frozen base in
bf16 instead. Source: LeanGRPO (arXiv 2609.03528), Retain.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from stretto.policy.loss import TrainedStep
from stretto.policy.rollout import Batch, Policy, Score, Trajectory, roll
from stretto.policy.schedules.base import Schedule, make_gradient
from stretto.policy.schedules.stats import UpdateStats
from stretto.policy.work import KeptBytes

__all__ = ["Retain"]


class Retain(Schedule):
    """T forwards, |S| of them with gradient, and |S| backwards a sample; nothing is run twice."""

    name = "retain"

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self._graphs: list[Tensor] = []
        self._bytes_per_rollout: dict[tuple[int, int], int] = {}
        self._held = 0

    def during(self, index: int, batch: Batch) -> AbstractContextManager[Any]:
        """Every trained step's forward has a gradient."""
        return torch.enable_grad()

    def trained(self, index: int, step: TrainedStep, velocity: Tensor, batch: Batch) -> None:
        """Keep the graph."""
        self._graphs.append(velocity)

    def rollout(self, batch: Batch, score: Score) -> Trajectory:
        """See `Schedule.rollout`."""
        version = self.policy.version
        with self.resetting():
            latents, steps = self._roll(batch)
            graphs, self._graphs = self._graphs, []
            self.held_bytes = max(self.held_bytes, self._held)
            rewards = score(batch, latents)
        return Trajectory(batch, latents, steps, rewards, version, graphs, self._collection)

    def reset(self) -> None:
        """See `Schedule.reset`."""
        super().reset()
        self._graphs, self._held = [], 0

    def update(self, trajectories: Sequence[Trajectory], advantages: Sequence[Tensor], scale: float) -> UpdateStats:
        """See `Schedule.update`; each graph is freed as it is used."""
        stats = self.stats()
        with self.resetting(), self.policy.stopwatch.phase("update"):
            for trajectory in trajectories:
                self.require_current(trajectory)
            for trajectory, values in zip(trajectories, advantages):
                graphs, trajectory.kept = trajectory.kept, None
                self._held -= self._bytes_per_rollout[_shape(trajectory.batch)]
                if not self.policy.has_gradient(values):
                    stats.skipped_backwards += len(values) * len(graphs)
                    graphs.clear()
                    continue
                for step in trajectory.steps:
                    velocity = graphs.pop(0)
                    make_gradient(self.policy, step, velocity, values.to(velocity), scale, stats)
        return stats

    def _roll(self, batch: Batch) -> tuple[Tensor, list[TrainedStep]]:
        """Roll, and weigh the graphs by saved-tensor hooks the first time that a batch of this shape is seen."""
        shape = _shape(batch)
        if shape in self._bytes_per_rollout:
            result = roll(self.policy, batch, self)
        else:
            weights = [*self.policy.module.parameters(), *self.policy.module.buffers()]
            with KeptBytes(weights) as kept:
                result = roll(self.policy, batch, self)
            self._bytes_per_rollout[shape] = kept.total
        self._held += self._bytes_per_rollout[shape]
        return result


def _shape(batch: Batch) -> tuple[int, int]:
    """What a rollout's bytes depend on."""
    return len(batch.samples), len(batch.trained_steps)
