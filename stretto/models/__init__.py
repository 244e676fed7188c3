"""The flow models: one small adapter for each, and what makes a transformer trainable.

The only room that knows diffusers and peft. The hazard is their weight: diffusers alone costs 5-7 s, so
nothing heavy is imported before `load_adapter` knows which model is wanted.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from stretto.models.base import Adapter

__all__ = ["load_adapter"]

ADAPTERS = ("digits", "flux", "wan")


@contextmanager
def _quiet_imports() -> Iterator[None]:
    """Without transformers' advice, at every import, to install torchvision for image processors that nobody uses."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


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
    """Load the adapter called `adapter` ("digits", "flux" or "wan"), frozen and in eval mode.

    path: a diffusers folder or hub id. height, width: pixels. frames: of a video, 4k + 1. dtype: of the
    frozen weights, "float32" or "bfloat16". guidance: classifier-free scale, 1 turns it off.
    guidance_embedded: fed to guidance-distilled models. checkpointing: activation checkpointing. text_length:
    tokens a prompt is padded or cut to. An adapter ignores what it has no use for. Raises ValueError for an
    unknown name, a missing extra and what cannot be loaded.
    """
    import torch

    from stretto.models.base import require_extra

    if adapter not in ADAPTERS:
        raise ValueError(f"unknown adapter {adapter!r}; choose one of {', '.join(ADAPTERS)}")
    require_extra()
    with _quiet_imports():
        module = importlib.import_module(f"stretto.models.{adapter}")
    return module.load(
        path=path,
        height=height,
        width=width,
        frames=frames,
        dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype,
        device=torch.device(device),
        guidance=guidance,
        guidance_embedded=guidance_embedded,
        negative_prompt=negative_prompt,
        checkpointing=checkpointing,
        text_length=text_length,
    )
