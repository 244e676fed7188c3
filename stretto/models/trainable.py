"""Which weights move, how they are saved, and the policy they are held against.

The hazard is dtype: trained weights are float32 whatever the frozen ones are, or small steps round to
nothing. LoRA is in `lora.py`, the moving average in `ema.py`.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stretto.models.base import Adapter, Condition, Velocity
from stretto.models.ema import Ema
from stretto.models.lora import attach_lora, lora_off, save_lora
from stretto.models.whole_folder import whole_folder
from stretto.models.whole_tensor import whole_tensor

__all__ = [
    "Ema",
    "attach_lora",
    "frozen_copy",
    "make_full",
    "reference",
    "save_full",
    "save_lora",
    "trainable_parameters",
]


def make_full(transformer: nn.Module) -> None:
    """Make every weight trainable, in float32."""
    transformer.float().requires_grad_(True)


def trainable_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that move, in module order, by the names that checkpoints use."""
    return {name: parameter for name, parameter in transformer.named_parameters() if parameter.requires_grad}


def save_full(adapter: Adapter, folder: str | Path, *, writes: bool = True) -> None:
    """Write the transformer, whole, in diffusers' layout: its class's `from_pretrained(folder)` reads it back.

    Where it is sharded all ranks call this together, and the one that `writes` writes it whole.
    """
    transformer: Any = adapter.transformer
    state = {name: whole_tensor(tensor) for name, tensor in transformer.state_dict().items()}
    if not writes:
        return
    kind: Any = next(kind for kind in type(transformer).__mro__ if kind.__module__.startswith("diffusers."))
    with torch.device("meta"):
        written: Any = kind.from_config(transformer.config)
    written.load_state_dict(state, assign=True)
    with whole_folder(folder) as partial:
        written.save_pretrained(partial)


def frozen_copy(adapter: Adapter) -> Adapter:
    """The same adapter around a frozen copy of its transformer as it is now.

    What full tuning is held against; so ask for it before training, and before anything patches the layers.
    """
    frozen = copy.copy(adapter)
    frozen.transformer = copy.deepcopy(adapter.transformer).requires_grad_(False)
    return frozen


def reference(adapter: Adapter, frozen: Adapter | None = None) -> Velocity:
    """The policy that KL is measured against, as a velocity without gradient.

    frozen: a `frozen_copy`, for full tuning. None: the base model (also where the run started from a saved LoRA), by
    switching the LoRA off for the call; costs no memory.
    """

    @torch.no_grad()
    def velocity(latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        if frozen is not None:
            return frozen.velocity(latents, sigma, condition)
        with lora_off(adapter.transformer):
            return adapter.velocity(latents, sigma, condition)

    return velocity
