"""What all schedules share: two methods, one loss, one line that makes the gradient.

A schedule rolls batches out and, once the advantages are known, adds the policy gradient to `.grad`. All of them
add the same gradient; they differ in when the backward runs and in what they hold until then. The hazard is a
graph or a provisional gradient of weights that have moved since: both are stamped with the policy's version, and a
stale one raises. Source: LeanGRPO (arXiv 2609.03528).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from stretto.policy.loss import StepLoss, TrainedStep, step_loss
from stretto.policy.rollout import Batch, Policy, Score, Trajectory

__all__ = ["HeldGradients", "Schedule", "StalePolicyError", "UpdateStats", "make_gradient", "trajectories_of"]


class StalePolicyError(RuntimeError):
    """A graph or provisional gradient made by weights that have changed since, or one that was used already."""


@dataclass
class UpdateStats:
    """What an update saw, summed over its rows and trained steps until `summary`.

    step_gradient: transition -> sum over rows of the norm of the loss's gradient with respect to the velocity.
    """

    clip_range: float
    num_rows: int = 0
    sums: dict[str, Tensor | float] = field(default_factory=dict)
    max_log_prob_difference: Tensor | float = 0.0
    step_gradient: dict[int, Tensor | float] = field(default_factory=dict)
    mended: int = 0
    wasted_backwards: int = 0
    skipped_backwards: int = 0

    def add_loss(self, loss: StepLoss) -> None:
        """Take ratio, clip fraction, approximate KL and KL of a step's rows."""
        self.num_rows += len(loss.ratio)
        difference, ratio = loss.log_prob_difference, loss.ratio
        self._add("ratio", ratio.sum())
        self._add("clip_fraction", ((ratio - 1).abs() > self.clip_range).sum())
        self._add("approximate_kl", (difference.expm1() - difference).sum())
        if loss.kl is not None:
            self._add("kl", loss.kl.detach().sum())
        largest = difference.abs().max()
        self.max_log_prob_difference = torch.maximum(
            largest, torch.as_tensor(self.max_log_prob_difference).to(largest)
        )

    def add_cotangent(self, step: TrainedStep, norms: Tensor) -> None:
        """Take the norms (B,) of the gradient with respect to the velocity at each row of `step`."""
        for i in step.steps.unique().tolist():
            total = norms[(step.steps == i).to(norms.device)].sum()
            self.step_gradient[i] = self.step_gradient.get(i, 0.0) + total

    def merge(self, other: "UpdateStats") -> None:
        """Add another update's sums to these."""
        self.num_rows += other.num_rows
        for name, value in other.sums.items():
            self._add(name, value)
        mine, theirs = (
            torch.as_tensor(self.max_log_prob_difference),
            torch.as_tensor(other.max_log_prob_difference),
        )
        self.max_log_prob_difference = torch.maximum(mine.to(theirs), theirs)
        for i, total in other.step_gradient.items():
            self.step_gradient[i] = self.step_gradient.get(i, 0.0) + total
        self.mended += other.mended
        self.wasted_backwards += other.wasted_backwards
        self.skipped_backwards += other.skipped_backwards

    def summary(self) -> dict[str, float | dict[str, float]]:
        """Means over rows, the largest log-prob difference, and each step's share of the gradient."""
        rows = max(self.num_rows, 1)
        means = {name: float(value) / rows for name, value in self.sums.items()}
        total = sum(float(v) for v in self.step_gradient.values()) or 1.0
        share = {str(i): float(v) / total for i, v in sorted(self.step_gradient.items())}
        return {
            **means,
            "max_log_prob_difference": float(self.max_log_prob_difference),
            "gradient_share": share,
            "mended": self.mended,
            "wasted_backwards": self.wasted_backwards,
            "skipped_backwards": self.skipped_backwards,
        }

    def _add(self, name: str, value: Tensor | float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value


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

    @abstractmethod
    def rollout(self, batch: Batch, score: Score) -> Trajectory:
        """Roll B samples out and score them.

        `score(batch, latents)` gives (B, K) raw rewards of the latents at sigma 0. The result holds what `update`
        needs. `.grad` is left as it was.
        """

    @abstractmethod
    def update(self, trajectories: Sequence[Trajectory], advantages: Sequence[Tensor], scale: float) -> UpdateStats:
        """Add scale * sum over rows and trained steps of (policy loss + kl_beta * KL)'s gradient to `.grad`.

        `advantages[i]`: (B,) float64 for the rows of `trajectories[i]`. Takes every trajectory rolled out since the
        last update, once; raises `StalePolicyError` where the weights have moved meanwhile.
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
    with policy.stopwatch.phase("backward"):
        (scale * total).backward()


def trajectories_of(trajectories: Sequence[Trajectory]) -> int:
    """How many samples the trajectories hold together."""
    return sum(len(t.batch.samples) for t in trajectories)
