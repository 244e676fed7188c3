"""What every rank does in tests of the training loop over ranks."""

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from stretto.config import Parallel
from stretto.learner import Learner
from stretto.policy.noise import fingerprint
from stretto.ranks import Ranks
from stretto.recipe import load_recipe
from stretto.roll import Roller
from stretto.train import train


def trained(recipe: str, overrides: list[str], made_up: bool = False) -> dict[str, Any]:
    """Train a recipe here; what this rank saw: latents by sample, and its gradients before the first step.

    made_up: rewards of a sample's number, not of its picture.
    """
    seen: dict[str, Any] = {"latents": {}, "noise": {}, "gradient": None}
    credit, gathered, step = Roller._credit, Roller._gathered, Learner.step

    def watched(self: Roller, flight: Any, *args: Any) -> Any:
        for trajectory in flight.made:
            if trajectory is None or trajectory.batch.is_companion:
                continue
            noise = self.policy.noise.initial(trajectory.batch.samples)
            for key, latents, drawn in zip(trajectory.batch.samples, trajectory.latents, noise):
                seen["latents"][tuple(key)] = hashlib.sha256(latents.numpy().tobytes()).hexdigest()
                seen["noise"][tuple(key)] = fingerprint(drawn)
        credit(self, flight, *args)

    def stepped(self: Learner, **how: Any) -> dict[str, float]:
        if seen["gradient"] is None:
            finish = self.reduction.finish

            def finished(**how: Any) -> None:
                finish(**how)
                gradients = {name: p.grad for name, p in self.reduction.parameters.items() if p.grad is not None}
                whole = self.reduction.whole({name: g.detach().clone() for name, g in gradients.items()})
                seen["gradient"] = {name: _full(g).numpy() for name, g in whole.items()}

            with mock.patch.object(self.reduction, "finish", finished):
                return step(self, **how)
        return step(self, **how)

    def invented(self: Roller, trajectories: Any) -> dict[Any, list[float]]:
        return {place: [float(place.sample * 7 % 5)] for place in gathered(self, trajectories)}

    with (
        mock.patch.object(Roller, "_gathered", invented if made_up else gathered),
        mock.patch.object(Roller, "_credit", watched),
        mock.patch.object(Learner, "step", stepped),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        train(load_recipe(Path(recipe), overrides))
    return seen


def _full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def distance(gradient: dict[str, Any], expected: dict[str, Any]) -> float:
    """Relative L2 of a gradient, by the same names."""
    assert gradient.keys() == expected.keys()
    difference = sum(float(np.square(gradient[name] - expected[name]).sum()) for name in expected)
    return float((difference / sum(float(np.square(value).sum()) for value in expected.values())) ** 0.5)


def timeouts(seconds: float) -> list[float]:
    """How long each group that a run of two data ranks and two tensor ranks makes would wait, in seconds."""
    with Ranks.open(Parallel(shard=2, tensor=2, timeout_s=seconds)) as ranks:
        assert ranks.mesh is not None
        groups = [ranks._control, ranks.new_control_group(), ranks.group_of("shard"), ranks.shard_mesh.get_group()]
        groups += [ranks.mesh["tensor"].get_group(), ranks.mesh["shard"].get_group()]
        backends = [group._get_backend(torch.device("cpu")) for group in groups if group is not None]
        return [backend.options._timeout.total_seconds() for backend in backends]


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics without what differs between two runs of the same thing: seconds and bytes."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "held_bytes")} for line in lines]
