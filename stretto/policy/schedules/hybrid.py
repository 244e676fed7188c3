"""Hybrid: retain the graphs of the last k trained steps, reweight those before.

Between the two: the held graphs bound the memory at k steps, and those steps cost no gradient in flight and, with
KL, no second vector-Jacobian product.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from stretto.policy.loss import TrainedStep
from stretto.policy.rollout import Batch, Policy, Score, Trajectory
from stretto.policy.schedules.base import make_gradient
from stretto.policy.schedules.reweight import Provisional, Reweight
from stretto.policy.work import KeptBytes

__all__ = ["Hybrid"]


class Hybrid(Reweight):
    """T forwards, |S| backwards a sample; the last `retain_last` backwards wait for the advantages."""

    name = "hybrid"

    def __init__(self, policy: Policy, retain_last: int = 1) -> None:
        if retain_last < 0:
            raise ValueError(f"retain_last = {retain_last}: the number of trained steps to retain, at least 0")
        super().__init__(policy)
        self.retain_last = retain_last
        self._graphs: list[Tensor] = []
        self._bytes_per_graph: dict[int, int] = {}

    def during(self, index: int, batch: Batch) -> AbstractContextManager[Any]:
        """As reweight's before the last steps; a plain gradient forward for those."""
        if not self._is_retained(index, batch):
            return super().during(index, batch)
        return self._keeping(len(batch.samples))

    def trained(self, index: int, step: TrainedStep, velocity: Tensor, batch: Batch) -> None:
        """Backpropagate at once, or keep the graph."""
        if self._is_retained(index, batch):
            self._graphs.append(velocity)
        else:
            super().trained(index, step, velocity, batch)

    def _is_retained(self, index: int, batch: Batch) -> bool:
        return index >= len(batch.trained_steps) - self.retain_last

    def reset(self) -> None:
        """See `Schedule.reset`."""
        super().reset()
        self._graphs = []

    def _rollout(self, batch: Batch, score: Score) -> Trajectory:
        trajectory = super()._rollout(batch, score)
        part = trajectory.kept[0]
        part.graphs, self._graphs = self._graphs, []
        part.graph_bytes = len(part.graphs) * self._bytes_per_graph.get(len(batch.samples), 0)
        self._in_flight += part.graph_bytes
        return self._flown(trajectory)

    @contextmanager
    def _keeping(self, num_rows: int) -> Iterator[None]:
        """A forward with gradient, its graph weighed the first time that one of so many rows is run."""
        with torch.enable_grad():
            if num_rows in self._bytes_per_graph:
                yield
                return
            with KeptBytes([*self.policy.module.parameters(), *self.policy.module.buffers()]) as kept:
                yield
            self._bytes_per_graph[num_rows] = kept.total

    def _credit(self, trajectory: Trajectory, part: Provisional, values: Tensor, scale: float) -> None:
        """Scale the provisional gradients, and backpropagate the kept graphs."""
        super()._credit(trajectory, part, values, scale)
        if not self.policy.has_gradient(values):
            self._stats.skipped_backwards += len(values) * len(part.graphs)
            return
        rows = torch.arange(part.rows.start, part.rows.stop, device=trajectory.latents.device)
        first = len(trajectory.steps) - len(part.graphs)
        for step in trajectory.steps[first:]:
            velocity = part.graphs.pop(0)
            make_gradient(self.policy, step.rows(rows), velocity, values.to(velocity), scale, self._stats)
