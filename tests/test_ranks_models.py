"""A tiny FLUX and a tiny Wan train under every axis of the mesh as one process trains them.

Pictures of random models hardly differ, so advantages would be made of rounding: rewards are made up by sample.
"""

from pathlib import Path
from typing import Any

import pytest

from tests import rank_cases
from tests.ranks import Ranks

RECIPE = """
[run]
folder = "{folder}"
iterations = 2
threads = 1
device = "cpu"
[model]
adapter = "{adapter}"
path = "{path}"
text_length = 16
{size}
[tuning]
rank = 4
alpha = 8
[prompts]
file = "{prompts}"
per_iteration = 1
samples = 3
[sampling]
steps = 3
sigmas = "shifted"
[trained_steps]
rule = "list"
steps = [0, 1]
[[rewards]]
name = "brightness"
[evaluation]
every = 0
[schedule]
race = 0
[optimizer]
clip_norm = 0.0
"""
SIZES = {"flux": "height = 16\nwidth = 24", "wan": "height = 32\nwidth = 48\nframes = 5\nguidance = 3.0"}
AXES: list[tuple[int, dict[str, Any]]] = [
    (2, {"ulysses": 2}),
    (2, {"tensor": 2}),
    (2, {"shard": 2}),
    (4, {"shard": 2, "ulysses": 2}),
    (4, {"replicate": 2, "tensor": 2}),
]


@pytest.mark.parametrize(
    ("name", "tuning", "all_axes"),
    [
        ("flux", "lora", AXES[1::2]),
        ("wan", "lora", AXES[::2]),
        pytest.param("flux", "lora", AXES[::2], marks=pytest.mark.slow),
        pytest.param("wan", "lora", AXES[1::2], marks=pytest.mark.slow),
        pytest.param("flux", "full", AXES[:3], marks=pytest.mark.slow),
        pytest.param("wan", "full", AXES[:3], marks=pytest.mark.slow),
    ],
    ids=lambda value: str(len(value)) if isinstance(value, list) else value,
)
def test_a_tiny_model_trains_under_each_axis(
    ranks: Ranks, folders: dict[str, Path], tmp_path: Path, name: str, tuning: str, all_axes: list[Any]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red cat\n")
    text = RECIPE.format(folder="{folder}", adapter=name, path=folders[name], size=SIZES[name], prompts=prompts)

    def run(num_ranks: int, axes: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Any]]:
        folder = tmp_path / "-".join([str(num_ranks), *axes])
        recipe = tmp_path / f"{folder.name}.toml"
        recipe.write_text(text.replace("{folder}", str(folder)))
        words = ["--tuning.method", tuning, *(w for axis, n in axes.items() for w in (f"--parallel.{axis}", str(n)))]
        seen = ranks.run(num_ranks, rank_cases.trained, str(recipe), words, True, timeout_s=120)
        assert (folder / "weights" / "ema").is_dir()
        return rank_cases.metrics_of(folder), [part["gradient"] for part in seen]

    one, (expected,) = run(1, {})
    for num_ranks, axes in all_axes:
        metrics, gradients = run(num_ranks, axes)
        for gradient in gradients:
            assert rank_cases.distance(gradient, expected) < 1e-5
        for mine, theirs in zip(metrics, one, strict=True):
            assert mine["noise_fingerprint"] == theirs["noise_fingerprint"]
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-2)
