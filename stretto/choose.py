"""Which schedule a run uses when the recipe says `auto`.

The rule: what the reduction asks for; with KL or best-of-n retain, else reweight (batched where it can be). Then a
short race on the first wave of samples against native at its best, with batched replay, because on a small model that
can win. The gradients of the race are thrown away and it calls no reward, so a run does not depend on it; the choice
goes into the checkpoint, so that a resumed run does not race again, unless the settings that it was made for have
changed.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stretto.build import Assembly
from stretto.config import Config
from stretto.policy import AdvantageRule, Batch, Policy, make_schedule
from stretto.policy.schedules import Reweight, Schedule

__all__ = ["Choice", "choose", "make_chosen"]


@dataclass(frozen=True)
class Choice:
    """A schedule by name, native's replay, why, and a digest of the settings that it was made for."""

    name: str
    replay_batch: int
    reason: str
    settings: str = ""


def make_chosen(choice: Choice, config: Config, policy: Policy, rule: AdvantageRule) -> Schedule:
    """The schedule of a choice."""
    return make_schedule(
        choice.name,
        policy,
        rule=rule,
        num_samples=config.prompts.samples,
        replay_batch=choice.replay_batch,
        retain_last=config.schedule.retain_last,
    )


def choose(config: Config, run: Assembly, num_ranks: int, kept: Mapping[str, Any] | None = None) -> Choice:
    """The choice that was kept (as a dict, in a checkpoint) where it still fits, or a new one."""
    replay_batch = config.schedule.replay_batch
    if config.schedule.name != "auto":
        return Choice(config.schedule.name, replay_batch, "the recipe says so")
    settings = _digest(config, num_ranks)
    if kept and kept["settings"] == settings:
        return Choice(**kept)
    name, reason = _default(config, run.policy)
    choice = Choice(name, replay_batch, reason)
    if config.schedule.race and num_ranks == 1:
        choice = _race(config, run.policy, run.rule, choice, run.feed.first_wave())
    return replace(choice, settings=settings)


def _digest(config: Config, num_ranks: int) -> str:
    """Names the settings that decide which schedule is possible and fast."""
    sections = ("schedule", "objective", "advantage", "sampling", "trained_steps", "tuning", "model", "prompts")
    parallel = asdict(config.parallel) if num_ranks > 1 else None
    text = json.dumps([*(asdict(getattr(config, section)) for section in sections), parallel])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _default(config: Config, policy: Policy) -> tuple[str, str]:
    parallel = config.parallel
    if parallel.reduction == "per_step":
        return "native", "reduces at every trained step, where only native's and retain's advantages are known"
    if parallel.reduction == "late":
        return "reweight", "what leaves before its advantage is known is made by reweight"
    if config.objective.kl_beta:
        return "retain", "with KL, reweight would pay a second vector-Jacobian product"
    if config.advantage.best or config.advantage.worst:
        return "retain", "best-of-n drops samples, whose backwards reweight would have paid for"
    if config.sampling.samples_per_forward > 1 and parallel.shard > 1:
        return "retain", "sharded weights have no per-sample gradients, so reweight would run samples one by one"
    if config.sampling.samples_per_forward > 1 and not Reweight(policy).is_batched:
        return "retain", "no per-sample gradient for every weight, so reweight would run samples one by one"
    return "reweight", "nothing run twice, one gradient a sample held"


def _race(config: Config, policy: Policy, rule: AdvantageRule, default: Choice, batches: list[Batch]) -> Choice:
    """Time a wave with the default and with native at its best, in turn, and take the faster."""
    rows = max(len(batch.samples) * len(batch.trained_steps) for batch in batches)
    replay_batch = default.replay_batch if default.replay_batch != 1 else rows
    native = Choice("native", replay_batch, "")
    seconds: dict[str, list[float]] = {default.name: [], "native": []}
    racers = [make_chosen(choice, config, policy, rule) for choice in (default, native)]
    for schedule in racers:
        schedule.prepare(batches[0])
    for _ in range(config.schedule.race):
        for schedule in racers:
            seconds[schedule.name].append(_seconds(schedule, policy, rule, config.prompts.samples, batches))
    ours, theirs = min(seconds[default.name]), min(seconds["native"])
    raced = (
        f"{default.name} ({default.reason}) {ours:.3g} s and native with replay of {replay_batch} rows "
        f"{theirs:.3g} s a wave of {sum(len(b.samples) for b in batches)} samples, best of {config.schedule.race}"
    )
    if theirs < ours:
        return Choice("native", replay_batch, raced)
    return Choice(default.name, default.replay_batch, raced)


def _seconds(
    schedule: Schedule, policy: Policy, rule: AdvantageRule, num_samples: int, batches: Sequence[Batch]
) -> float:
    """One wave, rolled and updated with made-up rewards; infinite where it does not fit into memory."""

    def made_up(batch: Batch, latents: Tensor) -> Tensor:
        rewards = torch.tensor([float(key.sample) for key in batch.samples], dtype=torch.float64)
        return rewards.unsqueeze(1).expand(-1, len(rule.weights))

    start = time.perf_counter()
    try:
        trajectories = [schedule.rollout(batch, made_up) for batch in batches]
        rewards = torch.cat([t.rewards for t in trajectories]).view(-1, num_samples, len(rule.weights))
        sizes = [len(batch.samples) for batch in batches]
        schedule.update(trajectories, list(rule(rewards).values.flatten().split(sizes)), 1.0)
        if policy.device.type == "cuda":
            torch.cuda.synchronize(policy.device)
        return time.perf_counter() - start
    except torch.OutOfMemoryError:
        return float("inf")
    finally:
        for parameter in policy.parameters.values():
            parameter.grad = None
        policy.counter.take()
        policy.stopwatch.take()
