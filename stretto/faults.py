"""What cannot be run: the faults of a config's values, each with the value and the way out.

Two kinds: a bound on one field (`_BOUNDS`, a table) and what two fields say against each other
(`_conflicts`). All are told, not the first alone. The hazard is a rule that is stricter or laxer than the
room that meets the value later; each rule here repeats one that would otherwise strike in the middle of a
run. Files are not opened and models not loaded. Imports no torch.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from stretto.config import Config

__all__ = ["Fault", "value_faults"]


class Fault(NamedTuple):
    """One thing to mend: the keys it speaks of (the first is the one to change) and the line for the user."""

    keys: tuple[str, ...]
    text: str


class _Bound(NamedTuple):
    """A field's values are those that satisfy `holds`; `way_out` says which."""

    holds: Callable[[Any], bool]
    way_out: str


def value_faults(config: Config) -> list[Fault]:
    """Every fault of the values, in the order of the sections."""
    return [*_bound_faults(config), *_reward_faults(config), *_conflicts(config)]


def _at_least(least: int, why: str = "") -> _Bound:
    return _Bound(lambda value: value >= least, f"take at least {least}" + (f" ({why})" if why else ""))


def _between(least: int, most: int, why: str = "") -> _Bound:
    way_out = f"take {least} to {most}" + (f" ({why})" if why else "")
    return _Bound(lambda value: least <= value <= most, way_out)


def _positive(why: str = "") -> _Bound:
    return _Bound(lambda value: value > 0, "take more than 0" + (f" ({why})" if why else ""))


def _no_blank(what: str) -> _Bound:
    return _Bound(lambda words: all(word.strip() for word in words), f"{what} may not be blank")


_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,2})?")
_DECAY = _Bound(lambda value: 0 <= value < 1, "take a decay in [0, 1)")

_BOUNDS = {
    "run.folder": _Bound(lambda folder: folder.strip() != "", "name the folder that the run is to be kept in"),
    "run.seed": _Bound(lambda seed: 0 <= seed < 2**63, "take a seed in 0..2**63 - 1"),
    "run.iterations": _at_least(1),
    "run.device": _Bound(lambda device: bool(_DEVICE.fullmatch(device)), "take auto, cpu, cuda or cuda:N (N to 99)"),
    "run.threads": _between(0, 1024, "0 leaves torch's own choice"),
    "model.height": _at_least(1),
    "model.width": _at_least(1),
    "model.frames": _at_least(1),
    "model.guidance_embedded": _at_least(0),
    "model.guidance": _at_least(0, "1 turns guidance off"),
    "model.text_length": _at_least(1),
    "tuning.rank": _between(1, 65536),
    "tuning.alpha": _between(1, 65536),
    "tuning.targets": _no_blank("a target"),
    "prompts.per_iteration": _at_least(1),
    "prompts.samples": _Bound(lambda samples: samples >= 2, "a prompt group needs at least 2 samples"),
    "sampling.steps": _at_least(1, "a trajectory has steps"),
    "sampling.shift": _positive(),
    "sampling.samples_per_forward": _at_least(1),
    "trained_steps.fraction": _Bound(lambda fraction: 0 < fraction <= 1, "take a share in (0, 1]"),
    "trained_steps.size": _at_least(1),
    "trained_steps.move_every": _at_least(1),
    "trained_steps.stride": _at_least(1),
    "advantage.clamp": _positive("advantages are clamped to plus or minus this"),
    "advantage.best": _at_least(0, "0 keeps all samples"),
    "advantage.worst": _at_least(0),
    "objective.clip_range": _positive(),
    "objective.kl_beta": _at_least(0, "0 turns the KL off"),
    "schedule.replay_batch": _at_least(0, "0 takes all rows at once"),
    "schedule.race": _at_least(0, "0 holds no race"),
    "optimizer.lr": _positive(),
    "optimizer.warmup": _at_least(0),
    "optimizer.beta1": _DECAY,
    "optimizer.beta2": _DECAY,
    "optimizer.weight_decay": _at_least(0),
    "optimizer.clip_norm": _at_least(0, "0 does not clip"),
    "optimizer.spike_norm": _at_least(0, "0 never skips"),
    "optimizer.updates_per_rollout": _at_least(1),
    "ema.decay": _Bound(_DECAY.holds, "take a decay in [0, 1) (0 turns EMA off)"),
    "evaluation.every": _at_least(0, "0 never evaluates"),
    "evaluation.prompts": _no_blank("a prompt"),
    "evaluation.samples": _at_least(1),
    "evaluation.steps": _at_least(0, "0 takes sampling.steps"),
    "evaluation.patience": _at_least(0, "0 never stops early"),
    "checkpoint.every": _at_least(0, "0 checkpoints at the end and on a signal alone"),
    "checkpoint.keep": _at_least(1),
    "scoring.attempts": _at_least(1),
    "scoring.backoff_s": _at_least(0),
    "scoring.timeout_s": _positive(),
    "parallel.replicate": _at_least(0, "0 takes the ranks that the other axes leave"),
    "parallel.shard": _at_least(1),
    "parallel.ulysses": _at_least(1),
    "parallel.tensor": _at_least(1),
    "parallel.timeout_s": _Bound(lambda seconds: 0 < seconds <= 1e6, "take seconds in (0, 1000000]"),
}


def _bound_faults(config: Config) -> Iterator[Fault]:
    for section in dataclasses.fields(config):
        table = getattr(config, section.name)
        if not dataclasses.is_dataclass(table):
            continue
        for field in dataclasses.fields(table):
            key, value = f"{section.name}.{field.name}", getattr(table, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                yield _fault(config, key, "take a finite number")
            elif key in _BOUNDS and not _BOUNDS[key].holds(value):
                yield _fault(config, key, _BOUNDS[key].way_out)


def _reward_faults(config: Config) -> Iterator[Fault]:
    if not config.rewards:
        yield Fault(("rewards",), 'rewards is empty: name at least one, as [[rewards]] with name = "..."')
    names = [reward.name for reward in config.rewards]
    for index, reward in enumerate(config.rewards):
        key = f"rewards.{index}"
        if not reward.name.strip():
            way_out = "name a shipped reward, package.module:function or path/to/file.py:function"
            yield Fault((f"{key}.name",), f'{key}.name = "{reward.name}": {way_out}')
        elif reward.name in names[:index]:
            way_out = "listed twice; add up the weights instead"
            yield Fault((f"{key}.name",), f'{key}.name = "{reward.name}": {way_out}')
        if not math.isfinite(reward.weight):
            yield Fault((f"{key}.weight",), f"{key}.weight = {reward.weight}: take a finite number")
    if config.rewards and all(reward.weight == 0 for reward in config.rewards):
        yield Fault(("rewards",), "rewards: every weight is 0, so there is nothing to learn; give one a weight")


def _conflicts(config: Config) -> Iterator[Fault]:
    yield from _model_conflicts(config)
    yield from _sampling_conflicts(config)
    yield from _trained_steps_conflicts(config)
    yield from _update_conflicts(config)
    yield from _parallel_conflicts(config)
    if config.evaluation.patience > 0 and config.evaluation.every == 0:
        way_out = "it counts evaluations, and evaluation.every = 0 makes none; set evaluation.every, or patience to 0"
        yield _fault(config, "evaluation.patience", way_out, "evaluation.every")


def _model_conflicts(config: Config) -> Iterator[Fault]:
    model, adapter = config.model, config.model.adapter
    if adapter == "digits" and model.path:
        yield _fault(config, "model.path", "the base of digits ships with the package; leave it out", "model.adapter")
    if adapter != "digits" and not model.path:
        yield _fault(config, "model.path", f"{adapter} loads a diffusers folder or hub id; name it", "model.adapter")
    if adapter == "wan" and model.frames >= 1 and model.frames % 4 != 1:
        near = model.frames // 4 * 4 + 1
        yield _fault(config, "model.frames", f"wan makes 4k + 1 frames; take {near} or {near + 4}", "model.adapter")
    if adapter != "wan" and model.frames > 1:
        yield _fault(config, "model.frames", f"{adapter} makes single images; leave it at 1", "model.adapter")
    if adapter != "digits" and not config.prompts.file:
        way_out = f"{adapter} has no prompts of its own; name a text file with one prompt a line"
        yield _fault(config, "prompts.file", way_out, "model.adapter")
    if config.tuning.start_from and config.tuning.method == "full":
        way_out = 'it is a LoRA to start from, so it needs tuning.method = "lora"'
        yield _fault(config, "tuning.start_from", way_out, "tuning.method")


def _sampling_conflicts(config: Config) -> Iterator[Fault]:
    sampling = config.sampling
    level = sampling.noise_level
    if sampling.dynamics != "wan_flow_sde" and level <= 0:
        way_out = "take more than 0 (without noise there is no log-probability)"
        yield _fault(config, "sampling.noise_level", way_out, "sampling.dynamics")
    if sampling.dynamics == "cps" and level > 1:
        yield _fault(config, "sampling.noise_level", "CPS takes a level in (0, 1]", "sampling.dynamics")
    if sampling.dynamics == "cps" and config.objective.guard:
        way_out = "CPS's log-prob has no 1/std^2 to weigh; turn the guard off or take another sampling.dynamics"
        yield _fault(config, "objective.guard", way_out, "sampling.dynamics")


def _trained_steps_conflicts(config: Config) -> Iterator[Fault]:
    trained, steps = config.trained_steps, config.sampling.steps
    keys = ("sampling.steps", "trained_steps.rule")
    if steps < 1:
        return
    if trained.rule == "list":
        outside = [step for step in trained.steps if not 0 <= step < steps]
        if not trained.steps:
            yield _fault(config, "trained_steps.steps", f"list at least one step in 0..{steps - 1}", *keys)
        elif outside or len(set(trained.steps)) < len(trained.steps):
            yield _fault(config, "trained_steps.steps", f"list distinct steps in 0..{steps - 1}", *keys)
        elif steps - 1 in trained.steps and config.sampling.dynamics == "cps":
            way_out = f"CPS adds no noise at the last step, so step {steps - 1} has no gradient; leave it out"
            yield _fault(config, "trained_steps.steps", way_out, *keys, "sampling.dynamics")
        return
    if trained.steps:
        way_out = f'is read by trained_steps.rule = "list" alone, not by "{trained.rule}"; leave one of them out'
        yield _fault(config, "trained_steps.steps", way_out, *keys)
    if steps < 2:
        way_out = 'the last step is trained only if listed; take at least 2 or trained_steps.rule = "list"'
        yield _fault(config, "sampling.steps", way_out, *keys)
    elif trained.rule.endswith("window"):
        yield from _window_faults(config)


def _window_faults(config: Config) -> Iterator[Fault]:
    trained, steps = config.trained_steps, config.sampling.steps
    keys = ("sampling.steps", "trained_steps.rule")
    latest = steps - 1 - trained.size
    if latest < 0:
        way_out = f"a window of a {steps}-step trajectory holds 1 to {steps - 1} steps (the last is not trained)"
        yield _fault(config, "trained_steps.size", way_out, *keys)
        return
    start_max = trained.start_max if trained.rule == "random_window" else None
    if start_max is not None and not 0 <= start_max <= latest:
        way_out = f"a window of {trained.size} in {steps} steps starts in 0..{latest}"
        yield _fault(config, "trained_steps.start_max", way_out, *keys, "trained_steps.size")


def _update_conflicts(config: Config) -> Iterator[Fault]:
    advantage, schedule, samples = config.advantage, config.schedule, config.prompts.samples
    kept = advantage.best + advantage.worst
    if min(advantage.best, advantage.worst) >= 0 and kept > samples >= 2:
        way_out = f"best + worst = {kept} of prompts.samples = {samples}; keep fewer or draw more"
        yield _fault(config, "advantage.best", way_out, "advantage.worst", "prompts.samples")
    if schedule.name == "two_sum" and kept > 0:
        way_out = (
            "two sums fold each sample before it is known which are kept, so they cannot serve best-of-n; "
            'take "reweight" or "retain", or advantage.best = advantage.worst = 0'
        )
        yield _fault(config, "schedule.name", way_out, "advantage.best", "advantage.worst")
    if schedule.name == "hybrid" and not 1 <= schedule.retain_last <= _num_trained(config):
        way_out = f"{_num_trained(config)} steps are trained; retain 1 to {_num_trained(config)} of them"
        yield _fault(config, "schedule.retain_last", way_out, "sampling.steps", "trained_steps.rule")
    updates, groups = config.optimizer.updates_per_rollout, config.prompts.per_iteration
    if config.optimizer.updates_over == "parts" and updates > groups >= 1:
        way_out = (
            f"each update takes a part of the prompts.per_iteration = {groups} prompt groups; "
            'take fewer updates or optimizer.updates_over = "all"'
        )
        yield _fault(config, "optimizer.updates_per_rollout", way_out, "prompts.per_iteration")


def _parallel_conflicts(config: Config) -> Iterator[Fault]:
    parallel, schedule = config.parallel, config.schedule.name
    if parallel.reduction == "late" and schedule in ("native", "retain"):
        way_out = (
            f'{schedule} knows the advantage before its backward; take "coalesced", or schedule.name = "reweight"'
        )
        yield _fault(config, "parallel.reduction", way_out, "schedule.name")
    if parallel.reduction == "per_step" and schedule in ("reweight", "two_sum", "hybrid"):
        way_out = f'{schedule} has no advantage at a trained step; take "late" or "coalesced"'
        yield _fault(config, "parallel.reduction", way_out, "schedule.name")
    if parallel.reduction == "coalesced" and schedule == "two_sum" and parallel.shard == 1:
        way_out = 'a rank has not all samples of a prompt group, so its two sums are the owners\'; take "late"'
        yield _fault(config, "parallel.reduction", way_out, "schedule.name", "parallel.shard")
    if config.scoring.on_failure == "skip" and schedule == "two_sum":
        way_out = 'two sums fold a sample before it is known whether its group is whole; take "stop" or "reweight"'
        yield _fault(config, "scoring.on_failure", way_out, "schedule.name")
    scoring = config.scoring
    waits = sum(min(scoring.backoff_s * 2.0**n, 60.0) for n in range(min(scoring.attempts, 1000) - 1))
    bound_s = scoring.attempts * scoring.timeout_s + waits
    if any("://" in reward.name for reward in config.rewards) and bound_s >= parallel.timeout_s:
        way_out = (
            f"a rank may wait {bound_s:g} s for a service by [scoring], and the others give up before; take more"
        )
        yield _fault(config, "parallel.timeout_s", way_out, "scoring.attempts", "scoring.timeout_s")
    in_step = parallel.shard > 1 or parallel.reduction == "per_step"
    if in_step and config.schedule.replay_batch != 1:
        way_out = "sharded ranks, and ranks that reduce at every step, replay one batch at a time; take 1"
        yield _fault(config, "schedule.replay_batch", way_out, "parallel.shard", "parallel.reduction")


def _num_trained(config: Config) -> int:
    """|S|, as `stretto.policy.trained_steps` draws it; at least 1."""
    trained, before_last = config.trained_steps, config.sampling.steps - 1
    fraction = trained.fraction if 0 < trained.fraction <= 1 else 1.0
    counts = {
        "all_but_last": before_last,
        "fraction": round(fraction * before_last),
        "random_window": trained.size,
        "progressive_window": trained.size,
        "list": len(trained.steps),
    }
    return max(1, counts[trained.rule])


def _fault(config: Config, key: str, way_out: str, *other_keys: str) -> Fault:
    """A fault of one field: `key = value: way_out`, the value as TOML writes it."""
    section, field = key.split(".")
    value = getattr(getattr(config, section), field)
    shown = str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else value
    return Fault((key, *other_keys), f"{key} = {shown}: {way_out}")
