"""One iteration: roll out, score, credit, step.

The learner owns the weights' way through an iteration and nothing on disk. Only the first optimizer step of a
rollout is recompute-free; later ones are native, with the ratio clip. The hazard is the order: every part of a
rollout must be rolled out before the first step moves the weights.
"""

import random
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stretto.build import Assembly
from stretto.config import Config
from stretto.models.ema import Ema
from stretto.policy import Batch, NonFiniteError, Trajectory, fingerprint
from stretto.policy.layout import parts
from stretto.policy.noise import generator
from stretto.policy.schedules import Native, Schedule, UpdateStats
from stretto.record.checkpoint import Checkpoint, Checkpoints
from stretto.rewards.scoring import score

__all__ = ["Learner"]


@dataclass
class Rolled:
    """A part of a rollout with its advantages: what one optimizer step learns from.

    scale: what the loss of one sample and trained step counts.
    """

    scale: float
    trajectories: list[Trajectory] = field(default_factory=list)
    advantages: list[Tensor] = field(default_factory=list)
    rewards: list[Tensor] = field(default_factory=list)
    num_groups: int = 0
    num_zero_spread: int = 0


class Learner:
    """Policy, schedule, optimizer and EMA of a run; `learn` makes one iteration."""

    def __init__(self, config: Config, run: Assembly, schedule: Schedule) -> None:
        self.config, self.schedule = config, schedule
        self.adapter, self.policy, self.feed = run.adapter, run.policy, run.feed
        self.rule, self.rewards = run.rule, run.rewards
        is_native = isinstance(schedule, Native)
        self.native = schedule if is_native else Native(run.policy, config.schedule.replay_batch)
        self.parameters = list(run.policy.parameters.values())
        o = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=o.lr, betas=(o.beta1, o.beta2), weight_decay=o.weight_decay
        )
        self.ema = Ema(run.policy.parameters, config.ema.decay) if config.ema.decay else None
        self.num_optimizer_steps = 0
        self._has_warned = False

    def learn(self, iteration: int) -> dict[str, Any]:
        """Roll out, make the gradient, step; returns the iteration's metrics."""
        self.policy.counter.take()
        self._seed_global_generators(iteration)
        num_updates = self.config.optimizer.updates_per_rollout
        over_parts = self.config.optimizer.updates_over == "parts"
        prompt_parts = parts(self.config.prompts.per_iteration, num_updates if over_parts else 1)
        stats = self.schedule.stats()
        first = self.roll(iteration, prompt_parts[0], self.schedule, stats)
        self._compare_log_probs(float(stats.max_log_prob_difference))
        later = [self.roll(iteration, part, self.native, None) for part in prompt_parts[1:]]
        steps = [self.step()]
        for rolled in later if over_parts else [first] * (num_updates - 1):
            stats.merge(self.native.update(rolled.trajectories, rolled.advantages, rolled.scale))
            steps.append(self.step())
        return self.metrics(iteration, [first, *later], stats, steps)

    def roll(self, iteration: int, prompts: range, schedule: Schedule, stats: UpdateStats | None) -> Rolled:
        """Roll these prompt groups out; with `stats`, also add their gradient as soon as a wave is complete."""
        rolled = Rolled(self.scale_of(prompts, iteration))
        for wave in self.feed.waves(iteration, prompts, together=self.rule.std == "global"):
            batches = [self.feed.batch(iteration, places) for places in wave]
            trajectories = [schedule.rollout(batch, self.score) for batch in batches]
            advantages = self.advantages(trajectories, rolled)
            if stats is not None:
                stats.merge(schedule.update(trajectories, advantages, rolled.scale))
            rolled.trajectories += trajectories
            rolled.advantages += advantages
        return rolled

    def score(self, batch: Batch, latents: Tensor) -> Tensor:
        """Decode and judge: (B, K) raw rewards, float64."""
        with self.policy.stopwatch.phase("decode"):
            media = self.adapter.decode(latents)
        names = [f"{key.sample} of prompt group {key.prompt} (iteration {key.iteration})" for key in batch.samples]
        metadata = {key: [row[key] for row in batch.metadata] for key in self.feed.prompts.metadata}
        with self.policy.stopwatch.phase("reward"):
            return score(self.rewards, media, list(batch.prompts), names, metadata)

    def advantages(self, trajectories: Sequence[Trajectory], rolled: Rolled) -> list[Tensor]:
        """Advantages of the rows of every trajectory of a wave: its prompt groups are complete."""
        keys = [key for trajectory in trajectories for key in trajectory.batch.samples]
        rewards = torch.cat([trajectory.rewards for trajectory in trajectories])
        num_samples = self.config.prompts.samples
        assert len(keys) % num_samples == 0
        by_group = rewards.view(-1, num_samples, rewards.shape[1])
        result = self.rule(by_group)
        rolled.rewards.append(by_group)
        rolled.num_groups += len(by_group)
        rolled.num_zero_spread += int(result.zero_spread.sum())
        return list(result.values.flatten().split([len(t.batch.samples) for t in trajectories]))

    def scale_of(self, prompts: range, iteration: int) -> float:
        """What the loss of one sample and trained step counts in an optimizer step over `prompts`."""
        if self.config.objective.reduction == "sum":
            return 1.0
        num_trained = sum(len(self.feed.trained_steps(iteration, prompt)) for prompt in prompts)
        return 1 / (num_trained * self.config.prompts.samples)

    def step(self) -> dict[str, float]:
        """Clip, step, average; returns the gradient's norm before the clip and whether the step was taken."""
        o = self.config.optimizer
        with self.policy.stopwatch.phase("optimizer"):
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, o.clip_norm or float("inf"))
            grad_norm = float(norm)
            is_spike = not grad_norm <= (o.spike_norm or float("inf"))
            if is_spike and not o.spike_norm:
                raise NonFiniteError(
                    f"the gradient's norm is {grad_norm} at optimizer step {self.num_optimizer_steps}; lower "
                    "optimizer.lr, or set optimizer.spike_norm to skip and count such steps"
                )
            lr = o.lr * min(1.0, (self.num_optimizer_steps + 1) / max(o.warmup, 1))
            if not is_spike:
                self.optimizer.param_groups[0]["lr"] = lr
                self.optimizer.step()
                self.policy.moved()
                if self.ema is not None:
                    self.ema.update()
                self.num_optimizer_steps += 1
            self.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": grad_norm, "skipped_steps": float(is_spike), "lr": lr}

    def metrics(
        self, iteration: int, rolled: list[Rolled], stats: UpdateStats, steps: list[dict[str, float]]
    ) -> dict[str, Any]:
        """What `metrics.jsonl` holds of an iteration; every name is defined in docs/metrics.md."""
        rewards = torch.cat([r for part in rolled for r in part.rewards])
        num_samples = rewards.shape[0] * rewards.shape[1]
        work = self.policy.counter.take()
        names = list(self.rewards)
        total = (rewards * rewards.new_tensor(self.rule.weights)).sum(dim=-1)
        noise = 0
        for trajectory in (t for part in rolled for t in part.trajectories):
            for row in self.policy.noise.initial(trajectory.batch.samples):
                noise ^= fingerprint(row)
        held, self.schedule.held_bytes = self.schedule.held_bytes, 0
        return {
            "iteration": iteration,
            "reward": float(total.mean()),
            "reward_std": float(total.std(dim=1, correction=0).mean()),
            "rewards": {name: float(rewards[..., k].mean()) for k, name in enumerate(names)},
            "zero_spread": sum(r.num_zero_spread for r in rolled) / sum(r.num_groups for r in rolled),
            **stats.summary(),
            "grad_norm": steps[0]["grad_norm"],
            "grad_norms": [step["grad_norm"] for step in steps],
            "lr": steps[-1]["lr"],
            "skipped_steps": int(sum(step["skipped_steps"] for step in steps)),
            "forwards_per_sample": work["forwards"] / num_samples,
            "backwards_per_sample": work["backwards"] / num_samples,
            "reference_forwards_per_sample": work["reference_forwards"] / num_samples,
            "guidance_branches": int(work["branches"]),
            "noise_fingerprint": f"{noise:08x}",
            "schedule": self.schedule.name,
            "held_bytes": held,
            "seconds": self.policy.stopwatch.take(),
        }

    def _seed_global_generators(self, iteration: int) -> None:
        """Ours are keyed; but a reward may draw from the global ones, and a resumed run must draw the same."""
        seed = generator(self.config.run.seed, "global", iteration).get_state().view(torch.int64)[3:5].sum().item()
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)

    def _compare_log_probs(self, difference: float) -> None:
        """Say once when two forwards of unmoved weights differ by more than the clip: its band is then noise."""
        clip_range = self.config.objective.clip_range
        if difference > clip_range and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"log-probabilities of rollout and update differ by {difference:.2g} with the weights unmoved, more "
                f"than objective.clip_range = {clip_range:g}: numerics spend the trust region. Take a recompute-free "
                "schedule, or schedule.replay_batch = 1",
                stacklevel=2,
            )

    def tensors(self) -> dict[str, Tensor]:
        """Weights, the optimizer's moments and the averaged weights, by name; not copies."""
        tensors = {f"weights/{name}": p.detach() for name, p in self.policy.parameters.items()}
        for name, parameter in self.policy.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer/{name}/{key}"] = value
        if self.ema is not None:
            tensors |= {f"ema/{name}": average for name, average in self.ema.average.items()}
        return tensors

    def plain(self) -> dict[str, Any]:
        """What else the next iteration depends on, beside the config."""
        num_updates = self.ema.num_updates if self.ema is not None else 0
        return {"num_optimizer_steps": self.num_optimizer_steps, "num_ema_updates": num_updates}

    def take_up(self, checkpoints: Checkpoints, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint, bit for bit."""
        for name, parameter in self.policy.parameters.items():
            if f"optimizer/{name}/step" in checkpoint.tensors:
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        absent = checkpoints.load(checkpoint, self.tensors())
        self.num_optimizer_steps = int(checkpoint.plain["num_optimizer_steps"])
        if self.ema is not None and any(name.startswith("ema/") for name in absent):
            self.ema = Ema(self.policy.parameters, self.config.ema.decay)  # there was none so far: it starts here
        elif self.ema is not None:
            self.ema.num_updates = int(checkpoint.plain["num_ema_updates"])
