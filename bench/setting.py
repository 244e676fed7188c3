"""What is measured: a FLUX transformer with random weights behind the library's own adapter, and a timed turn.

The transformer is built from a config, so nothing is downloaded; the pipeline around it has neither text encoders
nor a VAE, for conditions are random and nothing is decoded. The hazard is B = 0: a fresh LoRA's second factor is
zero, which a kernel or a reader may take for less work, so it is filled.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.policy import (
    AdvantageRule,
    Batch,
    KeyedNoise,
    Objective,
    Policy,
    Process,
    SampleKey,
    Schedule,
    Trajectory,
    make_schedule,
    make_sigmas,
)
from stretto.policy.rollout import Score

__all__ = ["TINY", "Contender", "Probe", "Size", "Turn", "made_up", "make_batches", "make_policy", "without_gc"]

RULE = AdvantageRule()
RANK = 16


@dataclass(frozen=True)
class Size:
    """A FLUX transformer and its input. The default has 9.0 M parameters and width heads * head_dim = 256."""

    heads: int = 4
    head_dim: int = 64
    layers: int = 2
    single_layers: int = 4
    channels: int = 16
    image_side: int = 8
    text_tokens: int = 16
    text_dim: int = 64


TINY = Size(heads=2, head_dim=16, layers=1, single_layers=1, channels=4, image_side=2, text_tokens=4, text_dim=8)


@dataclass(frozen=True)
class Contender:
    """One schedule in a comparison: its name, native's replay, and rows a forward (None: the case's)."""

    label: str
    schedule: str
    replay_batch: int = 1
    rows: int | None = None


def make_policy(size: Size, method: str, num_steps: int = 10, checkpointing: bool = False) -> Policy:
    """The policy: LoRA of rank 16 on the adapter's default targets, or every weight; Flow-SDE 0.7, shift 3."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    from stretto.models.flux import FluxAdapter
    from stretto.models.trainable import attach_lora, make_full, trainable_parameters

    third = 2 * (size.head_dim // 6)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformer = FluxTransformer2DModel(
            in_channels=size.channels,
            num_layers=size.layers,
            num_single_layers=size.single_layers,
            attention_head_dim=size.head_dim,
            num_attention_heads=size.heads,
            joint_attention_dim=size.text_dim,
            pooled_projection_dim=size.text_dim,
            guidance_embeds=True,
            axes_dims_rope=(size.head_dim - 2 * third, third, third),
        ).eval()
    transformer.requires_grad_(False)
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    pipeline = FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=transformer, **parts)
    side = size.image_side * pipeline.vae_scale_factor * 2
    adapter = FluxAdapter(pipeline, height=side, width=side, text_length=size.text_tokens)
    if method == "lora":
        attach_lora(transformer, rank=RANK, alpha=2 * RANK, targets=adapter.lora_targets, seed=0)
        _fill(transformer)
    else:
        make_full(transformer)
    if checkpointing:
        transformer.enable_gradient_checkpointing()
    return Policy(
        velocity=adapter.velocity,
        parameters=trainable_parameters(transformer),
        process=Process(make_sigmas("shifted", num_steps, shift=3.0), "flow_sde", 0.7),
        objective=Objective(),
        noise=KeyedNoise(0, adapter.latent_shape),
        module=transformer,
    )


def make_batches(size: Size, num_samples: int, rows: int, trained_steps: tuple[int, ...]) -> list[Batch]:
    """The samples of one prompt group, `rows` a forward, under one random condition."""
    generator = torch.Generator().manual_seed(1)
    condition = {
        "prompt_embeds": torch.randn(1, size.text_tokens, size.text_dim, generator=generator),
        "pooled_prompt_embeds": torch.randn(1, size.text_dim, generator=generator),
    }
    batches = []
    for start in range(0, num_samples, rows):
        keys = tuple(SampleKey(0, 0, m) for m in range(start, min(start + rows, num_samples)))
        repeated = {name: value.expand(len(keys), *value.shape[1:]).clone() for name, value in condition.items()}
        batches.append(Batch(keys, repeated, trained_steps))
    return batches


class Turn:
    """A contender ready to run: one prompt group rolled out and its gradient made, with made-up rewards."""

    def __init__(
        self,
        policy: Policy,
        size: Size,
        contender: Contender,
        num_samples: int,
        rows: int,
        steps: tuple[int, ...],
        score: Score | None = None,
    ) -> None:
        self.policy, self.label, self.score = policy, contender.label, score or made_up
        self.batches = make_batches(size, num_samples, contender.rows or rows, steps)
        self.schedule: Schedule = make_schedule(
            contender.schedule,
            policy,
            rule=RULE,
            num_samples=num_samples,
            replay_batch=contender.replay_batch,
            retain_last=max(1, len(steps) // 2),
        )
        values = RULE(torch.arange(num_samples, dtype=torch.float64).view(1, -1, 1)).values.flatten()
        self.advantages = list(values.split([len(batch.samples) for batch in self.batches]))
        self.scale = 1 / (num_samples * len(steps))

    def run(self) -> float:
        """Seconds of one turn; the gradient is left in `.grad`, which is emptied first."""
        self.clear()
        start = time.perf_counter()
        self.update([self.roll(batch) for batch in self.batches])
        return time.perf_counter() - start

    def roll(self, batch: Batch) -> Trajectory:
        """The rollout of one of `batches`."""
        return self.schedule.rollout(batch, self.score)

    def update(self, trajectories: list[Trajectory]) -> None:
        """The gradient of all rollouts, into `.grad`."""
        self.schedule.update(trajectories, self.advantages, self.scale)

    def gradient(self) -> Tensor:
        """The last turn's gradient, flat, float64."""
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.policy.parameters.values()]
        return torch.cat([part.flatten().double() for part in parts])

    def clear(self) -> None:
        """Empty `.grad`."""
        for parameter in self.policy.parameters.values():
            parameter.grad = None


class Probe:
    """F0, F1 and B of a batch's forward at its first trained step, as the schedules call it."""

    def __init__(self, policy: Policy, batch: Batch) -> None:
        self.policy, self.batch = policy, batch
        self.latents = policy.noise.initial(batch.samples)
        self.steps = torch.full((len(batch.samples),), batch.trained_steps[0])
        self.cotangent = torch.ones_like(self.latents)

    def run(self) -> tuple[float, float, float]:
        """Seconds of one forward without gradient, one with, and its backward, which adds to `.grad`."""
        start = time.perf_counter()
        with torch.no_grad():
            self.policy.forward(self.latents, self.steps, self.batch.condition)
        without = time.perf_counter()
        with torch.enable_grad():
            velocity = self.policy.forward(self.latents, self.steps, self.batch.condition)
        forward = time.perf_counter()
        velocity.backward(self.cotangent)
        return without - start, forward - without, time.perf_counter() - forward


def made_up(batch: Batch, latents: Tensor) -> Tensor:
    """A reward from the sample's number: (B, 1) float64."""
    return torch.tensor([[float(key.sample)] for key in batch.samples], dtype=torch.float64)


@contextmanager
def without_gc() -> Iterator[None]:
    """Collect, then keep the collector off inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _fill(transformer: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
