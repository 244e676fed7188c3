"""Which weights move, how they are saved, and the policy they are held against.

The hazard is dtype: trained weights are float32 whatever the frozen ones are, or small steps round to
nothing. LoRA is in `lora.py`, the moving average in `ema.py`.
"""

import copy
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stretto.models.base import Adapter, Condition, Velocity
from stretto.models.ema import Ema
from stretto.models.lora import attach_lora, lora_off, save_lora
from stretto.models.whole_folder import whole_folder

__all__ = ["Ema", "attach_lora", "make_full", "reference", "save_full", "save_lora", "trainable_parameters"]


def make_full(transformer: nn.Module) -> None:
    """Make every weight trainable, in float32."""
    transformer.float().requires_grad_(True)


def trainable_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that move, in module order, by the names that checkpoints use."""
    return {name: parameter for name, parameter in transformer.named_parameters() if parameter.requires_grad}


def save_full(adapter: Adapter, folder: str | Path) -> None:
    """Write the transformer, whole, in diffusers' layout: its class's `from_pretrained(folder)` reads it back."""
    transformer: Any = adapter.transformer
    with whole_folder(folder) as partial:
        transformer.save_pretrained(partial)


def reference(adapter: Adapter, method: Literal["lora", "full"]) -> Velocity:
    """The policy that KL is measured against, as a velocity without gradient.

    lora: the base model (also where the run started from a saved LoRA), by switching the LoRA off for the
    call; costs no memory. full: a frozen copy of the transformer as it is now; so ask for it before training,
    and before anything patches the transformer's layers.
    """
    frozen = adapter
    if method == "full":
        frozen = copy.copy(adapter)
        frozen.transformer = copy.deepcopy(adapter.transformer).requires_grad_(False)

    @torch.no_grad()
    def velocity(latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        if method == "full":
            return frozen.velocity(latents, sigma, condition)
        with lora_off(adapter.transformer):
            return adapter.velocity(latents, sigma, condition)

    return velocity
