"""`stretto sample`: the right weights, the right noise, and pictures that say where they come from."""

import json

import numpy as np
import pytest
from PIL import Image

from stretto.config import Config, Evaluation, Prompts, Reward, Run, Sampling, TrainedSteps, Tuning
from stretto.recipe import dump_recipe
from stretto.sample import sample
from stretto.train import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of three iterations, with checkpoints after each."""
    folder = tmp_path_factory.mktemp("sample") / "run"
    config = Config(
        run=Run(folder=str(folder), iterations=3),
        tuning=Tuning(rank=4, alpha=4),
        prompts=Prompts(per_iteration=1, samples=2),
        sampling=Sampling(steps=3, samples_per_forward=2),
        trained_steps=TrainedSteps(rule="list", steps=[0]),
        rewards=[Reward("brightness")],
        evaluation=Evaluation(every=3, samples=2, prompts=["3", "8"]),
    )
    train(config)
    (folder.parent / "recipe.toml").write_text(dump_recipe(config))
    return folder


def pixels(path):
    return np.asarray(Image.open(path)).astype(int)


def test_a_run_is_sampled_as_evaluation_drew_it(run):
    folder = sample(run)
    assert folder == run / "samples" / "ema-00000003"
    assert np.array_equal(pixels(folder / "grid.png"), pixels(run / "grids" / "iteration-000003.png"))
    assert sorted(path.name for path in folder.glob("00*")) == [
        f"00{i}-00{j}.png" for i in range(2) for j in range(2)
    ]


def test_the_base_is_what_the_run_started_from(run, tmp_path):
    sample(run, weights="base", out=tmp_path)
    assert np.array_equal(pixels(tmp_path / "grid.png"), pixels(run / "grids" / "iteration-000000.png"))


def test_the_live_weights_are_others_than_the_averaged(run, tmp_path):
    live, ema = (pixels(sample(run, weights=w, out=tmp_path / w) / "grid.png") for w in ("live", "ema"))
    assert not np.array_equal(live, ema)


def test_a_recipe_stands_for_its_run_and_for_its_base_before_it(run, tmp_path):
    recipe = run.parent / "recipe.toml"
    assert sample(recipe).name == "ema-00000003"
    other = tmp_path / "other.toml"
    other.write_text(recipe.read_text().replace(str(run), str(tmp_path / "other")))
    assert sample(other) == tmp_path / "other" / "samples" / "base"


def test_the_pictures_say_where_they_come_from(run, tmp_path):
    sample(run, prompts=["7"], num_samples=3, num_steps=2, seed=5, weights="live", which="3", out=tmp_path)
    assert json.loads((tmp_path / "samples.json").read_text()) == {
        "source": str(run),
        "weights": "live",
        "iteration": 3,
        "prompts": ["7"],
        "samples": 3,
        "steps": 2,
        "seed": 5,
    }
    assert len(list(tmp_path.glob("000-*.png"))) == 3


def test_the_best_checkpoint_can_be_sampled(run, tmp_path):
    sample(run, which="best", out=tmp_path)
    assert json.loads((tmp_path / "samples.json").read_text())["iteration"] == 3


def test_what_is_not_there_is_told(run, tmp_path):
    with pytest.raises(ValueError, match=r"--checkpoint 2: .* has iteration-00000003"):
        sample(run, which="2")
    with pytest.raises(ValueError, match=r"is not a run folder: it has no config\.toml"):
        sample(tmp_path)
    (tmp_path / "config.toml").write_text((run / "config.toml").read_text())
    with pytest.raises(ValueError, match=r"holds no checkpoint yet; take --weights base"):
        sample(tmp_path)


def test_a_recipe_that_was_changed_since_is_not_sampled_as_another_model(run, tmp_path):
    (tmp_path / "checkpoints").symlink_to(run / "checkpoints")
    text = (run / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(text.replace("rank = 4", "rank = 8"))
    with pytest.raises(ValueError, match=r"another model than config\.toml: .* has shape \(4, .*\) there and \(8, "):
        sample(tmp_path)


def test_a_default_folder_never_holds_the_pictures_of_two_calls(run):
    first = sample(run, weights="live")
    assert sample(run, weights="live", prompts=["7"]).name == f"{first.name}-2"
    assert sample(run, weights="live", seed=9).name == f"{first.name}-3"
    assert sample(run, weights="live") == first
    assert len(list((run / "samples" / f"{first.name}-2").glob("0*.png"))) == 2
    assert json.loads((first / "samples.json").read_text())["prompts"] == ["3", "8"]


def test_a_named_folder_with_another_calls_pictures_is_refused(run, tmp_path):
    sample(run, prompts=["7"], out=tmp_path)
    with pytest.raises(ValueError, match="it holds another call's pictures"):
        sample(run, prompts=["8"], out=tmp_path)
    sample(run, prompts=["7"], out=tmp_path)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"which": "3", "weights": "base"}, "--checkpoint 3: the base model has no checkpoints; leave out one of"),
        ({"which": "foo"}, "--checkpoint foo: take newest, best or the number of an iteration"),
        ({"which": "-3"}, "--checkpoint -3: take newest, best or the number"),
        ({"seed": -1}, r"--seed -1: take a seed in 0\.\.2\*\*63 - 1"),
        ({"seed": 2**63}, "take a seed in"),
    ],
    ids=str,
)
def test_options_that_cannot_be_met_are_told(run, options, told):
    with pytest.raises(ValueError, match=told):
        sample(run, **options)


@pytest.mark.parametrize(
    ("options", "told"),
    [({"which": "best"}, "--checkpoint best"), ({"weights": "ema"}, "--weights ema")],
    ids=["best", "ema"],
)
def test_a_recipe_without_a_run_has_no_weights_but_the_base(run, tmp_path, options, told):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text((run.parent / "recipe.toml").read_text().replace(str(run), str(tmp_path / "other")))
    with pytest.raises(ValueError, match=f"{told}: .*other, the run of .*, holds no checkpoint yet"):
        sample(recipe, **options)


@pytest.mark.parametrize("inner", ["", "deep/er"])
def test_an_out_that_is_a_file_is_refused_before_the_work(run, tmp_path, inner):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--out .*: .*file is a file; name a folder"):
        sample(run, out=tmp_path / "file" / inner)


def test_without_an_evaluation_there_is_no_best(run, tmp_path):
    (tmp_path / "config.toml").write_text((run / "config.toml").read_text())
    (tmp_path / "checkpoints" / "iteration-00000001").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"--checkpoint best: none was the best of an evaluation; .* has iter"):
        sample(tmp_path, which="best")
