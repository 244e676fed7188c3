"""`stretto check`: does every schedule give native's gradient on this model, and at what price.

Native runs twice, which shows the noise floor of the machine's kernels; then every schedule runs from identical
state on the first wave of samples: the same noise, rewards and advantages. Nothing is trained and nothing written
but the JSON that is asked for. On one process there is no reduction, so native with one reduction is native.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.build import assemble, refuse_ranks
from stretto.choose import Choice, make_chosen
from stretto.config import Config
from stretto.policy import AdvantageRule, Batch, Policy, SampleKey, Schedule
from stretto.record.atomic import write_atomic
from stretto.record.environment import environment
from stretto.record.memory import peak_bytes
from stretto.record.trackers import say
from stretto.rewards.scoring import score

__all__ = ["Row", "check", "compare"]

Gradient = list[Tensor]


@dataclass(frozen=True)
class Row:
    """One schedule against native: the gradient's cosine, relative L2 and largest difference, and the cost.

    forwards, backwards: rows at the transformer's top a sample. held_bytes: between rollout and update.
    peak_bytes: above what was in use before; None where it cannot be measured. refused: why it did not run.
    """

    schedule: str
    cosine: float = math.nan
    relative_l2: float = math.nan
    max_difference: float = math.nan
    is_bitwise: bool = False
    forwards: float = math.nan
    backwards: float = math.nan
    seconds: float = math.nan
    held_bytes: int = 0
    peak_bytes: int | None = None
    refused: str = ""


def check(config: Config, json_file: Path | None = None) -> None:
    """Print the table of a recipe, and write it to `json_file`. Raises ValueError for what the user can mend."""
    refuse_ranks("check")
    run = assemble(config)
    batches = run.feed.first_wave()

    def judged(batch: Batch, latents: Tensor) -> Tensor:
        names = [f"{key.sample} of prompt group {key.prompt}" for key in batch.samples]
        metadata = {key: [row[key] for row in batch.metadata] for key in run.prompts.metadata}
        return score(run.rewards, run.adapter.decode(latents), list(batch.prompts), names, metadata)

    rows = compare(config, run.policy, run.rule, batches, judged)
    samples = sum(len(batch.samples) for batch in batches)
    say(f"{samples} samples, {config.sampling.steps} steps, {len(batches[0].trained_steps)} trained")
    say(table(rows))
    if json_file is not None:
        report = {"machine": environment(), "samples": samples, "rows": [_plain(row) for row in rows]}
        write_atomic(json_file, json.dumps(report, indent=1, allow_nan=False) + "\n")


def compare(
    config: Config,
    policy: Policy,
    rule: AdvantageRule,
    batches: Sequence[Batch],
    judged: Callable[[Batch, Tensor], Tensor],
) -> list[Row]:
    """Native twice, native with replay, then every schedule, from identical state."""
    rewards = _rewards(policy, rule, config, batches, judged)
    most = max(len(batch.samples) * len(batch.trained_steps) for batch in batches)
    replay = config.schedule.replay_batch if config.schedule.replay_batch != 1 else most
    choices = [("native", 1), ("native", 1), ("native", replay)]
    choices += [(name, 1) for name in ("two_sum", "reweight", "hybrid", "retain")]
    truth: Gradient | None = None
    rows = []
    for number, (name, replay_batch) in enumerate(choices):
        label = {1: "native again", 2: f"native, replay {replay}"}.get(number, name)
        try:
            schedule = make_chosen(Choice(name, replay_batch, ""), config, policy, rule)
            schedule.prepare(batches[0])
        except ValueError as refusal:
            rows.append(Row(label, refused=str(refusal)))
            continue
        gradient, cost = _run(schedule, config, policy, rule, batches, rewards)
        truth = gradient if truth is None else truth
        rows.append(Row(label, **_difference(gradient, truth), **cost))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    head = ("schedule", "cosine", "rel. L2", "max diff", "bits", "fwd", "bwd", "seconds", "held MB", "peak MB")
    lines = ["{:<20}{:>12}{:>10}{:>10}{:>6}{:>7}{:>7}{:>9}{:>10}{:>10}".format(*head)]
    for row in rows:
        if row.refused:
            lines.append(f"{row.schedule:<20}  {row.refused}")
            continue
        peak = f"{row.peak_bytes / 1e6:.1f}" if row.peak_bytes else "-"
        lines.append(
            f"{row.schedule:<20}{row.cosine:>12.8f}{row.relative_l2:>10.1e}{row.max_difference:>10.1e}"
            f"{'equal' if row.is_bitwise else '-':>6}{row.forwards:>7.1f}{row.backwards:>7.1f}{row.seconds:>9.3f}"
            f"{row.held_bytes / 1e6:>10.1f}{peak:>10}"
        )
    return "\n".join(lines)


def _plain(row: Row) -> dict[str, Any]:
    """A row for JSON, which knows no NaN: what is not finite is None."""
    values = asdict(row).items()
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values}


def _rewards(
    policy: Policy,
    rule: AdvantageRule,
    config: Config,
    batches: Sequence[Batch],
    judged: Callable[[Batch, Tensor], Tensor],
) -> dict[SampleKey, Tensor]:
    """The rewards (K,) of every sample, judged once; made-up ones where the real have no spread to learn from."""
    native = make_chosen(Choice("native", 1, ""), config, policy, rule)
    rewards = torch.cat([native.rollout(batch, judged).rewards for batch in batches])
    num_samples = config.prompts.samples
    if bool(rule(rewards.view(-1, num_samples, rewards.shape[1])).zero_spread.all()):
        say("the rewards of this wave have no spread; comparing with made-up ones")
        rewards = (torch.arange(len(rewards)) % num_samples).double().unsqueeze(1).expand_as(rewards)
    return dict(zip([key for batch in batches for key in batch.samples], rewards))


def _run(
    schedule: Schedule,
    config: Config,
    policy: Policy,
    rule: AdvantageRule,
    batches: Sequence[Batch],
    rewards: dict[SampleKey, Tensor],
) -> tuple[Gradient, dict[str, Any]]:
    """Roll and update once without counting, for warmth, and once for the record."""
    groups = torch.stack(list(rewards.values())).view(-1, config.prompts.samples, len(rule.weights))
    advantages = list(rule(groups).values.flatten().split([len(batch.samples) for batch in batches]))
    scale = 1 / (len(rewards) * len(batches[0].trained_steps))

    def given(batch: Batch, latents: Tensor) -> Tensor:
        return torch.stack([rewards[key] for key in batch.samples])

    for _ in range(2):
        for parameter in policy.parameters.values():
            parameter.grad = None
        policy.counter.take()
        schedule.held_bytes = 0
        with peak_bytes(policy.device) as peak:
            start = time.perf_counter()
            trajectories = [schedule.rollout(batch, given) for batch in batches]
            schedule.update(trajectories, advantages, scale)
            seconds = time.perf_counter() - start
    work = policy.counter.take()
    gradient = [
        torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in policy.parameters.values()
    ]
    cost = {
        "forwards": work["forwards"] / len(rewards),
        "backwards": work["backwards"] / len(rewards),
        "seconds": seconds,
        "held_bytes": schedule.held_bytes,
        "peak_bytes": peak.value,
    }
    return gradient, cost


def _difference(ours: Gradient, truth: Gradient) -> dict[str, Any]:
    a, b = (torch.cat([g.flatten().double().cpu() for g in gradient]) for gradient in (ours, truth))
    return {
        "cosine": float(torch.dot(a, b) / (a.norm() * b.norm())),
        "relative_l2": float((a - b).norm() / b.norm()),
        "max_difference": float((a - b).abs().max()),
        "is_bitwise": all(torch.equal(x, y) for x, y in zip(ours, truth)),
    }
