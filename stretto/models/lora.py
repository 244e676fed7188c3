"""LoRA on a diffusers transformer: attached from a seed, started from a file, saved whole, switched off.

The hazard is alpha: a state dict alone does not hold it, and who loads one without it assumes alpha = rank,
so a LoRA trained with alpha = 2 * rank runs at half its strength. It travels in the file's metadata, under
the key that diffusers reads. LoRA: Hu et al., arXiv 2106.09685.
"""

import difflib
import fnmatch
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY, LORA_WEIGHT_NAME_SAFE
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from stretto.models.base import Adapter
from stretto.models.whole_folder import whole_folder
from stretto.models.whole_tensor import whole_tensor

__all__ = ["attach_lora", "lora_off", "save_lora"]

PREFIX = "transformer."


def attach_lora(
    transformer: nn.Module, *, rank: int, alpha: float, targets: list[str], seed: int, start_from: str = ""
) -> None:
    """Give every linear layer that `targets` names a float32 LoRA without dropout; nothing else trains.

    targets: module-name suffixes ("attn.to_q"), or patterns of whole names ("blocks.*.ffn.net.2"). The update
    is alpha/rank * B A. A (rank, in) is drawn from `seed` alone (uniform, bound 1/sqrt(in), as peft draws it),
    B (out, rank) is zero; torch's own random state is neither read nor moved. start_from: a folder or file
    with a saved LoRA of the same rank and layers; where its alpha is another (its rank, if it states none), B
    is rescaled, so that it starts at the strength it was saved at. Raises ValueError for a target that means
    no linear layer and for a saved LoRA that does not fit.
    """
    names = _match_linears(transformer, targets)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=names, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(config, transformer)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in _lora_parameters(transformer).items():
        parameter.data = parameter.data.float()
        if ".lora_A." in name:
            values = torch.rand(parameter.shape, generator=generator)
            parameter.data.copy_((2 * values - 1) / math.sqrt(parameter.shape[1]))
    if start_from:
        _start_from(transformer, start_from, scale=alpha / rank)


def save_lora(adapter: Adapter, folder: str | Path, *, writes: bool = True) -> None:
    """Write the LoRA, with its alpha, where a stock pipeline's `load_lora_weights(folder)` finds it; whole or not.

    Where it is sharded all ranks call this together, and the one that `writes` writes it whole.
    """
    tensors = {PREFIX + name: whole_tensor(p) for name, p in _lora_parameters(adapter.transformer).items()}
    if not writes:
        return
    configs: Any = adapter.transformer.peft_config
    config = configs["default"].to_dict().items()
    listed = {PREFIX + key: sorted(value) if isinstance(value, set) else value for key, value in config}
    metadata = {"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(listed, sort_keys=True)}
    with whole_folder(folder) as partial:
        save_file(tensors, partial / LORA_WEIGHT_NAME_SAFE, metadata=metadata)


@contextmanager
def lora_off(transformer: nn.Module) -> Iterator[None]:
    """Run the base model inside the context; the LoRA is back, and trainable, however it is left."""
    layers = [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _match_linears(transformer: nn.Module, targets: list[str]) -> list[str]:
    """The names of the linear layers that the targets mean; every target must mean one."""
    linears = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    chosen: set[str] = set()
    for target in targets:
        matched = {n for n in linears if n.endswith(f".{target}") or fnmatch.fnmatchcase(n, target)}
        if not matched:
            parts = [name.split(".") for name in linears]
            suffixes = {".".join(part[-length:]) for part in parts for length in (1, 2, 3, 4)}
            suffixes = {suffix for suffix in suffixes if not suffix[0].isdigit()}
            near = difflib.get_close_matches(target, sorted(suffixes), cutoff=0.5) or sorted(suffixes)[:5]
            raise ValueError(f"tuning.targets names {target!r}, no linear layer; near it: {', '.join(near)}")
        chosen |= matched
    if not chosen:
        raise ValueError("tuning.targets is empty; name at least one linear layer")
    return sorted(chosen)


def _lora_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """By the names of the file, without its prefix: `<module>.lora_A.weight` and `<module>.lora_B.weight`."""
    return {
        name.replace(".default.", "."): parameter
        for name, parameter in transformer.named_parameters()
        if ".lora_A." in name or ".lora_B." in name
    }


def _start_from(transformer: nn.Module, path: str, scale: float) -> None:
    """Copy a saved LoRA in, its B multiplied by (saved alpha / rank) / scale."""
    tensors, config = _read(path)
    parameters = _lora_parameters(transformer)
    missing, unknown = sorted(parameters.keys() - tensors.keys()), sorted(tensors.keys() - parameters.keys())
    if missing or unknown:
        raise ValueError(
            f"{path} holds a LoRA on other layers than tuning.targets: {len(missing)} missing, {len(unknown)} "
            f"unknown (first: {(missing + unknown)[0]}); set tuning.targets to what it was trained with"
        )
    rank = next(iter(parameters.values())).shape[0]
    for name, tensor in tensors.items():
        if tensor.shape != parameters[name].shape:
            saved = tensor.shape[0 if ".lora_A." in name else 1]
            raise ValueError(
                f"{path} holds {name} of shape {tuple(tensor.shape)} (rank {saved}), here it is "
                f"{tuple(parameters[name].shape)} (rank {rank}); set tuning.rank to {saved}, or check the model"
            )
    strength = config.get("lora_alpha", rank) / rank / scale
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
            if ".lora_B." in name:
                parameter.mul_(strength)


def _read(path: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A saved LoRA's tensors and its config ({} where the file holds none), without the prefix."""
    file = Path(path) / LORA_WEIGHT_NAME_SAFE if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ValueError(f"no LoRA at {file}; set tuning.start_from to a folder with {LORA_WEIGHT_NAME_SAFE}")
    try:
        with safe_open(file, "pt") as opened:
            metadata = json.loads((opened.metadata() or {}).get(LORA_ADAPTER_METADATA_KEY, "{}"))
            tensors = {key.removeprefix(PREFIX): opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} cannot be read as a LoRA: {error}") from error
    config = {key.removeprefix(PREFIX): value for key, value in metadata.items()}
    for odd in ("rank_pattern", "alpha_pattern", "use_rslora", "use_dora"):
        if config.get(odd):
            raise ValueError(f"{file} was made with {odd}; only a LoRA of one rank and one alpha can be gone on with")
    return tensors, config
