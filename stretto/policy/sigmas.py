"""Sigma schedules: how far from noise (1) to data (0) each step goes.

Every schedule is a float64 tensor of T + 1 values that starts at 1 (or near it, `pipeline`) and ends at 0. The
hazard is that schedules of one name differ between projects: diffusers' own spacing ends at another last step
than the shifted linspace of Flow-GRPO, so a recipe names which one it means. Source: recompute-free RL papers and
diffusers' `FlowMatchEulerDiscreteScheduler`.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["dynamic", "linear", "make_sigmas", "pipeline", "shifted"]


def linear(num_steps: int) -> Tensor:
    """T + 1 values from 1 to 0, evenly spaced; (T + 1,) float64."""
    return torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)


def shifted(num_steps: int, shift: float) -> Tensor:
    """The even schedule t mapped by s*t / (1 + (s-1)*t); (T + 1,) float64. Source: SD3 (Esser et al., 2024)."""
    t = linear(num_steps)
    return shift * t / (1 + (shift - 1) * t)


def dynamic(num_steps: int, num_tokens: int, scheduler_config: Mapping[str, Any]) -> Tensor:
    """The even schedule shifted by exp(mu), mu growing with the number of latent tokens; (T + 1,) float64.

    `scheduler_config` gives base_shift, max_shift, base_image_seq_len and max_image_seq_len (FLUX's where absent)
    and `time_shift_type` ("exponential" or "linear").
    """
    mu = _mu(num_tokens, scheduler_config)
    factor = math.exp(mu) if scheduler_config.get("time_shift_type", "exponential") == "exponential" else mu
    return shifted(num_steps, factor)


def pipeline(num_steps: int, num_tokens: int, scheduler_config: Mapping[str, Any]) -> Tensor:
    """The spacing of the stock diffusers pipeline: T points, shifted, then 0 appended; (T + 1,) float64.

    With dynamic shifting (FLUX) the points are linspace(1, 1/T); else they run from the shifted 1 to the shifted
    1/N (N = num_train_timesteps) and are shifted once more, which is diffusers' habit.
    """
    if scheduler_config.get("use_dynamic_shifting"):
        points = torch.linspace(1, 1 / num_steps, num_steps, dtype=torch.float64)
        mu = _mu(num_tokens, scheduler_config)
        factor = math.exp(mu) if scheduler_config.get("time_shift_type", "exponential") == "exponential" else mu
    else:
        factor = float(scheduler_config.get("flow_shift", scheduler_config.get("shift", 1.0)))
        lowest = 1 / int(scheduler_config.get("num_train_timesteps", 1000))
        lowest = factor * lowest / (1 + (factor - 1) * lowest)
        points = torch.linspace(1, lowest, num_steps, dtype=torch.float64)
    points = factor * points / (1 + (factor - 1) * points)
    return torch.cat([points, points.new_zeros(1)])


def make_sigmas(
    kind: str,
    num_steps: int,
    *,
    shift: float = 1.0,
    num_tokens: int = 0,
    scheduler_config: Mapping[str, Any] | None = None,
) -> Tensor:
    """The schedule that a recipe names: `linear`, `shifted`, `dynamic` or `pipeline`; (T + 1,) float64."""
    if num_steps < 1:
        raise ValueError(f"num_steps = {num_steps}: a trajectory needs at least one step")
    config = scheduler_config or {}
    match kind:
        case "linear":
            return linear(num_steps)
        case "shifted":
            return shifted(num_steps, shift)
        case "dynamic":
            return dynamic(num_steps, num_tokens, config)
        case "pipeline":
            return pipeline(num_steps, num_tokens, config)
    raise ValueError(f"sigmas = {kind!r}: choose linear, shifted, dynamic or pipeline")


def _mu(num_tokens: int, config: Mapping[str, Any]) -> float:
    base_len, max_len = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base, top = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    return float(base + (top - base) * (num_tokens - base_len) / (max_len - base_len))
