"""What goes wrong around many ranks: settings that disagree, restarts, rewards that fail on some ranks."""

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from stretto.choose import Choice, choose
from stretto.policy.schedules import Late, Retain
from stretto.ranks import Ranks as RunRanks
from stretto.recipe import load_recipe
from stretto.record.checkpoint import newest
from stretto.run_record import RunRecord
from stretto.train import open_folder
from tests import rank_cases
from tests.ranks import Ranks
from tests.test_ranks import overrides

RECIPE = Path(__file__).parent.parent / "recipes/digits.toml"


@pytest.mark.parametrize("why", [{"objective.kl_beta": 0.5}, {"advantage.best": 1}, {"objective.kl_beta": 0}])
def test_auto_takes_the_schedule_that_the_recipes_late_reduction_needs(why: dict[str, Any]) -> None:
    words = [word for key, value in why.items() for word in (f"--{key}", str(value))]
    config = load_recipe(RECIPE, [*words, "--parallel.reduction", "late"])
    choice = choose(config, SimpleNamespace(policy=None), num_ranks=2)  # type: ignore[arg-type]
    assert choice.name == "reweight"


def test_a_restart_goes_on_with_its_jobs_own_run_and_not_with_one_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    config = load_recipe(RECIPE, ["--run.folder", str(tmp_path / "run")])
    alone = RunRanks((1, 1, 1, 1))

    def start(restarts: int) -> None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        with open_folder(config, alone) as folder:
            assert folder is not None
            folder.metrics.write_text('{"iteration": 0}\n')

    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agents.port))
    start(0)
    start(0)  # its host was not the one that counts the restart
    another = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_PORT", str(another.port))
    for restarts in (0, 1):
        with pytest.raises(ValueError, match=r"already holds a run; go on with it \(--resume auto\)"):
            start(restarts)


def test_a_folder_that_was_made_for_nothing_goes_with_a_rank_that_fails(tmp_path: Path) -> None:
    alone, there = RunRanks((1, 1, 1, 1)), []
    alone.failures = SimpleNamespace(leave=lambda error: there.append((tmp_path / "run").exists()))  # type: ignore
    config = load_recipe(RECIPE, ["--run.folder", str(tmp_path / "run")])
    with suppress(ValueError), open_folder(config, alone), alone.failing_fast():
        assert (tmp_path / "run/.lock").is_file()
        raise ValueError("num_heads=4 cannot be split over 3 ranks")
    assert there == [False]


FIRST_ALONE = """
first = []

def first_alone(media, prompts):
    first.extend(prompts[:1] if not first else [])
    return [float(m.mean()) if prompt == first[0] else 0.5 for m, prompt in zip(media, prompts)]
"""


def test_what_teaches_nothing_moves_the_weights_alike_on_any_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(FIRST_ALONE)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.read_text().replace('"digits"\n\n[adv', f'"{tmp_path}/reward.py:first_alone"\n\n[adv'))
    saved = {}
    for num_ranks, schedule in ((1, "reweight"), (1, "retain"), (2, "retain")):
        folder = tmp_path / f"{num_ranks}-{schedule}"
        settings = {
            "run__iterations": 3,
            "prompts__shuffle": False,
            "prompts__per_iteration": 1,
            "sampling__steps": 3,
        }
        words = overrides(folder, schedule__name=schedule, prompts__samples=2, evaluation__every=0, **settings)
        ranks.run(num_ranks, rank_cases.trained, str(recipe), words, timeout_s=120)
        lines = rank_cases.metrics_of(folder)
        assert [line["zero_spread"] for line in lines] == [0, 1, 1]
        assert [line["ratio"] for line in lines] == [1, 1, 1]
        weights = load_file(next((folder / "weights/live").glob("*.safetensors")))
        saved[num_ranks, schedule] = {name: value.numpy() for name, value in weights.items()}
    for weights in saved.values():
        assert rank_cases.distance(weights, saved[1, "reweight"]) < 1e-4


SICK_AT_EVALUATION = """
from stretto.rewards.failures import ServiceError

evaluations = []

def sick(media, prompts):
    if len(prompts) > 1:
        evaluations.append(len(prompts))
        if len(evaluations) == 1:
            raise ServiceError("is not up yet")
        if len(evaluations) > 2:
            raise KeyError("a reward's own")
    return [float(m.mean()) for m in media]
"""


def test_an_evaluation_asks_a_service_again_and_its_failure_loses_no_iteration_on_any_rank(
    ranks: Ranks, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text(SICK_AT_EVALUATION)
    recipe = tmp_path / "recipe.toml"
    text = RECIPE.read_text().replace('judge = "digits"', "")
    recipe.write_text(text.replace('"digits"\n\n[adv', f'"{tmp_path}/reward.py:sick"\n\n[adv'))
    settings = {"prompts__per_iteration": 1, "prompts__samples": 2, "sampling__steps": 3, "scoring__backoff_s": 0}
    settings |= {"evaluation__every": 1, "evaluation__prompts": "3 8", "evaluation__samples": 1}
    words = overrides(tmp_path / "run", checkpoint__every=0, **settings)
    outcomes = ranks.outcomes(2, rank_cases.trained, str(recipe), words, timeout_s=60)
    told = {outcome.error for outcome in outcomes}
    assert len(told) == 1
    assert "RewardError: reward" in told.pop()
    assert [line["iteration"] for line in rank_cases.metrics_of(tmp_path / "run")] == [0]
    assert [path.name for path in newest(tmp_path / "run/checkpoints")] == ["iteration-00000001"]


def test_a_forward_on_split_layers_waits_for_the_weights_that_the_optimizer_moved(
    ranks: Ranks, tmp_path: Path
) -> None:
    rewards = []
    for num_ranks in (1, 2):
        folder = tmp_path / str(num_ranks)
        settings = {"tuning__method": "full", "evaluation__every": 0, "prompts__samples": 2, "sampling__steps": 3}
        words = overrides(folder, schedule__name="retain", prompts__per_iteration=1, **settings)
        ranks.run(num_ranks, rank_cases.trained, str(RECIPE), [*words, "--parallel.tensor", str(num_ranks)])
        rewards.append([line["reward"] for line in rank_cases.metrics_of(folder)])
    assert rewards[1] == pytest.approx(rewards[0], rel=2e-5)


@pytest.mark.parametrize(("schedule", "rows", "is_told"), [(Late, 240, True), (Late, 1, False), (Retain, 240, False)])
def test_a_run_that_rolls_out_one_by_one_says_so_where_batches_were_asked_for(
    schedule: type, rows: int, is_told: bool
) -> None:
    said: list[str] = []
    learner = SimpleNamespace(
        policy=SimpleNamespace(parameters={}, module=torch.nn.Identity()),
        reduction=SimpleNamespace(kind="late"),
        schedule=schedule.__new__(schedule),
    )
    config = load_recipe(RECIPE, ["--sampling.samples_per_forward", str(rows)])
    ranks = RunRanks((1, 1, 1, 1))
    record: Any = SimpleNamespace(config=config, finished=0, learner=learner, ranks=ranks, _say=said.append)
    RunRecord._greet(record, Choice("reweight", 1, "the recipe says so"))
    told = [line for line in said if "one by one" in line]
    assert bool(told) == is_told
    assert all("sampling.samples_per_forward = 240 holds for evaluation alone" in line for line in told)
