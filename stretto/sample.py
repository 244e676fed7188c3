"""`stretto sample`: draw pictures from a run, with the ODE.

Takes a run folder (its recipe and newest checkpoint) or a recipe (that run, or the base model before it). The noise
of a picture depends on the seed, the prompt's place and the sample's number alone, and is evaluation's, so that two
weights are compared on the same noise. The hazard is a picture whose weights nobody remembers: `samples.json` beside
the pictures says which, the default folder is named after them, and no folder holds the pictures of two calls.
"""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from stretto.build import build_adapter, build_device, build_prompts, build_sigmas, prepare_process, refuse_ranks
from stretto.config import Config
from stretto.evaluation import EVALUATION, MAX_PROMPTS
from stretto.models.base import Adapter
from stretto.models.trainable import attach_lora, make_full, trainable_parameters
from stretto.policy import KeyedNoise, SampleKey, ode
from stretto.recipe import load_recipe
from stretto.record.atomic import write_atomic
from stretto.record.checkpoint import Checkpoint, best, newest, newest_whole, read_tensors, whole
from stretto.record.media import save_grid, save_media
from stretto.record.trackers import say

__all__ = ["Weights", "sample"]

Weights = Literal["ema", "live", "base"]

_RECORD = "samples.json"


@dataclass(frozen=True)
class _Source:
    """What is sampled: a recipe, and a checkpoint with the weights to put into its model (None for the base)."""

    config: Config
    weights: Weights
    checkpoint: Checkpoint | None


def sample(
    source: Path,
    *,
    prompts: list[str] | None = None,
    num_samples: int = 0,
    num_steps: int = 0,
    seed: int | None = None,
    out: Path | None = None,
    weights: Weights | None = None,
    which: str | None = None,
) -> Path:
    """Draw `num_samples` pictures of every prompt and return the folder with them, a grid and `samples.json`.

    source: a run folder or a recipe. prompts: default the run's evaluation prompts, else its first ten prompts.
    num_samples, num_steps: 0 takes the recipe's (evaluation.samples; evaluation.steps, else sampling.steps). seed:
    None takes run.seed. out: default `samples/<weights>` in the run folder, with the iteration in its name, and a
    number where that holds the pictures of another call. weights: None takes the EMA where the run has one, else the
    live weights; the base where a recipe has no checkpoint yet. which: `newest` (None takes it), `best` or the number
    of an iteration. Raises ValueError where any of these is not there, and for an `out` with another call's pictures.
    """
    refuse_ranks("sample")
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"--seed {seed}: take a seed in 0..2**63 - 1")
    if out is not None:
        _refuse_file(out)
    chosen = _open(source, weights, which)
    config = chosen.config
    prepare_process(config)
    adapter = _adapter(chosen)
    texts = prompts or config.evaluation.prompts or build_prompts(config, adapter).texts[:MAX_PROMPTS]
    count = num_samples or config.evaluation.samples
    seed = config.run.seed if seed is None else seed
    steps = num_steps or config.evaluation.steps or config.sampling.steps
    sigmas = build_sigmas(config, adapter, steps)
    record = _origin(source, chosen) | {"prompts": texts, "samples": count, "steps": steps, "seed": seed}
    folder = _folder(_default_folder(source, chosen) if out is None else out, record, may_number=out is None)
    rows = []
    for place, text in enumerate(texts):
        keys = [SampleKey(EVALUATION, place, number) for number in range(count)]
        rows.append(_draw(adapter, config, sigmas, seed, keys, text))
        for number, picture in enumerate(rows[-1]):
            save_media(picture, folder / f"{place:03d}-{number:03d}")
    save_grid(torch.cat(rows), folder / "grid", columns=count, captions=texts)
    say(f"{len(texts) * count} pictures with the {_described(chosen)} in {folder}")
    return folder


def _open(source: Path, weights: Weights | None, which: str | None) -> _Source:
    """The recipe and the checkpoint that `source`, `weights` and `which` name together."""
    if weights == "base" and which is not None:
        raise ValueError(f"--checkpoint {which}: the base model has no checkpoints; leave out one of the two options")
    if not source.is_dir():
        config = load_recipe(source, [])
        run = Path(config.run.folder)
        is_trained = bool(newest(run / "checkpoints"))
        if not is_trained and (which is not None or weights in ("ema", "live")):
            option = f"--checkpoint {which}" if which is not None else f"--weights {weights}"
            raise ValueError(f"{option}: {run}, the run of {source}, holds no checkpoint yet; take --weights base")
        if weights == "base" or not is_trained:
            return _Source(config, "base", None)
        return _open(run, weights, which)
    if not (source / "config.toml").is_file():
        raise ValueError(f"{source} is not a run folder: it has no config.toml")
    config = load_recipe(source / "config.toml", [])
    if weights == "base":
        return _Source(config, "base", None)
    checkpoint = _checkpoint(source / "checkpoints", which)
    has_ema = any(name.startswith("ema/") for name in checkpoint.tensors)
    if weights == "ema" and not has_ema:
        raise ValueError(f"--weights ema: {source} kept no moving average; take --weights live")
    return _Source(config, weights or ("ema" if has_ema else "live"), checkpoint)


def _checkpoint(folder: Path, which: str | None) -> Checkpoint:
    if which is None or which == "newest":
        checkpoint = newest_whole(folder)
        if checkpoint is None:
            raise ValueError(f"{folder} holds no checkpoint yet; take --weights base")
        for note in checkpoint.notes:
            say(note)
        return checkpoint
    if which != "best" and not (which.isascii() and which.isdecimal()):
        raise ValueError(f"--checkpoint {which}: take newest, best or the number of an iteration")
    there = {path.name: path for path in newest(folder)}
    path = best(folder) if which == "best" else there.get(f"iteration-{int(which):08d}")
    if path is None:
        none = "none was the best of an evaluation; " if which == "best" else ""
        raise ValueError(f"--checkpoint {which}: {none}{folder} has {', '.join(there) or 'no checkpoint'}")
    return whole(path)


def _adapter(chosen: _Source) -> Adapter:
    """The recipe's model with the chosen weights in it."""
    tuning = chosen.config.tuning
    adapter = build_adapter(chosen.config)
    if chosen.checkpoint is None:
        return adapter
    if tuning.method == "lora":
        targets = tuning.targets or adapter.lora_targets
        attach_lora(adapter.transformer, rank=tuning.rank, alpha=tuning.alpha, targets=targets, seed=0)
    else:
        make_full(adapter.transformer)
    values = read_tensors(chosen.checkpoint, "ema/" if chosen.weights == "ema" else "weights/")
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


def _draw(adapter: Adapter, config: Config, sigmas: Tensor, seed: int, keys: list[SampleKey], text: str) -> Tensor:
    """Decoded samples of one prompt, one for each key, on the CPU; evaluation draws the same of the same keys."""
    noise, device = KeyedNoise(seed, adapter.latent_shape), build_device(config)
    rows, media = config.sampling.samples_per_forward, []
    for start in range(0, len(keys), rows):
        batch = keys[start : start + rows]
        condition = adapter.encode([text] * len(batch))
        with torch.autocast(device.type, torch.bfloat16, enabled=config.model.autocast != "none"):
            latents = ode(adapter.velocity, sigmas, noise.initial(batch).to(device), condition)
        media.append(adapter.decode(latents).cpu())
    return torch.cat(media)


def _default_folder(source: Path, chosen: _Source) -> Path:
    name = f"{chosen.weights}-{chosen.checkpoint.iteration:08d}" if chosen.checkpoint else "base"
    return (source if source.is_dir() else Path(chosen.config.run.folder)) / "samples" / name


def _refuse_file(out: Path) -> None:
    """Refuse an --out that is, or lies in, a file."""
    first = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not first.is_dir():
        raise ValueError(f"--out {out}: {first} is a file; name a folder")


def _folder(wanted: Path, record: dict[str, Any], *, may_number: bool) -> Path:
    """The folder for these pictures, marked as theirs; one with another call's is passed over, or refused.

    The same call again draws the same pictures under the same names, so it may have its folder again.
    """
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    for folder in itertools.chain([wanted], numbered if may_number else []):
        if _is_free(folder, record):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / _RECORD, json.dumps(record, indent=1) + "\n")
            return folder
    raise ValueError(f"--out {wanted}: it holds another call's pictures (see {_RECORD}); name another folder")


def _is_free(folder: Path, record: dict[str, Any]) -> bool:
    """Whether a folder has no pictures of ours, or those of an equal call (by run or recipe, it is the same)."""
    if not (folder / _RECORD).is_file():
        return not any(folder.glob("[0-9][0-9][0-9]-[0-9][0-9][0-9].*"))
    try:
        there = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(there, dict) and there | {"source": ""} == record | {"source": ""}


def _origin(source: Path, chosen: _Source) -> dict[str, Any]:
    iteration = chosen.checkpoint.iteration if chosen.checkpoint else None
    return {"source": str(source), "weights": chosen.weights, "iteration": iteration}


def _described(chosen: _Source) -> str:
    if chosen.checkpoint is None:
        return "base model"
    return f"{'averaged' if chosen.weights == 'ema' else 'live'} weights of iteration {chosen.checkpoint.iteration}"
