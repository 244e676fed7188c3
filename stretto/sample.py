"""`stretto sample`: draw pictures from a run, with the ODE.

Takes a run folder (its recipe and newest checkpoint) or a recipe (that run, or the base model before it). The noise
of a picture depends on the seed, the prompt's place and the sample's number alone, so that two weights are compared
on the same noise. The hazard is a picture whose weights nobody remembers: `samples.json` beside the pictures says
which, and the default folder is named after them.
"""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from stretto.config import Config
from stretto.models import load_adapter
from stretto.policy.noise import KeyedNoise, SampleKey
from stretto.policy.sampling import ode
from stretto.policy.sigmas import make_sigmas
from stretto.prompts import read_prompts
from stretto.recipe import load_recipe
from stretto.record import checkpoint
from stretto.record.atomic import write_atomic
from stretto.record.media import save_grid, save_media

if TYPE_CHECKING:
    from stretto.models.base import Adapter

__all__ = ["Weights", "sample"]

Weights = Literal["ema", "live", "base"]


@dataclass(frozen=True)
class _Source:
    """What is sampled: a recipe, and a checkpoint with the weights to put into its model (None for the base)."""

    config: Config
    weights: Weights
    loaded: checkpoint.Loaded | None


def sample(
    source: Path,
    *,
    prompts: list[str] | None = None,
    num_samples: int = 0,
    num_steps: int = 0,
    seed: int | None = None,
    out: Path | None = None,
    weights: Weights | None = None,
    which: str = "newest",
) -> Path:
    """Draw `num_samples` pictures of every prompt and return the folder with them, a grid and `samples.json`.

    source: a run folder or a recipe. prompts: default the run's evaluation prompts, else all of its prompts.
    num_samples, num_steps: 0 takes the recipe's (evaluation.samples; evaluation.steps, else sampling.steps). seed:
    None takes run.seed. out: default `samples/<weights>` in the run folder, with the iteration in its name.
    weights: None takes the EMA where the run has one, else the live weights; the base where a recipe has no
    checkpoint yet. which: `newest`, `best` or the number of an iteration. Raises ValueError where any of these is not there.
    """
    chosen = _open(source, weights, which)
    config = chosen.config
    adapter = _adapter(chosen)
    texts = prompts or _prompts(config, adapter)
    per_prompt = num_samples or config.evaluation.samples
    seed = config.run.seed if seed is None else seed
    steps = num_steps or config.evaluation.steps or config.sampling.steps
    folder = out or _default_folder(source, chosen)
    sigmas = make_sigmas(
        config.sampling.sigmas,
        steps,
        shift=config.sampling.shift,
        num_tokens=adapter.num_tokens,
        scheduler_config=adapter.scheduler_config,
    )
    rows = []
    for place, text in enumerate(texts):
        media = _draw(adapter, config, sigmas, seed, place, text, per_prompt)
        for number, picture in enumerate(media):
            save_media(picture, folder / f"{place:03d}-{number:03d}")
        rows.append(media)
    save_grid(torch.cat(rows), folder / "grid", columns=per_prompt, captions=texts)
    report = {
        "source": str(source),
        "weights": chosen.weights,
        "iteration": chosen.loaded.iteration if chosen.loaded else None,
        "steps": steps,
        "seed": seed,
        "samples": per_prompt,
        "prompts": texts,
    }
    write_atomic(folder / "samples.json", json.dumps(report, indent=1) + "\n")
    print(f"{len(texts) * per_prompt} pictures with the {_described(chosen)} in {folder}")
    return folder


def _open(source: Path, weights: Weights | None, which: str) -> _Source:
    """The recipe and the checkpoint that `source`, `weights` and `which` name together."""
    if not source.is_dir():
        config = load_recipe(source, [])
        run = Path(config.run.folder)
        if weights == "base" or (weights is None and not checkpoint.newest(run / "checkpoints")):
            return _Source(config, "base", None)
        return _open(run, weights, which)
    if not (source / "config.toml").is_file():
        raise ValueError(f"{source} is not a run folder: it has no config.toml")
    config = load_recipe(source / "config.toml", [])
    if weights == "base":
        return _Source(config, "base", None)
    loaded = _checkpoint(source / "checkpoints", which)
    if weights == "ema" and not loaded.state.get("ema"):
        raise ValueError(f"--weights ema: {source} kept no moving average; take --weights live")
    return _Source(config, weights or ("ema" if loaded.state.get("ema") else "live"), loaded)


def _checkpoint(folder: Path, which: str) -> checkpoint.Loaded:
    if which == "newest":
        loaded = checkpoint.load_newest(folder)
        if loaded is None:
            raise ValueError(f"{folder} holds no checkpoint yet; take --weights base")
        for note in loaded.notes:
            print(note)
        return loaded
    there = {path.name: path for path in checkpoint.newest(folder)}
    path = checkpoint.best(folder) if which == "best" else there.get(f"iteration-{which:0>8}")
    if path is None:
        raise ValueError(f"--checkpoint {which}: {folder} has {', '.join(there) or 'no checkpoint'}")
    return checkpoint.load(path)


def _adapter(chosen: _Source) -> "Adapter":
    """The recipe's model with the chosen weights in it."""
    from stretto.models.trainable import attach_lora, make_full, trainable_parameters

    model, tuning = chosen.config.model, chosen.config.tuning
    if chosen.config.run.threads:
        torch.set_num_threads(chosen.config.run.threads)
    adapter = load_adapter(
        model.adapter,
        path=model.path,
        height=model.height,
        width=model.width,
        frames=model.frames,
        dtype=model.dtype,
        device=_device(chosen.config),
        guidance=model.guidance,
        guidance_embedded=model.guidance_embedded,
        negative_prompt=model.negative_prompt,
    )
    if chosen.loaded is None:
        return adapter
    if tuning.method == "lora":
        targets = tuning.targets or adapter.lora_targets
        attach_lora(adapter.transformer, rank=tuning.rank, alpha=tuning.alpha, targets=targets, seed=0)
    else:
        make_full(adapter.transformer)
    state = chosen.loaded.state
    values = state["ema"]["average"] if chosen.weights == "ema" else state["weights"]
    _put_in(trainable_parameters(adapter.transformer), values)
    return adapter


def _put_in(parameters: dict[str, torch.nn.Parameter], values: dict[str, Tensor]) -> None:
    if parameters.keys() != values.keys():
        odd = sorted(parameters.keys() ^ values.keys())[0]
        raise ValueError(f"the checkpoint is of another model than config.toml: {odd} is in one of them alone")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.shape != values[name].shape:
                raise ValueError(
                    f"the checkpoint is of another model than config.toml: {name} has shape "
                    f"{tuple(values[name].shape)} there and {tuple(parameter.shape)} here"
                )
            parameter.copy_(values[name])


def _draw(
    adapter: "Adapter", config: Config, sigmas: Tensor, seed: int, place: int, text: str, num_samples: int
) -> Tensor:
    """`num_samples` decoded samples of one prompt, (num_samples, ...) on the CPU."""
    noise = KeyedNoise(seed, adapter.latent_shape)
    device = _device(config)
    keys = [SampleKey(0, place, number) for number in range(num_samples)]
    media = []
    for start in range(0, num_samples, config.sampling.samples_per_forward):
        batch = keys[start : start + config.sampling.samples_per_forward]
        latents = noise.initial(batch).to(device)
        with _autocast(config, device), torch.no_grad():
            latents = ode(adapter.velocity, sigmas, latents, adapter.encode([text] * len(batch)))
            media.append(adapter.decode(latents).cpu())
    return torch.cat(media)


def _autocast(config: Config, device: str) -> contextlib.AbstractContextManager[Any]:
    if config.model.autocast == "none":
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, torch.bfloat16)


def _device(config: Config) -> str:
    if config.run.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.run.device


def _prompts(config: Config, adapter: "Adapter") -> list[str]:
    if config.evaluation.prompts:
        return config.evaluation.prompts
    return read_prompts(Path(config.prompts.file)).texts if config.prompts.file else adapter.prompts


def _default_folder(source: Path, chosen: _Source) -> Path:
    name = f"{chosen.weights}-{chosen.loaded.iteration:08d}" if chosen.loaded else "base"
    return (source if source.is_dir() else Path(chosen.config.run.folder)) / "samples" / name


def _described(chosen: _Source) -> str:
    if chosen.loaded is None:
        return "base model"
    return f"{'averaged' if chosen.weights == 'ema' else 'live'} weights of iteration {chosen.loaded.iteration}"
