"""What all schedules share: two methods, one loss, one line that makes the gradient.

A schedule rolls batches out and, once the advantages are known, adds the policy gradient to `.grad`. All of them
add the same gradient; they differ in when the backward runs and in what they hold until then. The hazard is a
graph or a provisional gradient of weights that have moved since: both are stamped with the policy's version, and a
stale one raises. Source: LeanGRPO (arXiv 2609.03528).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from stretto.policy.loss import TrainedStep, step_loss
from stretto.policy.rollout import Batch, Policy, Score, Trajectory
from stretto.policy.schedules.stats import UpdateStats

__all__ = ["HeldGradients", "Schedule", "StalePolicyError", "make_gradient"]


class StalePolicyError(RuntimeError):
    """A graph or provisional gradient made by weights that have changed since, or one that was used already."""


class HeldGradients:
    """Gradients held apart from `.grad`: a backward inside `receiving` adds to them instead."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.values: list[Tensor | None] = [None] * len(self.parameters)

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Swap `.grad` with the held gradients, so that hooks and engines see an ordinary backward."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def take(self) -> list[Tensor | None]:
        """The gradients, which are then held no more."""
        values, self.values = self.values, [None] * len(self.parameters)
        return values

    def _swap(self) -> None:
        for i, parameter in enumerate(self.parameters):
            parameter.grad, self.values[i] = self.values[i], parameter.grad


class Schedule(ABC):
    """When the gradient is made; `rollout` a batch, then `update` with the advantages.

    Attributes:
        name: as in a recipe.
        held_bytes: the most that was held between rollout and update since it was last set to 0: graphs by
            unique saved storages, gradients by their size.
    """

    name: str

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.parameters = list(policy.parameters.values())
        self.held_bytes = 0
        self._collection = 0

    def prepare(self, batch: Batch) -> None:
        """Look at a batch before the first rollout; a schedule may try itself on it. Leaves `.grad` alone."""
        return

    def reset(self) -> None:
        """Forget what was rolled out since the last update. Done by itself when a rollout or an update raises."""
        self._collection += 1

    @contextmanager
    def resetting(self) -> Iterator[None]:
        """Reset where the code inside raises, so that no half of it is left for the next update."""
        try:
            yield
        except BaseException:
            self.reset()
            raise

    @abstractmethod
    def rollout(self, batch: Batch, score: Score) -> Trajectory:
        """Roll B samples out and score them; wherever the weights arrive late, the version is that at its end.

        `score(batch, latents)` gives (B, K) raw rewards of the latents at sigma 0. The result holds what `update`
        needs. `.grad` is left as it was.
        """

    @abstractmethod
    def update(self, trajectories: Sequence[Trajectory], advantages: Sequence[Tensor], scale: float) -> UpdateStats:
        """Add scale * sum over rows and trained steps of (policy loss + kl_beta * KL)'s gradient to `.grad`.

        `advantages[i]`: (B,) float64 for the rows of `trajectories[i]`. Takes whole prompt groups, each trajectory
        once; others may be in flight meanwhile. Raises `StalePolicyError` where the weights have moved since.
        """

    def stats(self) -> UpdateStats:
        """Empty statistics."""
        return UpdateStats(self.policy.objective.clip_range)

    def require_current(self, trajectory: Trajectory) -> None:
        """Raise unless what `trajectory` holds was made by the weights as they are now and was not used yet."""
        if trajectory.policy_version != self.policy.version:
            raise StalePolicyError(
                f"{self.name}: a rollout of policy version {trajectory.policy_version} cannot give the gradient of "
                f"version {self.policy.version}; use it before the optimizer steps, or update it with native"
            )
        if trajectory.kept is None:
            raise StalePolicyError(f"{self.name}: this trajectory's gradient was used already, or never kept")
        if trajectory.collection != self._collection:
            raise StalePolicyError(f"{self.name}: this trajectory was given up by a reset; roll it out again")


def make_gradient(
    policy: Policy,
    step: TrainedStep,
    velocity: Tensor,
    advantages: Tensor,
    scale: float,
    stats: UpdateStats,
    *,
    with_kl: bool = True,
) -> None:
    """Differentiate the loss of B rows of trained steps through `velocity`'s graph, into `.grad`."""
    loss = step_loss(policy.process, policy.objective, step, velocity, advantages)
    total = loss.policy.sum()
    if loss.kl is not None and with_kl:
        total = total + policy.objective.kl_beta * loss.kl.sum()
    stats.add_loss(loss)
    velocity.register_hook(lambda gradient: stats.add_cotangent(step, gradient.flatten(1).norm(dim=1)))
    with policy.stopwatch.phase("backward"), policy.around_backward():
        (scale * total).backward()
