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
    return _shift(linear(num_steps), shift)


def dynamic(num_steps: int, num_tokens: int, scheduler_config: Mapping[str, Any]) -> Tensor:
    """The even schedule with the model's own shift, which grows with the number of latent tokens; (T + 1,) float64.

    `scheduler_config` gives base_shift, max_shift, base_image_seq_len and max_image_seq_len (FLUX's where absent)
    and `time_shift_type` ("exponential" or "linear").
    """
    return _shift(linear(num_steps), _dynamic_shift(num_tokens, scheduler_config))


def pipeline(num_steps: int, num_tokens: int, scheduler_config: Mapping[str, Any]) -> Tensor:
    """The spacing of the stock diffusers pipeline: T points, shifted, then 0 appended; (T + 1,) float64.

    The points are linspace(1, 1/T) where the pipeline passes them itself (FLUX: `passes_points` in the config of
    its adapter) or shifts dynamically; the first T of linspace(1, 1/N, T + 1) for UniPC with flow sigmas (Wan);
    else flow Euler's, from the shifted 1 to the shifted 1/N, then shifted once more. N is num_train_timesteps.
    """
    config = scheduler_config
    num_train = int(config.get("num_train_timesteps", 1000))
    is_dynamic = bool(config.get("use_dynamic_shifting"))
    shift = float(config.get("shift", 1.0))
    if is_dynamic:
        shift = _dynamic_shift(num_tokens, config)
    if is_dynamic or config.get("passes_points"):
        points = torch.linspace(1, 1 / num_steps, num_steps, dtype=torch.float64)
    elif config.get("use_flow_sigmas"):
        shift = float(config.get("flow_shift", 1.0))
        points = torch.linspace(1, 1 / num_train, num_steps + 1, dtype=torch.float64)[:-1]
    else:
        lowest = float(_shift(torch.tensor(1 / num_train, dtype=torch.float64), shift))
        points = torch.linspace(1, lowest, num_steps, dtype=torch.float64)
    return torch.cat([_shift(points, shift), points.new_zeros(1)])


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


def _shift(t: Tensor, shift: float) -> Tensor:
    """s*t / (1 + (s-1)*t), written so that 1 stays exactly 1 for every s."""
    return shift * t / (shift * t + (1 - t))


def _dynamic_shift(num_tokens: int, config: Mapping[str, Any]) -> float:
    base_len, max_len = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base, top = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    mu = float(base + (top - base) * (num_tokens - base_len) / (max_len - base_len))
    return math.exp(mu) if config.get("time_shift_type", "exponential") == "exponential" else mu
