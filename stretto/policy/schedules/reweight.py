"""Reweight: backpropagate each trained step at once with a provisional advantage of 1, and scale later.

Nothing is run twice and no graph outlives its step: until the advantages are known each sample holds one gradient.
Several samples share a forward and a backward where `PerSampleGradients` covers every trained weight (batched
reweight); where it does not, they run one after another, and that is said. KL's gradient carries no advantage: it
costs a second vector-Jacobian product, into an accumulator of its own. The scaling happens after the backward,
where native's happens before: equal to rounding, not to the bit. Source: LeanGRPO (arXiv 2609.03528), Reweight.
"""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stretto.policy.loss import TrainedStep, step_loss
from stretto.policy.noise import SampleKey
from stretto.policy.per_sample import PerSampleGradients
from stretto.policy.rollout import Batch, Policy, Score, Trajectory, roll
from stretto.policy.schedules.base import HeldGradients, Schedule, StalePolicyError
from stretto.policy.schedules.stats import UpdateStats

__all__ = ["Provisional", "Reweight"]


@dataclass
class Provisional:
    """What one forward's rows left: gradients with advantage 1, summed over their trained steps.

    gradients: (b, *parameter.shape) for each parameter, or None where none arrived.
    rows: the rows of the trajectory that they belong to.
    graphs: velocities of the last trained steps with their graphs, graph_bytes what those keep (hybrid).
    """

    gradients: list[Tensor | None]
    rows: slice
    graphs: list[Tensor] = field(default_factory=list)
    graph_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Size of what is held."""
        return sum(g.numel() * g.element_size() for g in self.gradients if g is not None) + self.graph_bytes


class Reweight(Schedule):
    """T forwards, |S| of them with gradient, and |S| backwards a sample, each at once.

    Holds one full gradient for every sample between its rollout and its update.
    """

    name = "reweight"

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.per_sample = PerSampleGradients(policy.module, policy.parameters)
        self._single = HeldGradients(self.parameters)
        self._kl = HeldGradients(self.parameters)
        self._stats = self.stats()
        self._keys: set[SampleKey] = set()
        self._version = 0
        self._in_flight = 0
        self._has_warned = False

    @property
    def is_batched(self) -> bool:
        """Whether several samples can share a forward: every trained weight has a per-sample gradient."""
        return not self.per_sample.uncovered

    def during(self, index: int, batch: Batch) -> AbstractContextManager[Any]:
        """Every trained step's forward has a gradient; a batch's layers keep its samples apart."""
        return torch.enable_grad() if len(batch.samples) == 1 else self.per_sample.active(len(batch.samples))

    def trained(self, index: int, step: TrainedStep, velocity: Tensor, batch: Batch) -> None:
        """Backpropagate at once with advantage 1; the KL apart."""
        policy = self.policy
        loss = step_loss(policy.process, policy.objective, step, velocity, torch.ones(len(velocity)))
        self._stats.add_loss(loss)
        hook = velocity.register_hook(lambda g: setattr(step, "cotangent", g.flatten(1).norm(dim=1)))
        with policy.stopwatch.phase("backward"):
            self._backpropagate(loss.policy.sum(), len(velocity), retain_graph=loss.kl is not None)
            hook.remove()
            if loss.kl is not None:
                with self._kl.receiving():
                    loss.kl.sum().backward()

    def prepare(self, batch: Batch) -> None:
        """Try a batch's gradients against those of its first and last row alone; where they differ, run one by one.

        Catches what no look at the layers can: rows of a trained layer that are not samples in order.
        """
        if len(batch.samples) > 1 and self.is_batched:
            with self.resetting():
                self.per_sample.uncovered = self._mixed_up(batch)

    def rollout(self, batch: Batch, score: Score) -> Trajectory:
        """See `Schedule.rollout`; runs samples one by one where their gradients cannot be told apart."""
        with self.resetting():
            if len(batch.samples) == 1 or self.is_batched:
                return self._rollout(batch, score)
            self._say_one_by_one()
            return _joined(batch, [self._rollout(batch.row(i), score) for i in range(len(batch.samples))])

    def update(self, trajectories: Sequence[Trajectory], advantages: Sequence[Tensor], scale: float) -> UpdateStats:
        """See `Schedule.update`; one weighted sum of the held gradients."""
        with self.resetting(), self.policy.stopwatch.phase("update"):
            self._require_current(trajectories)
            self._use(trajectories, advantages, scale)
            return self._settle(trajectories, scale)

    def reset(self) -> None:
        """See `Schedule.reset`."""
        super().reset()
        self._single.take()
        self._kl.take()
        self.per_sample.take(self.parameters)
        self._keys.clear()
        self._stats, self._in_flight = self.stats(), 0

    def _rollout(self, batch: Batch, score: Score) -> Trajectory:
        self._take_keys(batch)
        version = self.policy.version
        latents, steps = roll(self.policy, batch, self)
        is_single = len(batch.samples) == 1
        gradients = as_row(self._single.take()) if is_single else self.per_sample.take(self.parameters)
        provisional = Provisional(gradients, slice(0, len(batch.samples)))
        self._in_flight += provisional.num_bytes
        return self._flown(
            Trajectory(batch, latents, steps, score(batch, latents), version, [provisional], self._collection)
        )

    def _take_keys(self, batch: Batch) -> None:
        """Note which samples are in flight: each at most once, and all of one policy version."""
        if self._keys and self._version != self.policy.version:
            raise StalePolicyError(
                f"{self.name}: {len(self._keys)} samples that were rolled out before the weights moved were never "
                "updated; give all to update before the optimizer steps, or reset"
            )
        for key in batch.samples:
            if key in self._keys:
                raise ValueError(f"{self.name}: {key} was rolled out already; update or reset before it is again")
        self._keys.update(batch.samples)

    def _flown(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory, noted as the newest in flight."""
        self._version = trajectory.policy_version
        self.held_bytes = max(self.held_bytes, self._in_flight)
        return trajectory

    def _backpropagate(self, loss: Tensor, num_rows: int, *, retain_graph: bool = False) -> None:
        """A backward into the gradients of one sample, or of each sample of a batch; `.grad` is left alone."""
        if num_rows == 1:
            with self._single.receiving():
                loss.backward(retain_graph=retain_graph)
            return
        with self.per_sample.collecting(), self._single.receiving():
            loss.backward(retain_graph=retain_graph)
        leaked = [name for name, g in zip(self.policy.parameters, self._single.take()) if g is not None]
        if leaked:
            raise ValueError(
                f"{leaked[0]} is used in other ways than by its own layer ({len(leaked)} such parameters), so its "
                "gradient cannot be told apart by sample; set sampling.samples_per_forward = 1"
            )

    def _mixed_up(self, batch: Batch) -> list[str]:
        """Names of the parameters whose gradient of the first or last row differs from that of the row alone."""
        policy, last = self.policy, len(batch.samples) - 1
        is_exact = policy.autocast is None and all(p.dtype.itemsize >= 4 for p in policy.module.parameters())
        together = self._probe(batch)
        names: list[str] = []
        for row in (0, last):
            alone = self._probe(batch.row(row))
            for name, batched, single in zip(policy.parameters, together, alone):
                if batched is None or single is None:
                    differs = batched is not single
                else:
                    difference, size = (batched[row] - single[0]).norm(), single.norm()
                    differs = bool(difference > (1e-3 if is_exact else 0.2) * size + 1e-12)
                if differs:
                    names.append(name)
        return list(dict.fromkeys(names))

    def _probe(self, batch: Batch) -> list[Tensor | None]:
        """Gradients (b, *shape) of a made-up loss of the velocity at the first trained step."""
        steps = torch.full((len(batch.samples),), batch.trained_steps[0])
        latents = self.policy.noise.initial(batch.samples).to(self.policy.device)
        with self.during(0, batch):
            velocity = self.policy.forward(latents, steps, batch.condition)
            self._backpropagate((velocity * latents).sum(), len(batch.samples))
        is_single = len(batch.samples) == 1
        return as_row(self._single.take()) if is_single else self.per_sample.take(self.parameters)

    def _require_current(self, trajectories: Sequence[Trajectory]) -> None:
        """Raise, before `.grad` is touched, unless all of these can be used."""
        for trajectory in trajectories:
            self.require_current(trajectory)

    def _use(self, trajectories: Sequence[Trajectory], advantages: Sequence[Tensor], scale: float) -> None:
        """Credit and count what was kept of these trajectories, which then have it no more."""
        for trajectory, values in zip(trajectories, advantages):
            kept, trajectory.kept = trajectory.kept, None
            for part in kept:
                self._in_flight -= part.num_bytes
                self._credit(trajectory, part, values[part.rows], scale)
            self._charge(trajectory, values, scale)

    def _credit(self, trajectory: Trajectory, part: Provisional, values: Tensor, scale: float) -> None:
        """Give one forward's rows their advantages (b,)."""
        add_weighted(self.parameters, part.gradients, values * scale)

    def _charge(self, trajectory: Trajectory, values: Tensor, scale: float) -> None:
        """Count each step's gradient, and the backwards that a zero advantage wasted."""
        weights = (values * scale).abs()
        for step in trajectory.steps:
            if step.cotangent is not None:
                self._stats.add_cotangent(step, step.cotangent * weights.to(step.cotangent))
        num_reweighted = sum(step.cotangent is not None for step in trajectory.steps)
        self._stats.wasted_backwards += int((values == 0).sum()) * num_reweighted

    def _settle(self, trajectories: Sequence[Trajectory], scale: float) -> UpdateStats:
        """Add the KL's gradient, unscaled by any advantage; these trajectories are in flight no more."""
        add_weighted(self.parameters, as_row(self._kl.take()), scalar(self.policy.objective.kl_beta * scale))
        return self._land(trajectories)

    def _land(self, trajectories: Sequence[Trajectory]) -> UpdateStats:
        for trajectory in trajectories:
            self._keys.difference_update(trajectory.batch.samples)
        stats, self._stats = self._stats, self.stats()
        return stats

    def _say_one_by_one(self) -> None:
        if not self._has_warned:
            names = ", ".join(self.per_sample.uncovered[:3])
            warnings.warn(
                f"{self.name} runs samples one by one: no per-sample gradient for {names} "
                f"({len(self.per_sample.uncovered)} parameters)",
                stacklevel=3,
            )
            self._has_warned = True


def add_weighted(
    parameters: Sequence[torch.nn.Parameter], gradients: Sequence[Tensor | None], weights: Tensor
) -> None:
    """p.grad += sum over m of weights[m] * gradients[m], for (b, *p.shape) gradients and (b,) weights."""
    for parameter, gradient in zip(parameters, gradients):
        if gradient is None:
            continue
        if len(weights) == 1 and parameter.grad is not None:
            parameter.grad.add_(gradient[0], alpha=float(weights))
            continue
        total = torch.tensordot(weights.to(gradient), gradient, dims=1).to(parameter.dtype)
        parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)


def _joined(batch: Batch, parts: list[Trajectory]) -> Trajectory:
    """The trajectories of single rows as one of the whole batch."""
    steps = []
    for records in zip(*(part.steps for part in parts)):
        step = TrainedStep.cat(list(records))
        cotangents = [r.cotangent for r in records if r.cotangent is not None]
        step.cotangent = torch.cat(cotangents) if cotangents else None
        steps.append(step)
    for i, part in enumerate(parts):
        for provisional in part.kept:
            provisional.rows = slice(i, i + 1)
    kept = [provisional for part in parts for provisional in part.kept]
    latents = torch.cat([p.latents for p in parts])
    return Trajectory(batch, latents, steps, _Joined(parts), parts[-1].policy_version, kept, parts[0].collection)


@dataclass
class _Joined:
    """The rewards of several trajectories as one, when they are asked for."""

    parts: list[Trajectory]

    def result(self) -> Tensor:
        """See `Scored`."""
        return torch.cat([part.rewards for part in self.parts])


def as_row(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients of one sample as (1, *shape)."""
    return [None if g is None else g.unsqueeze(0) for g in gradients]


def scalar(value: float) -> Tensor:
    """One weight, (1,) float64."""
    return torch.tensor([value], dtype=torch.float64)
