"""Opening a stock diffusers pipeline: found, of the right class, frozen, with one clear line where it is not.

The hazard: diffusers turns a path that does not exist into a search of the hub, and reports a failed download
in many lines; here whatever is wrong is a ValueError of one line that names the path.
"""

import re
import sys
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline

__all__ = ["check_multiple", "open_pipeline"]


def open_pipeline(
    path: str,
    pipeline_class: type[DiffusionPipeline],
    dtype: torch.dtype | dict[str, torch.dtype],
    device: torch.device,
    *,
    checkpointing: bool,
) -> Any:
    """The pipeline at `path` (a diffusers folder or a hub id), every module frozen and in eval mode.

    dtype: of the weights, or one for each component. checkpointing: activation checkpointing (non-reentrant)
    in the transformer wherever gradients are on; eval mode does not turn it off. Raises ValueError.
    """
    found = _class_name(path)
    if found != pipeline_class.__name__:
        raise ValueError(f"{path} holds a {found}, this adapter needs a {pipeline_class.__name__}; set model.adapter")
    if not sys.stderr.isatty():
        diffusers.utils.logging.disable_progress_bar()
        transformers.utils.logging.disable_progress_bar()
    try:
        pipeline = pipeline_class.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"cannot load {path}: {_first_line(error)}") from error
    for module in pipeline.components.values():
        if isinstance(module, torch.nn.Module):
            module.requires_grad_(False).eval().to(device)
    if checkpointing:
        pipeline.transformer.enable_gradient_checkpointing()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def check_multiple(**sizes: tuple[int, int]) -> None:
    """Raise ValueError unless every size, given as (size, multiple), is a positive multiple; names the nearest."""
    for name, (size, multiple) in sizes.items():
        if size < 1 or size % multiple:
            nearest = max(multiple, round(size / multiple) * multiple)
            raise ValueError(f"{name}={size} is not a multiple of {multiple}; set model.{name} to {nearest}")


def _class_name(path: str) -> str:
    """The pipeline class that model_index.json names."""
    folder = Path(path)
    if not path:
        raise ValueError("no model path; set model.path to a diffusers folder or a hub id such as owner/name")
    if folder.exists():
        if not (folder / "model_index.json").is_file():
            raise ValueError(f"{path} is not a diffusers folder: it has no model_index.json")
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        raise ValueError(f"{path} does not exist and is no hub id (owner/name); set model.path")
    try:
        return DiffusionPipeline.load_config(path).get("_class_name", "pipeline of no stated class")
    except (OSError, ValueError) as error:
        where = "" if folder.exists() else "no such folder, and not found on the hub: "
        raise ValueError(f"cannot load {path}: {where}{_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
