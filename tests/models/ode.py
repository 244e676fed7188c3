"""What the adapter tests share: the ODE over the stock scheduler's sigmas, and LoRA targets laid over the linears."""

import fnmatch
from itertools import pairwise

import torch


@torch.no_grad()
def sample(adapter, latents, condition):
    """x + v * dt over the sigmas that the adapter's pipeline used last."""
    sigmas = adapter.pipeline.scheduler.sigmas
    for sigma, sigma_next in pairwise(sigmas):
        velocity = adapter.velocity(latents, sigma.expand(len(latents)), condition)
        latents = latents + (sigma_next - sigma) * velocity
    return latents


def matched_linears(adapter):
    """Check that every LoRA target means a linear layer; return the linears that no target means."""
    linears = {n for n, m in adapter.transformer.named_modules() if isinstance(m, torch.nn.Linear)}
    for pattern in adapter.lora_targets:
        assert fnmatch.filter(linears, pattern), pattern
    return {n for n in linears if not any(fnmatch.fnmatch(n, p) for p in adapter.lora_targets)}
