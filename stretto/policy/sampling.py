"""Deterministic sampling: the ODE, for evaluation and for showing what a model draws.

Evaluation by accident with the stochastic step gives low metrics; this is the one sampler that evaluation uses.
Any number of steps and any sigma schedule, over any velocity.
"""

import torch
from torch import Tensor

from stretto.policy.rollout import Condition, Velocity

__all__ = ["ode"]


@torch.no_grad()
def ode(velocity: Velocity, sigmas: Tensor, latents: Tensor, condition: Condition) -> Tensor:
    """Euler steps x + v*dt from `latents` at sigmas[0] to the last sigma; (B, *latent_shape) in and out, no grad."""
    for sigma, sigma_next in zip(sigmas[:-1].tolist(), sigmas[1:].tolist()):
        rows = latents.new_full((latents.shape[0],), sigma)
        latents = latents + velocity(latents, rows, condition) * (sigma_next - sigma)
    return latents
