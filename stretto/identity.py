"""What a checkpoint must agree on to be of this model.

Names and shapes of what trains, the LoRA's strength, and a fingerprint of the base (the first values of each weight;
for full tuning the weights before training). The hazard is asking late: it is to be asked before any weight has moved
and before the model is split over ranks, so that it is the same on any number of them.
"""

from typing import Any

from torch import nn

from stretto.config import Config
from stretto.models.trainable import trainable_parameters
from stretto.policy import fingerprint

__all__ = ["identity_of"]


def identity_of(config: Config, transformer: nn.Module) -> dict[str, Any]:
    """The identity of a whole model, its trainable weights already chosen."""
    is_lora = config.tuning.method == "lora"
    base = 0
    for parameter in transformer.parameters():
        if not (is_lora and parameter.requires_grad):
            base = (base * 31 + fingerprint(parameter.detach().flatten()[:64])) & 0xFFFFFFFF
    return {
        "adapter": config.model.adapter,
        "method": config.tuning.method,
        "alpha": config.tuning.alpha if is_lora else None,
        "parameters": {name: list(p.shape) for name, p in trainable_parameters(transformer).items()},
        "base": f"{base:08x}",
    }
