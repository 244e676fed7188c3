"""A small network with every kind of layer that trains, and policies made of it."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stretto.policy import AdvantageRule, Batch, KeyedNoise, Objective, Policy, Process, SampleKey, make_sigmas
from stretto.policy.schedules import make_schedule

TOKENS, CHANNELS, WIDTH = 3, 4, 8


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained low-rank one beside it."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * 0.5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.RMSNorm(WIDTH)

    def forward(self, x):
        return x + self.scale(self.down(functional.gelu(self.up(self.norm(x)))))


class Toy(nn.Module):
    """Rows on dim 0; one block is used twice; the time embedding is two-dimensional."""

    def __init__(self, checkpointing=False):
        super().__init__()
        self.checkpointing = checkpointing
        self.embed, self.time, self.text = nn.Linear(CHANNELS, WIDTH), nn.Linear(1, WIDTH), nn.Linear(5, WIDTH)
        self.block, self.last = Block(), nn.Linear(WIDTH, CHANNELS)

    def forward(self, latents, sigma, text):
        x = self.embed(latents) + self.time(sigma.unsqueeze(1)).unsqueeze(1) + self.text(text).mean(1, keepdim=True)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointing else self.block(x)
        return self.last(x)


class Noise64(KeyedNoise):
    """Keyed noise in float64."""

    def _draw(self, stream, *key):
        return super()._draw(stream, *key).double()


def make_toy(tuning="full", checkpointing=False, dtype=torch.float32):
    torch.manual_seed(0)
    toy = Toy(checkpointing)
    if tuning == "lora":
        toy.requires_grad_(False)
        for owner, name in ((toy.block, "up"), (toy.block, "down"), (toy, "time"), (toy, "last")):
            setattr(owner, name, LoraLinear(getattr(owner, name)))
    return toy.to(dtype)


def make_policy(
    tuning="full",
    dynamics="flow_sde",
    steps=4,
    checkpointing=False,
    dtype=torch.float32,
    guidance=1.0,
    autocast=None,
    kl_beta=0.0,
    kl_convention="flow_grpo",
    guard=False,
    noise_untrained=False,
    toy=None,
):
    toy = toy or make_toy(tuning, checkpointing, dtype)

    def velocity(latents, sigma, condition):
        if guidance == 1.0:
            return toy(latents, sigma, condition["text"]).to(latents.dtype)
        text = torch.cat([condition["text"], condition["negative_text"]])
        both = toy(torch.cat([latents, latents]), torch.cat([sigma, sigma]), text).to(latents.dtype)
        conditional, unconditional = both.chunk(2)
        return guidance * conditional + (1 - guidance) * unconditional

    return Policy(
        velocity=velocity,
        parameters={name: p for name, p in toy.named_parameters() if p.requires_grad},
        process=Process(make_sigmas("shifted", steps, shift=3.0), dynamics, 0.7, noise_untrained=noise_untrained),
        objective=Objective(kl_beta=kl_beta, kl_convention=kl_convention, guard=guard),
        noise=(Noise64 if dtype is torch.float64 else KeyedNoise)(0, (TOKENS, CHANNELS)),
        module=toy,
        reference=(lambda x, s, c: 0.5 * x - 0.1) if kl_beta else None,
        autocast=autocast,
        rows_per_sample=1 if guidance == 1.0 else 2,
    )


def make_batches(num_groups, num_samples, rows, trained_steps, dtype=torch.float32):
    """The samples of some prompt groups, `rows` a forward (a forward may hold samples of two groups)."""
    keys = [SampleKey(0, p, m) for p in range(num_groups) for m in range(num_samples)]
    batches = []
    for start in range(0, len(keys), rows):
        part = tuple(keys[start : start + rows])
        text = torch.stack([torch.randn(2, 5, generator=torch.Generator().manual_seed(k.prompt)) for k in part])
        condition = {"text": text.to(dtype), "negative_text": torch.zeros_like(text, dtype=dtype)}
        batches.append(Batch(part, condition, tuple(trained_steps)))
    return batches


def run(name, policy, batches, rewards, rule=None, num_samples=None, **options):
    """Roll, score, update: the gradient by parameter, the advantages, the schedule and its statistics.

    rewards: (G, M, K).
    """
    rule = rule or AdvantageRule(weights=(1.0,) * rewards.shape[-1])
    schedule = make_schedule(name, policy, rule=rule, num_samples=rewards.shape[1], **options)
    for parameter in policy.parameters.values():
        parameter.grad = None

    def score(batch, latents):
        return torch.stack([rewards[key.prompt, key.sample] for key in batch.samples])

    trajectories = [schedule.rollout(batch, score) for batch in batches]
    assert all(p.grad is None for p in policy.parameters.values())
    values = rule(rewards).values
    advantages = [torch.stack([values[k.prompt, k.sample] for k in b.samples]) for b in batches]
    scale = 1 / (sum(len(b.samples) for b in batches) * len(batches[0].trained_steps))
    stats = schedule.update(trajectories, advantages, scale)
    gradient = {name: p.grad for name, p in policy.parameters.items()}
    return gradient, values, schedule, stats


def distance(a, b):
    """Relative L2 distance of two gradients, over all parameters together."""
    difference = sum((a[k].double() - b[k].double()).square().sum() for k in b)
    return float((difference / sum(b[k].double().square().sum() for k in b)).sqrt())


def make_rewards(num_groups, num_samples, num_rewards=1, offset=0.0, spread=1.0):
    random = torch.Generator().manual_seed(num_groups * 31 + num_samples)
    values = torch.randn(num_groups, num_samples, num_rewards, generator=random, dtype=torch.float64)
    return offset + spread * values
