"""The graphs of the last trained steps, kept from the rollout until the advantages are known: the half of a hybrid
that is retain.

Bytes are weighed by saved-tensor hooks the first time that a forward of so many rows is run. The hazard is a graph
that outlives its use: each is let go as it is backpropagated, or when a reset forgets it.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from stretto.policy.loss import TrainedStep
from stretto.policy.rollout import Batch, Policy, Trajectory
from stretto.policy.schedules.base import make_gradient
from stretto.policy.schedules.reweight import Provisional, Reweight
from stretto.policy.schedules.stats import UpdateStats
from stretto.policy.work import KeptBytes

__all__ = ["KeptGraphs", "RetainsLast"]


class KeptGraphs:
    """Of each rollout the velocities of the last `retain_last` trained steps (all, where there are fewer)."""

    def __init__(self, policy: Policy, retain_last: int) -> None:
        if retain_last < 0:
            raise ValueError(f"retain_last = {retain_last}: the number of trained steps to retain, at least 0")
        self.policy, self.retain_last = policy, retain_last
        self._velocities: list[Tensor] = []
        self._bytes_per_graph: dict[int, int] = {}

    def first(self, batch: Batch) -> int:
        """Index of the first trained step that is retained."""
        return max(0, len(batch.trained_steps) - self.retain_last)

    @contextmanager
    def keeping(self, num_rows: int) -> Iterator[None]:
        """A forward with gradient, its graph weighed the first time that one of so many rows is run."""
        with torch.enable_grad():
            if num_rows in self._bytes_per_graph:
                yield
                return
            with KeptBytes([*self.policy.module.parameters(), *self.policy.module.buffers()]) as kept:
                yield
            self._bytes_per_graph[num_rows] = kept.total

    def keep(self, velocity: Tensor) -> None:
        """Keep the next step's velocity (B, *latent_shape) with its graph."""
        self._velocities.append(velocity)

    def hand_over(self, part: Provisional, num_rows: int) -> int:
        """Give a finished rollout's graphs to what is kept of it; their bytes."""
        part.graphs, self._velocities = self._velocities, []
        part.graph_bytes = len(part.graphs) * self._bytes_per_graph.get(num_rows, 0)
        return part.graph_bytes

    def forget(self) -> None:
        """Drop the graphs of a rollout that did not end."""
        self._velocities = []

    def backpropagate(
        self, trajectory: Trajectory, part: Provisional, values: Tensor, scale: float, stats: UpdateStats
    ) -> None:
        """Differentiate each graph's loss, KL included, with the advantages (b,) of its rows, into `.grad`.

        Adds scale times the gradient. Nothing is run where `Policy.has_gradient` says that it is known to be zero.
        """
        if not self.policy.has_gradient(values):
            stats.skipped_backwards += len(values) * len(part.graphs)
            return
        rows = torch.arange(part.rows.start, part.rows.stop, device=trajectory.latents.device)
        first = len(trajectory.steps) - len(part.graphs)
        for step in trajectory.steps[first:]:
            velocity = part.graphs.pop(0)
            make_gradient(self.policy, step.rows(rows), velocity, values.to(velocity), scale, stats)


class RetainsLast(Reweight):
    """Reweight, or what is made of it, of all trained steps but the last, whose graphs are kept in `graphs`."""

    graphs: KeptGraphs

    def during(self, index: int, batch: Batch) -> AbstractContextManager[Any]:
        """As reweight's before the last steps; a plain gradient forward, whose graph is weighed, for those."""
        if index < self.graphs.first(batch):
            return super().during(index, batch)
        return self.graphs.keeping(len(batch.samples))

    def trained(self, index: int, step: TrainedStep, velocity: Tensor, batch: Batch) -> None:
        """Backpropagate at once, or keep the graph."""
        if index < self.graphs.first(batch):
            super().trained(index, step, velocity, batch)
        else:
            self.graphs.keep(velocity)

    def reset(self) -> None:
        """See `Schedule.reset`."""
        super().reset()
        self.graphs.forget()
