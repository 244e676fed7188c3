"""Training over ranks: the same samples, rewards, gradient and metrics, however many ranks make them."""

from pathlib import Path
from typing import Any

import pytest

from stretto.config import Parallel
from stretto.ranks import mesh_sizes
from tests import rank_cases
from tests.ranks import Ranks

ROOT = Path(__file__).parent.parent
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in ((2, "reweight"), (3, "retain"), (4, "retain"))]
SMALL = {
    "run.iterations": 2,
    "run.threads": 1,
    "run.device": "cpu",
    "prompts.per_iteration": 2,
    "prompts.samples": 5,
    "sampling.steps": 4,
    "sampling.samples_per_forward": 1,
    "trained_steps.rule": "list",
    "trained_steps.steps": "0 2",
    "advantage.std": "group",
    "objective.kl_beta": 0,
    "schedule.race": 0,
    "evaluation.every": 0,
    "evaluation.samples": 3,
    "tuning.rank": 4,
    "tuning.alpha": 8,
    "optimizer.clip_norm": 1e9,
    "checkpoint.every": 1,
}
FEWER = {"run__iterations": 1, "prompts__samples": 3, "sampling__steps": 3, "trained_steps__steps": "0 1"}
"""For ranks that send many messages a forward; tests/test_ranks_models.py goes on after the first update."""


def overrides(folder: Path, **settings: Any) -> list[str]:
    words = {"run.folder": folder, **SMALL, **{key.replace("__", "."): value for key, value in settings.items()}}
    if words["trained_steps.rule"] != "list":
        del words["trained_steps.steps"]
    return [word for key, value in words.items() for word in (f"--{key}", *str(value).split())]


class Runs:
    """Runs the digits recipe on ranks, each setting once."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        self._one: dict[str, Any] = {}

    def run(self, num_ranks: int, **settings: Any) -> dict[str, Any]:
        """What all ranks together saw, and what was written."""
        folder = self.folder / f"{len(list(self.folder.iterdir()))}"
        words = overrides(folder, **settings)
        seen = self.ranks.run(num_ranks, rank_cases.trained, str(ROOT / "recipes/digits.toml"), words, timeout_s=120)
        latents = [key for part in seen for key in part["latents"]]
        sharing = settings.get("parallel__ulysses", 1) * settings.get("parallel__tensor", 1)
        assert len(latents) == sharing * len(set(latents))
        return {
            "latents": {k: v for part in seen for k, v in part["latents"].items()},
            "noise": {k: v for part in seen for k, v in part["noise"].items()},
            "gradients": [part["gradient"] for part in seen],
            "metrics": rank_cases.metrics_of(folder),
        }

    def one(self, **settings: Any) -> dict[str, Any]:
        """The same on one process."""
        key = repr(sorted(settings.items()))
        if key not in self._one:
            self._one[key] = self.run(1, **settings)
        return self._one[key]


@pytest.fixture(scope="module")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(ranks, tmp_path_factory.mktemp("runs"))


def compare(ours: dict[str, Any], one: dict[str, Any], tolerance: float = 1e-6, *, is_bitwise: bool = True) -> None:
    """Samples, gradient and metrics of two runs; samples of the second iteration follow the first update."""
    assert ours["noise"] == one["noise"]
    first = {key for key in one["latents"] if key[0] == 0}
    if is_bitwise:
        assert {k: ours["latents"][k] for k in first} == {k: one["latents"][k] for k in first}
    expected = one["gradients"][0]
    for gradient in ours["gradients"]:
        assert rank_cases.distance(gradient, expected) <= tolerance
    compare_metrics(ours["metrics"], one["metrics"])


def compare_metrics(ours: list[dict[str, Any]], one: list[dict[str, Any]]) -> None:
    """The metrics of two runs, line by line."""
    for mine, theirs in zip(ours, one, strict=True):
        assert mine["noise_fingerprint"] == theirs["noise_fingerprint"]
        loose = 1e-6 if mine["iteration"] == 0 else 1e-2  # the first step of AdamW enlarges rounding
        for name in ("reward", "reward_std", "grad_norm", "ratio", "zero_spread"):
            assert mine[name] == pytest.approx(theirs[name], rel=loose)


@pytest.mark.parametrize(("num_ranks", "schedule"), [(2, "retain"), (3, "reweight"), (4, "reweight"), *SLOW])
def test_the_samples_and_their_gradient_do_not_depend_on_the_number_of_ranks(
    runs: Runs, num_ranks: int, schedule: str
) -> None:
    one = runs.one(schedule__name=schedule)
    ours = runs.run(num_ranks, schedule__name=schedule)
    first = ours["metrics"][0]
    num_rounds = 2 * -(-5 // num_ranks)  # of every prompt group by itself
    expected = ("late", num_rounds) if schedule == "reweight" else ("coalesced", 1)
    assert (first["reduction"], first["reductions"]) == expected  # one bucket
    compare(ours, one)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"parallel__reduction": "coalesced", "schedule__name": "reweight"}, marks=pytest.mark.slow),
        {"parallel__reduction": "per_step", "schedule__name": "native"},
        pytest.param(
            {"parallel__reduction": "per_step", "schedule__name": "retain", "parallel__optimizer_state": "whole"},
            marks=pytest.mark.slow,
        ),
        pytest.param({"schedule__name": "native"}, marks=pytest.mark.slow),
        pytest.param({"schedule__name": "hybrid"}, marks=pytest.mark.slow),
        pytest.param(
            {"schedule__name": "hybrid", "parallel__reduction": "late", "objective__kl_beta": 0.5},
            marks=pytest.mark.slow,
        ),
        pytest.param({"schedule__name": "two_sum", "prompts__samples": 7}, marks=pytest.mark.slow),
        {"schedule__name": "reweight", "objective__kl_beta": 0.5},
        {"schedule__name": "reweight", "parallel__optimizer_state": "whole", "tuning__method": "full"},
        pytest.param({"schedule__name": "reweight", "advantage__std": "global"}, marks=pytest.mark.slow),
        pytest.param({"schedule__name": "reweight", "scoring__behind": False}, marks=pytest.mark.slow),
        {"schedule__name": "reweight", "optimizer__updates_per_rollout": 2},
        pytest.param({"schedule__name": "reweight", "prompts__samples": 2}, marks=pytest.mark.slow),
        {"objective__reduction": "sum", "trained_steps__rule": "random_window", "trained_steps__start_max": 1},
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values()),
)
def test_every_schedule_and_reduction_gives_the_gradient_of_one_process(runs: Runs, settings: dict[str, Any]) -> None:
    alone = {key: value for key, value in settings.items() if not key.startswith("parallel__")}
    compare(runs.run(3, **settings), runs.one(**alone))


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        pytest.param(*(3, {"parallel__shard": 3, "schedule__name": "reweight"}), marks=pytest.mark.slow),
        (
            3,
            {"parallel__shard": 3, "schedule__name": "reweight", "objective__kl_beta": 0.5, "tuning__method": "full"},
        ),
        pytest.param(
            *(2, {"parallel__shard": 2, "schedule__name": "reweight", "parallel__reduction": "coalesced"}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(3, {"parallel__shard": 3, "schedule__name": "native", "parallel__reduction": "per_step"}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(2, {"parallel__shard": 2, "schedule__name": "two_sum", "prompts__samples": 7}), marks=pytest.mark.slow
        ),
        pytest.param(
            *(
                3,
                {
                    "parallel__shard": 3,
                    "schedule__name": "retain",
                    "tuning__method": "full",
                    "objective__kl_beta": 0.5,
                },
            ),
            marks=pytest.mark.slow,
        ),
        (2, {"parallel__shard": 2, "schedule__name": "hybrid", "objective__kl_beta": 0.5}),
        pytest.param(
            *(2, {"parallel__shard": 2, "schedule__name": "hybrid", "parallel__reduction": "late"}),
            marks=pytest.mark.slow,
        ),
        (4, {"parallel__shard": 2, "schedule__name": "reweight"}),
        pytest.param(
            *(4, {"parallel__shard": 2, "schedule__name": "native", "parallel__reduction": "per_step"}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(3, {"parallel__shard": 3, "schedule__name": "reweight", "optimizer__updates_per_rollout": 2}),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda case: "-".join(str(value) for value in case.values()) if isinstance(case, dict) else str(case),
)
def test_ranks_that_hold_one_model_between_them_give_its_gradient(
    runs: Runs, num_ranks: int, settings: dict[str, Any]
) -> None:
    settings = FEWER | settings
    alone = {key: value for key, value in settings.items() if not key.startswith("parallel__")}
    compare(runs.run(num_ranks, **settings), runs.one(**alone))


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (3, {"parallel__ulysses": 3, "schedule__name": "reweight"}),
        pytest.param(
            *(4, {"parallel__ulysses": 2, "schedule__name": "reweight", "parallel__optimizer_state": "whole"}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(4, {"parallel__ulysses": 2, "parallel__shard": 2, "schedule__name": "reweight"}), marks=pytest.mark.slow
        ),
        (2, {"parallel__tensor": 2, "schedule__name": "retain"}),
        pytest.param(*(4, {"parallel__tensor": 2, "schedule__name": "reweight"}), marks=pytest.mark.slow),
        (4, {"parallel__tensor": 2, "parallel__shard": 2, "schedule__name": "reweight"}),
        pytest.param(
            *(2, {"parallel__tensor": 2, "parallel__shard_rows": False, "schedule__name": "native"}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(4, {"parallel__tensor": 2, "parallel__ulysses": 2, "schedule__name": "reweight"}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(4, {"parallel__ulysses": 2, "schedule__name": "hybrid", "parallel__reduction": "late"}),
            marks=pytest.mark.slow,
        ),
        (4, {"parallel__ulysses": 2, "schedule__name": "two_sum", "prompts__samples": 7}),
        (
            2,
            {"parallel__ulysses": 2, "schedule__name": "retain", "objective__kl_beta": 0.5, "tuning__method": "full"},
        ),
    ],
    ids=lambda case: "-".join(str(value) for value in case.values()) if isinstance(case, dict) else str(case),
)
def test_ranks_that_share_a_sample_give_its_gradient(runs: Runs, num_ranks: int, settings: dict[str, Any]) -> None:
    settings = FEWER | settings
    alone = {key: value for key, value in settings.items() if not key.startswith("parallel__")}
    compare(runs.run(num_ranks, **settings), runs.one(**alone), tolerance=1e-5, is_bitwise=False)


def test_batches_give_the_same_gradient_to_rounding(runs: Runs) -> None:
    ours = runs.run(2, schedule__name="retain", sampling__samples_per_forward=3)
    compare(ours, runs.one(schedule__name="retain"), tolerance=1e-5, is_bitwise=False)


@pytest.mark.parametrize("schedule", ["reweight", pytest.param("retain", marks=pytest.mark.slow)])
def test_a_run_goes_on_with_another_number_of_ranks(runs: Runs, schedule: str) -> None:
    settings = {"schedule__name": schedule, "evaluation__every": 2}
    whole = runs.one(**settings, run__iterations=4)
    folder = runs.folder / f"elastic-{schedule}"
    for until, num_ranks in ((1, 3), (2, 4), (3, 1), (4, 2)):
        words = overrides(folder, **settings, run__iterations=until, run__resume="auto")
        runs.ranks.run(num_ranks, rank_cases.trained, str(ROOT / "recipes/digits.toml"), words, timeout_s=120)
    metrics = rank_cases.metrics_of(folder)
    assert [line["iteration"] for line in metrics] == [0, 1, 2, 3]
    for mine, theirs in zip(metrics, whole["metrics"], strict=True):
        assert mine["noise_fingerprint"] == theirs["noise_fingerprint"]
        assert mine["reward"] == pytest.approx(theirs["reward"], rel=1e-3)
        if "evaluation" in theirs:
            assert mine["evaluation"]["reward"] == pytest.approx(theirs["evaluation"]["reward"], rel=1e-3)


FAILING = """
import torch.distributed as dist
calls = []

def fails_later(media, prompts):
    calls.append(len(media))
    if dist.get_rank() == 1 and len(calls) > 4:
        raise OSError("the scorer's disk is gone")
    return [float(m.mean()) for m in media]
"""


def test_a_reward_that_fails_on_one_rank_stops_all_with_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    recipe = (
        (ROOT / "recipes/digits.toml")
        .read_text()
        .replace('name = "digits"', f'name = "{tmp_path}/failing.py:fails_later"')
    )
    (tmp_path / "recipe.toml").write_text(recipe)
    words = overrides(tmp_path / "run", prompts__samples=4, evaluation__every=0, checkpoint__every=0)
    outcomes = ranks.outcomes(2, rank_cases.trained, str(tmp_path / "recipe.toml"), words, timeout_s=120)
    for outcome in outcomes:
        assert outcome.error.startswith("RewardError: reward ")
        assert "the function raised OSError: the scorer's disk is gone" in outcome.error
    assert [line["iteration"] for line in rank_cases.metrics_of(tmp_path / "run")] == [0]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["iteration-00000001"]


def test_sizes_that_are_not_the_ranks_are_refused_with_the_divisors() -> None:
    assert mesh_sizes(Parallel(), 4) == (4, 1, 1, 1)
    assert mesh_sizes(Parallel(shard=2, tensor=2), 8) == (2, 2, 1, 2)
    with pytest.raises(
        ValueError, match=r"replicate 1 x shard 3 x ulysses 1 x tensor 1 are 3 ranks, and there are 4"
    ):
        mesh_sizes(Parallel(shard=3), 4)
    with pytest.raises(ValueError, match=r"torchrun --nproc-per-node 2 -m stretto train .* divisors of it are 1$"):
        mesh_sizes(Parallel(ulysses=2), 1)


def test_every_group_waits_as_long_as_the_run_says_and_not_half_an_hour(ranks: Ranks) -> None:
    assert ranks.run(4, rank_cases.timeouts, 7.0) == [[7.0] * 6] * 4


def test_every_rank_learns_why_the_run_folder_cannot_be_used(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = overrides(tmp_path / "file")
    for outcome in ranks.outcomes(3, rank_cases.trained, str(ROOT / "recipes/digits.toml"), words):
        assert outcome.error.startswith("ValueError: run.folder")
