"""Two-sum: fold each sample's provisional gradient as soon as its reward is known.

A group-normalised advantage is affine in the reward, A_m = w * (r_m - mean) / s, so two sums suffice however many
samples a group has: S0 = sum G_m and S1 = sum (r_m - c) * G_m, with c the group's first reward (without it rewards
of 1e5 +- 1e-2 lose everything to cancellation). Then sum A_m G_m = w/s * (S1 - (mean - c) * S0). J separately
normalised rewards take J + 1 sums. Scalars are float64, sums at least float32. The hazard is the clamp: whether it
is active is known only after folding, and a clamped sample is mended exactly by one native recompute of it with
weight clamp(A) - A. Rank-based, best-of-n and per-step advantages are not affine and are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stretto.policy.advantage import AdvantageRule
from stretto.policy.rollout import Batch, Policy, Score, Trajectory
from stretto.policy.schedules.native import replay
from stretto.policy.schedules.reweight import Reweight, add_weighted, as_row, scalar
from stretto.policy.schedules.stats import UpdateStats

__all__ = ["TwoSum"]

GradientSum = list[Tensor | None]


@dataclass
class _Group:
    """The sums of one prompt group in flight."""

    num_channels: int
    num_parameters: int
    offset: Tensor | None = None
    rewards: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.zeroth: GradientSum = [None] * self.num_parameters
        self.first: list[GradientSum] = [[None] * self.num_parameters for _ in range(self.num_channels)]

    @property
    def sums(self) -> list[list[GradientSum]]:
        """All of its sums."""
        return [[self.zeroth], self.first]


class TwoSum(Reweight):
    """Reweight whose memory does not grow with the number of samples.

    rule: the advantage rule, whose affine form is folded by. num_samples: M, the samples of one prompt group.
    """

    name = "two_sum"

    def __init__(self, policy: Policy, rule: AdvantageRule, num_samples: int) -> None:
        if not rule.is_affine:
            raise ValueError(
                f"two_sum folds gradients before the group is known, and best-of-n (best = {rule.best}, worst = "
                f"{rule.worst}) is not affine in the reward; use schedule.name = reweight or retain"
            )
        super().__init__(policy)
        self.rule, self.num_samples = rule, num_samples
        self._groups: dict[tuple[int, int], _Group] = {}
        num_channels = len(rule.weights) if rule.rewards == "normalized" else 1
        self._totals: list[GradientSum] = [[None] * len(self.parameters) for _ in range(num_channels)]

    def update(self, trajectories: Sequence[Trajectory], advantages: Sequence[Tensor], scale: float) -> UpdateStats:
        """See `Schedule.update`; every prompt group must be complete."""
        with self.resetting(), self.policy.stopwatch.phase("update"):
            self._require_current(trajectories)
            for key in (key[:2] for trajectory in trajectories for key in trajectory.batch.samples):
                if key in self._groups:
                    raise ValueError(f"two_sum: prompt group {key} is incomplete; roll it out whole")
            for trajectory, values in zip(trajectories, advantages):
                trajectory.kept = None
                self._charge(trajectory, values, scale)
            affine, per_channel = self._affine(trajectories)
            for total, weight in zip(self._totals, per_channel.tolist()):
                add_weighted(self.parameters, as_row(total), scalar(weight * scale))
                total[:] = [None] * len(total)
            self._mend(trajectories, advantages, affine, scale)
            self._in_flight = self._held()
            return self._settle(trajectories, scale)

    def _rollout(self, batch: Batch, score: Score) -> Trajectory:
        trajectory = super()._rollout(batch, score)
        (provisional,), trajectory.kept = trajectory.kept, []
        with self.policy.stopwatch.phase("update"):
            self._fold(batch, provisional.gradients, self.rule.channels(trajectory.rewards))
        self._in_flight = self._held()
        return trajectory

    def _held(self) -> int:
        """Bytes of all sums in flight."""
        return _num_bytes(self._totals, *(sums for g in self._groups.values() for sums in g.sums))

    def reset(self) -> None:
        """See `Schedule.reset`."""
        super().reset()
        self._groups.clear()
        for total in self._totals:
            total[:] = [None] * len(total)

    def _fold(self, batch: Batch, gradients: Sequence[Tensor | None], channels: Tensor) -> None:
        """Add the rows' gradients to the sums of their groups; `channels` is (B, J) float64."""
        keys = [key[:2] for key in batch.samples]
        for key in dict.fromkeys(keys):
            rows = torch.tensor([i for i, k in enumerate(keys) if k == key])
            group = self._groups.setdefault(key, _Group(channels.shape[1], len(self.parameters)))
            values = channels[rows]
            if group.offset is None:
                group.offset = values[0]
            group.rewards.append(values)
            own = [None if g is None else g[rows.to(g.device)] for g in gradients]
            fold(group.zeroth, own, torch.ones(len(rows), dtype=torch.float64))
            for j, first in enumerate(group.first):
                fold(first, own, values[:, j] - group.offset[j])
            if sum(len(r) for r in group.rewards) == self.num_samples:
                self._finish(self._groups.pop(key))

    def _finish(self, group: _Group) -> None:
        """Fold a complete group into the totals, divided by its deviation unless that is global."""
        channels, offset = torch.cat(group.rewards), group.offset
        assert offset is not None
        advantages = self._channel_rule()(channels.unsqueeze(0))
        for j, (total, first) in enumerate(zip(self._totals, group.first)):
            coefficient = float(advantages.coefficient[0, j])
            if coefficient == 0:
                continue
            weight = 1.0 if self.rule.std == "global" else coefficient
            shift = float(advantages.mean[0, j] - offset[j])
            fold(total, as_row(first), scalar(weight))
            fold(total, as_row(group.zeroth), scalar(-shift * weight))

    def _channel_rule(self) -> AdvantageRule:
        """The rule over channels: what is left to do once rewards are channels."""
        weights = self.rule.weights if self.rule.rewards == "normalized" else (1.0,)
        return AdvantageRule(self.rule.std, self.rule.unbiased, self.rule.clamp, self.rule.rewards, weights)

    def _affine(self, trajectories: Sequence[Trajectory]) -> tuple[list[Tensor], Tensor]:
        """The unclamped advantages of every trajectory's rows, and the factor of each total (J,)."""
        rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for t, trajectory in enumerate(trajectories):
            for i, key in enumerate(trajectory.batch.samples):
                rows.setdefault(key[:2], []).append((t, i))
        rewards = torch.stack([torch.stack([trajectories[t].rewards[i] for t, i in r]) for r in rows.values()])
        advantages = self.rule(rewards)
        affine = [torch.zeros(len(t.batch.samples), dtype=torch.float64) for t in trajectories]
        for group, values in zip(rows.values(), advantages.affine):
            for (t, i), value in zip(group, values):
                affine[t][i] = value
        factors = torch.ones(len(self._totals), dtype=torch.float64)
        if self.rule.std == "global":
            largest = advantages.coefficient.abs().argmax(dim=0, keepdim=True)  # groups without spread have 0
            factors = advantages.coefficient.gather(0, largest)[0]
        return affine, factors

    def _mend(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Sequence[Tensor],
        affine: list[Tensor],
        scale: float,
    ) -> None:
        """Run the clamped samples again natively, with what the clamp took from them."""
        for trajectory, values, folded in zip(trajectories, advantages, affine):
            for i in ((values - folded).abs() > 1e-9).nonzero().flatten().tolist():
                row = torch.tensor([i])
                self._stats.mended += 1
                for step in trajectory.steps:
                    stored = step.rows(row.to(step.latents.device))
                    condition = trajectory.batch.row(i).condition
                    rest = values[row] - folded[row]
                    replay(self.policy, stored, condition, rest, scale, self._stats, with_kl=False)


def fold(into: GradientSum, gradients: Sequence[Tensor | None], weights: Tensor) -> None:
    """into += sum over m of weights[m] * gradients[m], in at least float32; gradients are (b, ...)."""
    for i, gradient in enumerate(gradients):
        if gradient is None:
            continue
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        total = torch.tensordot(weights.to(wide), wide, dims=1)
        into[i] = total if (held := into[i]) is None else held.add_(total)


def _num_bytes(*sums: list[GradientSum]) -> int:
    return sum(g.numel() * g.element_size() for group in sums for total in group for g in total if g is not None)
