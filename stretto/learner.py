"""One iteration: roll out, score, credit, reduce, step.

The learner owns the weights' way through an iteration and nothing on disk. Only the first optimizer step of a
rollout is recompute-free; later ones are native, with the ratio clip. The hazard is the order: every part of a
rollout must be rolled out before the first step moves the weights.
"""

import random
import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from stretto.build import Assembly
from stretto.config import Config
from stretto.models.ema import Ema
from stretto.overlap.buckets import local
from stretto.policy import NonFiniteError, fingerprint
from stretto.policy.layout import parts
from stretto.policy.noise import generator
from stretto.policy.schedules import Late, Native, Schedule, UpdateStats
from stretto.ranks import Ranks
from stretto.record.checkpoint import Checkpoint, Checkpoints
from stretto.reduction import Reduction
from stretto.rewards.behind import Scorer
from stretto.roll import Rolled, Roller

__all__ = ["Learner"]

MOMENTS = ("exp_avg", "exp_avg_sq")


class Learner:
    """Policy, schedule, reduction, optimizer and EMA of a run; `learn` makes one iteration on every rank."""

    def __init__(
        self, config: Config, run: Assembly, ranks: Ranks, reduction: Reduction, schedule: Schedule, scorer: Scorer
    ) -> None:
        self.config, self.schedule, self.ranks, self.reduction = config, schedule, ranks, reduction
        self.adapter, self.policy, self.feed = run.adapter, run.policy, run.feed
        self.rule, self.rewards, self.scorer = run.rule, run.rewards, scorer
        self.roller = Roller(config, run, ranks, reduction, scorer)
        is_native = isinstance(schedule, Native)
        self.native = schedule if is_native else Native(run.policy, config.schedule.replay_batch)
        o = config.optimizer
        self.optimizer = torch.optim.AdamW(
            list(reduction.parameters.values()), lr=o.lr, betas=(o.beta1, o.beta2), weight_decay=o.weight_decay
        )
        self.ema = Ema(reduction.parameters, config.ema.decay) if config.ema.decay else None
        self.num_optimizer_steps = 0
        self._blocked_s, self._num_sent = 0.0, 0
        self._has_warned = False

    def learn(self, iteration: int) -> dict[str, Any]:
        """Roll out, make the gradient, step; returns the iteration's metrics, the same on every rank."""
        self.policy.counter.take()
        self._seed_global_generators(iteration)
        num_updates = self.config.optimizer.updates_per_rollout
        over_parts = self.config.optimizer.updates_over == "parts"
        prompt_parts = parts(self.config.prompts.per_iteration, num_updates if over_parts else 1)
        stats = self.schedule.stats()
        first = self.roller.roll(iteration, prompt_parts[0], self.schedule, stats)
        self._compare_log_probs(float(stats.max_log_prob_difference))
        later = [self.roller.roll(iteration, part, self.native, None) for part in prompt_parts[1:]]
        steps = [self.step(was_provisional=isinstance(self.schedule, Late))]
        for rolled in later if over_parts else [first] * (num_updates - 1):
            with self.reduction.quiet():
                stats.merge(self.native.update(rolled.trajectories, rolled.advantages, rolled.scale))
            steps.append(self.step(was_provisional=False))
        return self.metrics(iteration, [first, *later], stats, steps)

    def step(self, *, was_provisional: bool) -> dict[str, float]:
        """Reduce, clip, step, average; returns the gradient's norm before the clip and whether the step was taken."""
        o = self.config.optimizer
        with self.policy.stopwatch.phase("reduction"):
            self.reduction.finish(was_provisional=was_provisional)
            self._fill_up()
        with self.policy.stopwatch.phase("optimizer"):
            norm = self.reduction.norm()
            grad_norm = float(norm)
            self._clip(norm)
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
                self.reduction.moved()
                self.policy.moved()
                if self.ema is not None:
                    self.ema.update()
                self.num_optimizer_steps += 1
            self.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": grad_norm, "skipped_steps": float(is_spike), "lr": lr}

    def _fill_up(self) -> None:
        """No gradient is one of zeros, whatever the schedule and the reduction: its moments decay all the same."""
        for parameter in self.reduction.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _clip(self, norm: Tensor) -> None:
        """Scale the gradient down to `optimizer.clip_norm`."""
        coefficient = float((self.config.optimizer.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        if self.config.optimizer.clip_norm and coefficient < 1:
            gradients = [local(p.grad) for p in self.reduction.parameters.values() if p.grad is not None]
            torch._foreach_mul_(gradients, coefficient)

    def metrics(
        self, iteration: int, rolled: list[Rolled], stats: UpdateStats, steps: list[dict[str, float]]
    ) -> dict[str, Any]:
        """What `metrics.jsonl` holds of an iteration; every name is defined in docs/metrics.md."""
        rewards = [r for part in rolled for r in part.rewards]
        num_groups = self.config.prompts.per_iteration
        num_samples = num_groups * self.config.prompts.samples
        mine = self._measured(rolled, stats)
        measured = self.ranks.gather(mine)
        stats = self.schedule.stats()
        for m in measured:
            stats.merge(m["stats"])
        work = {name: sum(m["work"][name] for m in measured) / num_samples for name in mine["work"]}
        noise = 0
        for m in measured:
            noise ^= m["noise"]
        return {
            "iteration": iteration,
            **self._reward_metrics(rewards),
            "zero_spread": sum(r.num_zero_spread for r in rolled) / num_groups,
            "skipped_groups": sum(len(r.skipped) for r in rolled),
            **stats.summary(),
            "grad_norm": steps[0]["grad_norm"],
            "grad_norms": [step["grad_norm"] for step in steps],
            "lr": steps[-1]["lr"],
            "skipped_steps": int(sum(step["skipped_steps"] for step in steps)),
            "forwards_per_sample": work["forwards"],
            "backwards_per_sample": work["backwards"],
            "reference_forwards_per_sample": work["reference_forwards"],
            "guidance_branches": self.policy.rows_per_sample,
            "noise_fingerprint": f"{noise:08x}",
            "schedule": self.schedule.name,
            "reduction": self.reduction.kind,
            "reductions": mine["reductions"],
            "held_bytes": max(m["held_bytes"] for m in measured),
            "scoring": {name: sum(m["scoring"][name] for m in measured) for name in mine["scoring"]},
            "seconds": mine["seconds"],
        }

    def _measured(self, rolled: list[Rolled], stats: UpdateStats) -> dict[str, Any]:
        """What this rank alone knows of an iteration, and starts to count anew."""
        noise = 0
        for trajectory in (t for part in rolled for t in part.trajectories if not t.batch.is_companion):
            for row in self.policy.noise.initial(trajectory.batch.samples):
                noise ^= fingerprint(row)
        held, self.schedule.held_bytes = self.schedule.held_bytes, 0
        blocked, self._blocked_s = self.reduction.blocked_s - self._blocked_s, self.reduction.blocked_s
        sent, self._num_sent = self.reduction.num_sent - self._num_sent, self.reduction.num_sent
        scoring = self.scorer.take()
        beside = {
            "reduction_blocked": blocked,
            "reward_behind": scoring.pop("busy_s"),
            "reward_waited": scoring.pop("waited_s"),
            "reward_lost": scoring.pop("lost_s"),
        }
        return {
            "stats": stats,
            "work": self.policy.counter.take(),
            "noise": noise,
            "held_bytes": held,
            "reductions": sent,
            "scoring": scoring,
            "seconds": self.policy.stopwatch.take() | beside,
        }

    def _reward_metrics(self, by_wave: list[Tensor]) -> dict[str, Any]:
        """Of the scored prompt groups; None where all were skipped."""
        names = list(self.rewards)
        if not by_wave:
            return {"reward": None, "reward_std": None, "rewards": dict.fromkeys(names)}
        rewards = torch.cat(by_wave)
        total = (rewards * rewards.new_tensor(self.rule.weights)).sum(dim=-1)
        return {
            "reward": float(total.mean()),
            "reward_std": float(total.std(dim=1, correction=0).mean()),
            "rewards": {name: float(rewards[..., k].mean()) for k, name in enumerate(names)},
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
        """The weights, moments and averages that the next iteration depends on, by kind and parameter; collective.

        Shapes are the policy's; what is sharded is a DTensor. The learner's own storages, not copies, where it holds
        whole ones.
        """
        by_kind = {kind: self.reduction.whole(values) for kind, values in self._by_kind().items()}
        return {f"{kind}/{name}": value for kind, values in by_kind.items() for name, value in values.items()}

    def plain(self) -> dict[str, Any]:
        """What else the next iteration depends on, beside the config."""
        return {
            "num_optimizer_steps": self.num_optimizer_steps,
            "num_ema_updates": self.ema.num_updates if self.ema is not None else 0,
        }

    @torch.no_grad()
    def take_up(self, checkpoints: Checkpoints, checkpoint: Checkpoint) -> None:
        """Take the state of a checkpoint, bit for bit, on however many ranks it was saved; collective."""
        plain, parameters = checkpoint.plain, self.reduction.parameters
        self.num_optimizer_steps = int(plain["num_optimizer_steps"])
        for parameter in parameters.values() if self.num_optimizer_steps else ():
            moments = {kind: torch.zeros_like(parameter) for kind in MOMENTS}
            self.optimizer.state[parameter] = {"step": torch.tensor(float(self.num_optimizer_steps)), **moments}
        tensors = self.tensors()
        missing = set(checkpoints.load(checkpoint, tensors))
        for kind, target in self._by_kind().items():
            there = {
                name: tensors[f"{kind}/{name}"] for name in self.policy.parameters if f"{kind}/{name}" in tensors
            }
            for name, value in self.reduction.own(there).items():
                if value is not target[name]:
                    target[name].copy_(value)
        if self.ema is not None:
            self.ema.num_updates = int(plain["num_ema_updates"])
            if missing:  # the run had no average so far: it starts here
                self.ema = Ema(parameters, self.config.ema.decay)
        self.reduction.moved()
        self.policy.moved()

    def _by_kind(self) -> dict[str, dict[str, Tensor]]:
        """Weights, moments and averages, each by the names of what the optimizer steps."""
        parameters = self.reduction.parameters
        states = {name: self.optimizer.state[parameter] for name, parameter in parameters.items()}
        by_kind = {"weights": {name: parameter.detach() for name, parameter in parameters.items()}}
        by_kind |= {kind: {name: state[kind] for name, state in states.items() if state} for kind in MOMENTS}
        return by_kind if self.ema is None else by_kind | {"ema": self.ema.average}
