"""The flow models: one small adapter for each, and what makes a transformer trainable.

Nothing heavy is imported until `load_adapter` knows which model is wanted (diffusers alone costs 5-7 s).
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from stretto.models.base import Adapter

__all__ = ["load_adapter"]


def load_adapter(
    adapter: str,
    *,
    path: str = "",
    height: int = 512,
    width: int = 512,
    frames: int = 1,
    dtype: "torch.dtype | str" = "float32",
    device: "torch.device | str" = "cpu",
    guidance: float = 1.0,
    guidance_embedded: float = 3.5,
    negative_prompt: str = "",
    checkpointing: bool = False,
    text_length: int = 512,
) -> "Adapter":
    """Load the adapter called `adapter` ("digits", "flux" or "wan"), frozen and in eval mode, on `device`.

    path: a diffusers folder or hub id. height, width: pixels. frames: of a video, 4k + 1. dtype: of the frozen
    weights ("float32" or "bfloat16"). guidance: classifier-free scale, 1 turns it off. guidance_embedded: fed to
    guidance-distilled models. checkpointing: activation checkpointing. text_length: tokens a prompt is padded or cut to.
    What an adapter has no use for it ignores. Raises ValueError for an unknown name and for what cannot be loaded.
    """
    import torch

    from stretto.models.base import require_extra

    if adapter not in ("digits", "flux", "wan"):
        raise ValueError(f"unknown adapter {adapter!r}; choose digits, flux or wan")
    require_extra()
    if isinstance(dtype, str):
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    settings = {
        "path": path,
        "height": height,
        "width": width,
        "frames": frames,
        "dtype": dtype,
        "device": torch.device(device),
        "guidance": guidance,
        "guidance_embedded": guidance_embedded,
        "negative_prompt": negative_prompt,
        "checkpointing": checkpointing,
        "text_length": text_length,
    }
    module = importlib.import_module(f"stretto.models.{adapter}")
    return module.load(**settings)
