"""Late hybrid: hybrid over many ranks. The first trained steps are late's, the graphs of the last k are kept.

What the first steps made travels while the last ones are rolled out, and is weighted by its owners. The kept graphs
are backpropagated when the advantages are known, into a gradient apart that has its advantages in it: it leaves once
for all samples, as a round of weight 1, and nothing hides that. The hazard is late's order, also of what is apart:
every rank sends it, whatever its own samples are worth. Source: this library's.
"""

from torch import Tensor

from stretto.policy.advantage import AdvantageRule
from stretto.policy.loss import TrainedStep
from stretto.policy.rollout import Batch, Policy, Score, Trajectory
from stretto.policy.schedules.kept_graphs import KeptGraphs, RetainsLast
from stretto.policy.schedules.late import Late, Reducer
from stretto.policy.schedules.reweight import Provisional

__all__ = ["LateHybrid"]


class LateHybrid(RetainsLast, Late):
    """T forwards, |S| backwards a sample; the last `retain_last` backwards wait for the advantages.

    Arguments are late's. Beside late's rounds a rank holds k graphs a sample and one gradient, that of the graphs
    which were used while other rollouts were in flight. Where every trained step is retained rounds are zeros, and
    are sent: take `Retain` instead.
    """

    name = "hybrid"

    def __init__(
        self,
        policy: Policy,
        reducer: Reducer,
        rule: AdvantageRule,
        num_samples: int,
        *,
        ranks_per_sample: int = 1,
        retain_last: int = 1,
    ) -> None:
        super().__init__(policy, reducer, rule, num_samples, ranks_per_sample=ranks_per_sample)
        self.graphs = KeptGraphs(policy, retain_last)

    def trained(self, index: int, step: TrainedStep, velocity: Tensor, batch: Batch) -> None:
        """As late's before the last steps, whose graphs are kept."""
        if index == self._num_provisional(batch) == 0:  # nothing provisional, and every rank ends this round
            self.reducer.finish()
        super().trained(index, step, velocity, batch)

    def _num_provisional(self, batch: Batch) -> int:
        return self.graphs.first(batch)

    def _rollout(self, batch: Batch, score: Score) -> Trajectory:
        trajectory = super()._rollout(batch, score)
        part = Provisional([], slice(0, 1))
        self._in_flight += self.graphs.hand_over(part, 1)
        trajectory.kept = [part]
        return self._flown(trajectory)

    def _credit(self, trajectory: Trajectory, part: Provisional, values: Tensor, scale: float) -> None:
        """Backpropagate the kept graphs, apart from every sample's gradient and from the KL's."""
        with self.reducer.aside("retained"):
            self.graphs.backpropagate(trajectory, part, values, scale, self._stats)

    def _asides(self, scale: float) -> dict[str, float]:
        return {**super()._asides(scale), "retained": 1.0}
