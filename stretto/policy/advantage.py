"""From rewards to advantages: affine in the reward within a group, then clamped, then selected.

A rule first turns the K rewards of a sample into J channels (one weighted sum, or each reward on its own) and
gives every prompt group one affine map, A_m = sum_j coefficient_j * (channel_mj - mean_j). That form is public
because the two-sum schedule folds gradients by it before the group is complete. All in float64. The hazard is a
group without spread: its coefficient is exactly 0, whatever rounding its mean has. Source: GRPO; Flow-GRPO.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["STD_EPSILON", "AdvantageRule", "Advantages"]

STD_EPSILON = 1e-4


@dataclass(frozen=True)
class Advantages:
    """Advantages of G prompt groups with M samples each, and how they came about; all float64.

    values: (G, M), clamped and selected; what the loss uses.
    affine: (G, M), before the clamp and the selection.
    mean, coefficient: (G, J), the affine map of each group.
    zero_spread: (G,) bool, groups whose advantages are all exactly 0 for lack of spread.
    """

    values: Tensor
    affine: Tensor
    mean: Tensor
    coefficient: Tensor
    zero_spread: Tensor


@dataclass(frozen=True)
class AdvantageRule:
    """(r - mean) / (std + 1e-4), clamped to +-clamp; see the fields of `stretto.config.Advantage`.

    With `best` and `worst` only the highest and lowest samples of each group keep their advantage; the others get
    exactly 0. Ties go to the earlier sample.
    """

    std: Literal["group", "global"] = "group"
    unbiased: bool = False
    clamp: float = 5.0
    rewards: Literal["weighted_sum", "normalized"] = "weighted_sum"
    weights: tuple[float, ...] = (1.0,)
    best: int = 0
    worst: int = 0

    @property
    def is_affine(self) -> bool:
        """Whether a sample's advantage is affine in its own rewards, given its group's statistics."""
        return not (self.best or self.worst)

    def channels(self, rewards: Tensor) -> Tensor:
        """(..., K) raw rewards to (..., J) channels, float64."""
        rewards = rewards.double()
        if self.rewards == "normalized":
            return rewards
        return (rewards * rewards.new_tensor(self.weights)).sum(dim=-1, keepdim=True)

    def __call__(self, rewards: Tensor) -> Advantages:
        """Advantages of (G, M, K) rewards: G complete prompt groups of M samples."""
        if rewards.ndim != 3 or rewards.shape[1] < 2 or rewards.shape[2] != len(self.weights):
            raise ValueError(
                f"rewards of shape {tuple(rewards.shape)}: expected (groups, samples >= 2, {len(self.weights)})"
            )
        channels = self.channels(rewards)
        mean = channels.mean(dim=1)
        weights = channels.new_tensor(self.weights if self.rewards == "normalized" else (1.0,))
        has_spread = channels.amax(dim=1) > channels.amin(dim=1)
        coefficient = torch.where(has_spread, weights / (self._std(channels) + STD_EPSILON), 0.0)
        affine = (coefficient.unsqueeze(1) * (channels - mean.unsqueeze(1))).sum(dim=-1)
        values = self._select(affine.clamp(-self.clamp, self.clamp))
        return Advantages(values, affine, mean, coefficient, ~has_spread.any(dim=1))

    def _std(self, channels: Tensor) -> Tensor:
        correction = int(self.unbiased)
        if self.std == "group":
            return channels.std(dim=1, correction=correction)
        return channels.flatten(0, 1).std(dim=0, correction=correction).expand(channels.shape[0], -1)

    def _select(self, values: Tensor) -> Tensor:
        if self.is_affine:
            return values
        order = values.argsort(dim=1, descending=True, stable=True)
        kept = torch.cat([order[:, : self.best], order[:, values.shape[1] - self.worst :]], dim=1)
        return torch.zeros_like(values).scatter(1, kept, values.gather(1, kept))
