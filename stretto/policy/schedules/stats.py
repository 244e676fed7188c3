"""What an update saw of its rows: ratios, KL, and how the gradient is shared among the trained steps.

Sums stay tensors until `summary`, so that no step waits for the device.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from stretto.policy.loss import StepLoss, TrainedStep

__all__ = ["UpdateStats"]

UNMOVED = {"ratio": 1.0, "clip_fraction": 0.0, "approximate_kl": 0.0}


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
        if not len(loss.ratio):
            return
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
        """Means over rows, the largest log-prob difference, and each step's share of the gradient.

        Where no row was run, as some schedules do when nothing teaches, the means are those of a policy that has not
        moved, which is what the other schedules then see.
        """
        rows = max(self.num_rows, 1)
        means = UNMOVED | {name: float(value) / rows for name, value in self.sums.items()}
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
