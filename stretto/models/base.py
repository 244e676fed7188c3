"""What every model adapter is, and what all of them share: classifier-free guidance and negative prompts.

An adapter wraps a frozen pipeline and its transformer behind three methods (encode, velocity, decode). The
hazard: guidance runs both branches in ONE forward of 2b rows, so whatever looks at rows
(per-sample gradients, forward counters) must know that row r belongs to sample r % b. Guidance is written
w*c + (1-w)*u, which shows the two cotangents: w to the conditional branch, 1-w to the unconditional one
(Ho and Salimans, arXiv 2207.12598, whose 1+w is this w).
"""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.policy.rollout import Condition, Velocity

__all__ = ["Adapter", "Condition", "Velocity", "encode_guided", "guided_velocity", "linear_layers", "require_extra"]


class Adapter(Protocol):
    """One flow model behind three methods. `copy.copy(adapter)` with another `transformer` is an adapter too."""

    transformer: torch.nn.Module
    """The only module that is trained; always in eval mode."""
    latent_shape: tuple[int, ...]
    """One sample's latent: (tokens, channels) for packed FLUX, (C, F, H, W) for Wan."""
    num_tokens: int
    """Image tokens inside the transformer: what a resolution-dependent sigma shift looks at."""
    scheduler_config: dict[str, Any]  # and "passes_points" where the pipeline passes linspace(1, 1/T) itself
    """The diffusers scheduler's config; {} where there is none."""
    prompts: list[str]
    """The adapter's own prompts; [] where it has none."""
    lora_targets: list[str]
    """Default LoRA targets, as `attach_lora` reads them."""
    rows_per_sample: int
    """Transformer rows one latent row costs: 2 under classifier-free guidance, else 1."""

    def encode(self, prompts: list[str]) -> Condition:
        """One row a prompt, without gradient, deterministic; a row does not depend on the other prompts."""

    def velocity(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """Latents (B, *latent_shape) and sigma (B,) in [0, 1] -> velocity, shape and dtype of the latents.

        One call of the transformer; differentiable in its weights and in latents, through both branches.
        """

    def decode(self, latents: Tensor) -> Tensor:
        """Latents (B, *latent_shape) -> float32 in [0, 1], no gradient: (B, C, H, W), video (B, F, C, H, W)."""


def guided_velocity(
    forward: Callable[[Tensor, Tensor, Condition], Tensor],
    guidance: float,
    latents: Tensor,
    sigma: Tensor,
    condition: Condition,
) -> Tensor:
    """Velocity (b, ...) under classifier-free guidance `guidance`, by one call of `forward`.

    `forward(latents, sigma, condition)` is the plain model on its rows: b of them where guidance is 1, else
    2b (conditional, then unconditional). It gets the condition without its `negative_` keys.
    """
    positive = {name: value for name, value in condition.items() if not name.startswith("negative_")}
    if guidance == 1.0:
        return forward(latents, sigma, positive)
    both = {name: torch.cat([value, condition[f"negative_{name}"]]) for name, value in positive.items()}
    velocity = forward(torch.cat([latents, latents]), torch.cat([sigma, sigma]), both)
    conditional, unconditional = velocity.chunk(2)
    return guidance * conditional + (1.0 - guidance) * unconditional


@torch.no_grad()
def encode_guided(
    encode_one: Callable[[str], Condition], guidance: float, prompts: list[str], negative_prompt: str
) -> Condition:
    """Encode each distinct prompt alone (`encode_one` gives tensors of one row) and stack the rows.

    Unless guidance is 1, every key gets a `negative_` twin with as many rows, all of them `negative_prompt`.
    """
    if not prompts:
        raise ValueError("no prompts to encode; give at least one")
    encoded = {prompt: encode_one(prompt) for prompt in dict.fromkeys(prompts)}
    names = list(encoded[prompts[0]])
    condition = {name: torch.cat([encoded[prompt][name] for prompt in prompts]) for name in names}
    if guidance != 1.0:
        negative = encode_one(negative_prompt)
        condition |= {f"negative_{name}": torch.cat([negative[name]] * len(prompts)) for name in names}
    return condition


def linear_layers(plan: Mapping[str, str]) -> list[str]:
    """The name patterns of the linear layers that a plan of `stretto.overlap` cuts: attention and feed-forward."""
    found: list[str] = []
    for pattern, style in plan.items():
        if style.split()[0] in ("column", "row"):
            first, *siblings = pattern.split("+")
            parent = first.rpartition(".")[0]
            found += [first, *(f"{parent}.{sibling}" for sibling in siblings)]
    return found


def require_extra() -> None:
    """Raise a ValueError with the command to run unless the packages of the `train` extra are installed."""
    packages = ("diffusers", "transformers", "peft")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f'{", ".join(missing)} not installed; run: pip install "stretto[train]"')
