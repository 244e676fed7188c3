"""Late: reweight whose gradients are on their way to their owners before anybody knows what they are worth.

Each sample is backpropagated with advantage 1. Its last trained step's backward sends, and what it sends travels
while the sample is decoded and judged; when the advantages are known the owner of each shard weights what came from
every rank, and nothing is left to send. Where one prompt group takes several rounds of samples, what came is folded
into sharded sums as each round's rewards come in, as two-sum does, so that it does not pile up. The hazard is order:
every rank ends as many samples as any other, in the same order, and one that has none calls `idle`. Source: LeanGRPO
(arXiv 2609.03528), Reweight; the late-bound reduction and the sharded sums are this library's.
"""

import math
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.policy.advantage import AdvantageRule
from stretto.policy.loss import TrainedStep, step_loss
from stretto.policy.rollout import Batch, Policy, Score, Trajectory, roll
from stretto.policy.schedules.reweight import Reweight
from stretto.policy.schedules.stats import UpdateStats

__all__ = ["Late", "Reducer"]


class Reducer(Protocol):
    """What sums gradients over ranks when their weights are known; each rank has one sample a round."""

    @property
    def world_size(self) -> int:
        """As many columns have weights."""

    def accumulate(self) -> AbstractContextManager[Any]:
        """Within, backwards only add to the local gradient of the present sample."""

    def aside(self, name: str) -> AbstractContextManager[Any]:
        """Within, backwards add to a local gradient of that name, apart from every sample's."""

    def finish(self, *, aside: str | None = None) -> None:
        """End a sample's backwards, or those aside of a name: its pieces are on their way. No gradient is zeros."""

    def settle(self, weight: Tensor) -> None:
        """Weights (num_backwards, world_size) float64 of all backwards that were finished, oldest first."""

    def fold(self, weights: Tensor) -> None:
        """Fold the oldest waiting backward into sums, one for each row of weights (num_sums, world_size)."""

    def combine(self, coefficients: Tensor) -> None:
        """Settle the combination of the sums, coefficients (num_sums,)."""

    def deliver(self) -> None:
        """Make what was settled the gradient of the parameters or of the own shards."""

    def reset(self) -> None:
        """Forget what was not settled."""


class Late(Reweight):
    """Reweight over many ranks; what it settles becomes the gradient when `reducer.deliver()` is called.

    reducer: reduces the gradients of `policy.parameters`. rule, num_samples: of the advantages, for `folds`.
    ranks_per_sample: so many consecutive ranks of the reducer share a sample, each with a part of its gradient.
    Between rollout and update a rank holds one gradient for each round, in pieces, or, where it folds, one and
    J + 1 shards. Samples of a batch run one after another. `.grad` belongs to the reducer.
    """

    def __init__(
        self,
        policy: Policy,
        reducer: Reducer,
        rule: AdvantageRule,
        num_samples: int,
        *,
        ranks_per_sample: int = 1,
    ) -> None:
        super().__init__(policy)
        self.ranks_per_sample = ranks_per_sample
        self.reducer, self.rule, self.num_samples = reducer, rule, num_samples
        self._num_rounds = 0
        self._folded: list[tuple[Tensor, Tensor]] = []
        self._offset: Tensor | None = None
        self._gradient_bytes = sum(p.numel() * p.element_size() for p in self.parameters)

    @property
    def is_batched(self) -> bool:
        """Never: samples go to their owners one by one."""
        return False

    @property
    def folds(self) -> bool:
        """Whether `fold_round` must be called for every round: a group has several, and its advantages fold.

        They do where they are affine in the reward, normalised within the group, and no clamp can be active:
        |z| is at most sqrt(M - 1), or (M - 1) / sqrt(M) with the unbiased deviation.
        """
        rule, m = self.rule, self.num_samples
        if not rule.is_affine or rule.std != "group" or m * self.ranks_per_sample <= self.reducer.world_size:
            return False
        largest = (m - 1) / math.sqrt(m) if rule.unbiased else math.sqrt(m - 1)
        total = sum(map(abs, rule.weights)) if rule.rewards == "normalized" else 1.0
        return largest * total <= rule.clamp

    def prepare(self, batch: Batch) -> None:
        """Nothing to try: samples run one by one."""

    def trained(self, index: int, step: TrainedStep, velocity: Tensor, batch: Batch) -> None:
        """Backpropagate at once with advantage 1, and at the last such step send; the KL apart."""
        policy, is_last = self.policy, index == self._num_provisional(batch) - 1
        loss = step_loss(policy.process, policy.objective, step, velocity, torch.ones(len(velocity)))
        self._stats.add_loss(loss)
        hook = velocity.register_hook(lambda g: setattr(step, "cotangent", g.flatten(1).norm(dim=1)))
        with policy.stopwatch.phase("backward"):
            with nullcontext() if is_last else self.reducer.accumulate():
                loss.policy.sum().backward(retain_graph=loss.kl is not None)
            hook.remove()
            if is_last:
                self.reducer.finish()
            if loss.kl is not None:
                with self.reducer.aside("kl"):
                    loss.kl.sum().backward()

    def idle(self) -> None:
        """This rank has no sample in this round: what it sends is zeros."""
        self.reducer.finish()
        self._end_round()

    def fold_round(self, rewards: Tensor, has_sample: Tensor) -> None:
        """Fold the oldest round that waits; where `folds` is true, once for every round, before `update`.

        rewards: (world_size, K) raw, float64, the same on every rank. has_sample: (world_size,) bool, False for
        ranks that were idle. A prompt group is the rounds from one update to the next.
        """
        with self.resetting(), self.policy.stopwatch.phase("update"):
            channels = self.rule.channels(rewards)
            self._folded.append((rewards.double(), has_sample))
            offset = channels[has_sample][0] if self._offset is None else self._offset
            self._offset = offset
            rows = torch.cat([torch.ones_like(channels[:, :1]), channels - offset], dim=1)
            self.reducer.fold(torch.where(has_sample.unsqueeze(1), rows, 0.0).T)
            self._in_flight -= self._gradient_bytes

    def update(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Sequence[Tensor],
        scale: float,
        rounds: Tensor | None = None,
    ) -> UpdateStats:
        """See `Schedule.update`; `.grad` follows with `reducer.deliver()`.

        trajectories, advantages: this rank's own, for what is logged of them. rounds: (num_rounds, world_size)
        float64, what every rank's sample of each of the oldest rounds is worth (its advantage; 0 where it was
        idle), the same on every rank. One rank may leave them out.
        """
        with self.resetting(), self.policy.stopwatch.phase("update"):
            self._require_current(trajectories)
            if rounds is None:
                rounds = torch.cat([values.double() for values in advantages]).unsqueeze(1)
            self._require_rounds(rounds)
            self._use(trajectories, advantages, scale)
            self._settle_rounds(rounds, scale)
            self._num_rounds -= len(rounds)
            self._in_flight -= 0 if self._folded else len(rounds) * self._gradient_bytes
            self._folded, self._offset = [], None
            return self._land(trajectories)

    def reset(self) -> None:
        """See `Schedule.reset`; every rank must come here."""
        super().reset()
        self._num_rounds = 0
        self._folded, self._offset = [], None
        self.reducer.reset()

    def _num_provisional(self, batch: Batch) -> int:
        """How many trained steps are backpropagated in the rollout: the first ones."""
        return len(batch.trained_steps)

    def _rollout(self, batch: Batch, score: Score) -> Trajectory:
        self._take_keys(batch)
        version = self.policy.version
        latents, steps = roll(self.policy, batch, self)
        self._end_round()
        return self._flown(Trajectory(batch, latents, steps, score(batch, latents), version, [], self._collection))

    def _end_round(self) -> None:
        self._num_rounds += 1
        self._in_flight += self._gradient_bytes
        self.held_bytes = max(self.held_bytes, self._in_flight)

    def _settle_rounds(self, rounds: Tensor, scale: float) -> None:
        """Weights for all that waits: the rounds, unless they were folded, and what is apart from them.

        What is apart leaves when it is whole: with the newest round, so that it waits behind all of them.
        """
        waiting = rounds[:0] if self._folded else scale * rounds
        if len(rounds) == self._num_rounds:
            for name, worth in self._asides(scale).items():
                self.reducer.finish(aside=name)
                waiting = torch.cat([waiting, rounds.new_full((1, rounds.shape[1]), worth)])
        if self._folded:
            self.reducer.combine(scale * self._coefficients(rounds))
        if len(waiting):
            self.reducer.settle(waiting)

    def _asides(self, scale: float) -> dict[str, float]:
        """What gradients apart from the rounds' are worth, by name, in the order in which they leave."""
        kl_beta = self.policy.objective.kl_beta
        return {"kl": kl_beta * scale} if kl_beta else {}

    def _coefficients(self, rounds: Tensor) -> Tensor:
        """What the sums of a group are worth, (J + 1,): sum A_m G_m = sum_j s_j (S_j - (mean_j - c_j) S_0)."""
        assert self._offset is not None
        if not bool(rounds.any()):  # without spread, or given up
            return torch.zeros(1 + len(self._offset), dtype=torch.float64)
        rewards, has_sample = (torch.stack(parts)[:, :: self.ranks_per_sample] for parts in zip(*self._folded))
        rounds = rounds[:, :: self.ranks_per_sample]
        result = self.rule(rewards[has_sample].unsqueeze(0))
        assert torch.allclose(rounds[has_sample], result.affine[0], rtol=1e-6, atol=1e-6), "advantages do not fold"
        slope = result.coefficient[0]
        return torch.cat([-(slope * (result.mean[0] - self._offset)).sum().unsqueeze(0), slope])

    def _require_rounds(self, rounds: Tensor) -> None:
        if len(rounds) > self._num_rounds:
            raise ValueError(f"weights of {len(rounds)} rounds, but {self._num_rounds} were rolled out or idle")
        if self._folded and len(self._folded) != len(rounds):
            raise ValueError(f"{len(self._folded)} of {len(rounds)} rounds were folded; fold all, or none")

    def _say_one_by_one(self) -> None:
        if not self._has_warned:
            warnings.warn(
                "late reduction runs samples one by one: each leaves for its owners by itself; set "
                "sampling.samples_per_forward = 1",
                stacklevel=3,
            )
            self._has_warned = True
