"""Hybrid: retain the graphs of the last k trained steps, reweight those before.

Between the two: the held graphs bound the memory at k steps, and those steps cost no gradient in flight and, with
KL, no second vector-Jacobian product.
"""

from torch import Tensor

from stretto.policy.rollout import Batch, Policy, Score, Trajectory
from stretto.policy.schedules.kept_graphs import KeptGraphs, RetainsLast
from stretto.policy.schedules.reweight import Provisional

__all__ = ["Hybrid"]


class Hybrid(RetainsLast):
    """T forwards, |S| backwards a sample; the last `retain_last` backwards wait for the advantages."""

    name = "hybrid"

    def __init__(self, policy: Policy, retain_last: int = 1) -> None:
        super().__init__(policy)
        self.graphs = KeptGraphs(policy, retain_last)

    def _rollout(self, batch: Batch, score: Score) -> Trajectory:
        trajectory = super()._rollout(batch, score)
        self._in_flight += self.graphs.hand_over(trajectory.kept[0], len(batch.samples))
        return self._flown(trajectory)

    def _credit(self, trajectory: Trajectory, part: Provisional, values: Tensor, scale: float) -> None:
        """Scale the provisional gradients, and backpropagate the kept graphs."""
        super()._credit(trajectory, part, values, scale)
        self.graphs.backpropagate(trajectory, part, values, scale, self._stats)
