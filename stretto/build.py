"""From a config to the objects of a run: the one place where the rooms are introduced to each other.

Lower rooms take plain arguments and do not know the config. Everything here raises ValueError for what a user can
mend, before the run folder is touched.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stretto.config import Config
from stretto.feed import Feed
from stretto.identity import identity_of
from stretto.models import load_adapter
from stretto.models.base import Adapter
from stretto.models.trainable import attach_lora, frozen_copy, make_full, reference, trainable_parameters
from stretto.policy import AdvantageRule, KeyedNoise, Objective, Policy, Process, TrainedStepsRule, make_sigmas
from stretto.prompts import Prompts, read_prompts
from stretto.ranks import Ranks
from stretto.rewards import load_reward
from stretto.rewards.retries import Scoring
from stretto.split import split_model

__all__ = [
    "Assembly",
    "assemble",
    "build_adapter",
    "build_device",
    "build_policy",
    "build_prompts",
    "build_rewards",
    "build_rule",
    "build_scoring",
    "build_sigmas",
    "build_steps_rule",
    "choose_weights",
    "prepare_process",
    "refuse_ranks",
]


@dataclass(frozen=True)
class Assembly:
    """The objects of a run that depend on the config and the ranks alone; identity: see `identity_of`."""

    adapter: Adapter
    identity: dict[str, Any]
    prompts: Prompts
    policy: Policy
    rule: AdvantageRule
    rewards: dict[str, Callable[..., Any]]
    feed: Feed


def assemble(config: Config, ranks: Ranks | None = None) -> Assembly:
    """Everything at once, the cheap and the likely to be wrong first; the model split over the ranks."""
    prepare_process(config)
    rule, steps_rule, rewards = build_rule(config), build_steps_rule(config), build_rewards(config)
    adapter = build_adapter(config)
    prompts = build_prompts(config, adapter)
    feed = Feed(config, adapter, prompts, steps_rule)
    choose_weights(config, adapter)
    identity = identity_of(config, adapter.transformer)
    policy = build_policy(config, adapter, ranks or Ranks((1, 1, 1, 1)))
    return Assembly(adapter, identity, prompts, policy, rule, rewards, feed)


def build_device(config: Config) -> torch.device:
    """The device of `run.device`, checked to be there."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if config.run.device == "auto":
        return torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(config.run.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"run.device = {config.run.device}: there are {torch.cuda.device_count()} CUDA devices here")
    return device


def build_adapter(config: Config) -> Adapter:
    """The recipe's model, frozen."""
    model = config.model
    return load_adapter(
        model.adapter,
        path=model.path,
        height=model.height,
        width=model.width,
        frames=model.frames,
        dtype=model.dtype,
        device=build_device(config),
        guidance=model.guidance,
        guidance_embedded=model.guidance_embedded,
        negative_prompt=model.negative_prompt,
        checkpointing=model.checkpointing,
        text_length=model.text_length,
    )


def choose_weights(config: Config, adapter: Adapter) -> None:
    """Make the recipe's weights trainable: a LoRA, or all."""
    tuning = config.tuning
    if tuning.method == "full":
        make_full(adapter.transformer)
        return
    attach_lora(
        adapter.transformer,
        rank=tuning.rank,
        alpha=tuning.alpha,
        targets=tuning.targets or adapter.lora_targets,
        seed=config.run.seed,
        start_from=tuning.start_from,
    )


def build_policy(config: Config, adapter: Adapter, ranks: Ranks) -> Policy:
    """The policy around the model, split over the ranks."""
    sampling = config.sampling
    frozen = frozen_copy(adapter) if config.objective.kl_beta and config.tuning.method == "full" else None
    split_model(config, adapter.transformer, ranks)
    if frozen is not None:
        split_model(config, frozen.transformer, ranks)
    objective = config.objective
    return Policy(
        velocity=adapter.velocity,
        parameters=trainable_parameters(adapter.transformer),
        process=Process(
            build_sigmas(config, adapter, sampling.steps),
            sampling.dynamics,
            sampling.noise_level,
            noise_untrained=sampling.noise_untrained,
        ),
        objective=Objective(objective.clip_range, objective.kl_beta, objective.kl_convention, objective.guard),
        noise=KeyedNoise(config.run.seed, adapter.latent_shape, sampling.initial_noise),
        module=adapter.transformer,
        reference=reference(adapter, frozen) if objective.kl_beta else None,
        autocast=None if config.model.autocast == "none" else torch.bfloat16,
        rows_per_sample=adapter.rows_per_sample,
    )


def build_sigmas(config: Config, adapter: Adapter, num_steps: int) -> torch.Tensor:
    """The recipe's sigma schedule at `num_steps` steps."""
    sampling = config.sampling
    return make_sigmas(
        sampling.sigmas,
        num_steps,
        shift=sampling.shift,
        num_tokens=adapter.num_tokens,
        scheduler_config=adapter.scheduler_config,
    )


def build_rule(config: Config) -> AdvantageRule:
    """The recipe's way from rewards to advantages."""
    a = config.advantage
    weights = tuple(reward.weight for reward in config.rewards)
    return AdvantageRule(a.std, a.unbiased, a.clamp, a.rewards, weights, a.best, a.worst)


def build_steps_rule(config: Config) -> TrainedStepsRule:
    """The recipe's way to draw trained steps, checked against the trajectory."""
    t = config.trained_steps
    rule = TrainedStepsRule(
        t.rule, t.fraction, t.size, t.start_max, t.move_every, t.stride, tuple(t.steps), t.drawn_per
    )
    rule.check(config.sampling.steps)
    return rule


def build_rewards(config: Config) -> dict[str, Callable[..., Any]]:
    """The recipe's rewards by name."""
    return {reward.name: load_reward(reward.name) for reward in config.rewards}


def build_scoring(config: Config) -> Scoring:
    """The recipe's way with rewards that fail."""
    s = config.scoring
    return Scoring(s.attempts, s.backoff_s, s.timeout_s, s.on_failure)


def build_prompts(config: Config, adapter: Adapter) -> Prompts:
    """The recipe's prompts: its file, else the adapter's own."""
    if config.prompts.file:
        return read_prompts(Path(config.prompts.file))
    if not adapter.prompts:
        raise ValueError(f"prompts.file is empty and {config.model.adapter} has no prompts of its own; name a file")
    return Prompts(list(adapter.prompts))


def refuse_ranks(verb: str) -> None:
    """Raise ValueError where torchrun started several ranks of a verb that runs on one process."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise ValueError(
            f"WORLD_SIZE = {world_size}: stretto {verb} runs on one process; start it without torchrun (train alone "
            "takes several ranks)"
        )


def prepare_process(config: Config) -> None:
    """The threads that were asked for, and the global seed (a reward's own model may be drawn)."""
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    torch.manual_seed(config.run.seed)
