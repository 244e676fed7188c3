"""The whole loop on tiny random FLUX and Wan pipelines: what it writes, and that it goes on exactly."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from stretto.check import check
from stretto.config import Config
from stretto.recipe import load_recipe
from stretto.record import checkpoint
from stretto.record.signals import Interrupted
from stretto.rewards.scoring import RewardError
from stretto.train import train

ROOT = Path(__file__).parent.parent
FLUX = """
[model]
adapter = "flux"
path = "{model}"
height = 16
width = 24
text_length = 16
"""
FLOW_GRPO = """
[sampling]
steps = 4
sigmas = "dynamic"
dynamics = "flow_sde"
noise_level = 0.9
samples_per_forward = 3
"""
REST = """
[run]
folder = "{folder}"
iterations = 4
threads = 1
[tuning]
rank = 4
alpha = 8
[prompts]
file = "{prompts}"
per_iteration = 2
samples = 3
[optimizer]
lr = 1e-2
[[rewards]]
name = "{rewards}:redness"
[evaluation]
every = 2
samples = 2
[checkpoint]
every = 1
[schedule]
race = 0
"""
REWARDS = """
def redness(media, prompts, weight, **metadata):
    return [float(m[..., 0, :, :].mean() - m[..., 1, :, :].mean()) * w * 1e3 for m, w in zip(media, weight)]

def count_lines(media, prompts):
    return [float("nan") if i == 1 else 0.0 for i in range(len(media))]

def dice(media, prompts):
    import torch
    return torch.rand(len(prompts)).tolist()

def two(media, prompts):
    return [0.0, 1.0]
"""


@pytest.fixture
def recipe(folders, tmp_path):
    """A function that writes a recipe file for a tiny FLUX and returns its path."""
    rows = [{"prompt": text, "weight": 1.0 + i} for i, text in enumerate(["a red cat", "a dog", "a dog"])]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(REWARDS)

    def write(folder="run"):
        text = FLUX + FLOW_GRPO + REST
        path = tmp_path / f"{folder}.toml"
        path.write_text(
            text.format(
                model=folders["flux"],
                folder=tmp_path / folder,
                prompts=tmp_path / "prompts.jsonl",
                rewards=tmp_path / "rewards.py",
            )
        )
        return path

    return write


def lines_of(folder):
    """The metrics without what differs between two runs of the same thing: seconds and bytes."""
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "held_bytes")} for line in lines]


def state_of(folder):
    newest = checkpoint.newest_whole(Path(folder) / "checkpoints")
    tensors = {kind: checkpoint.read_tensors(newest, f"{kind}/") for kind in ("weights", "optimizer", "ema")}
    return {**newest.plain, **tensors}


def assert_same(a, b):
    """Two nested states, equal to the bit."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


SMALL = {
    "model.text_length": 16,
    "run.iterations": 2,
    "run.threads": 1,
    "prompts.per_iteration": 2,
    "prompts.samples": 3,
    "evaluation.every": 2,
    "evaluation.samples": 1,
    "evaluation.steps": 3,
    "tuning.rank": 4,
    "tuning.alpha": 8,
    "schedule.race": 0,
}
SIZES = {
    "flux": {"model.height": 16, "model.width": 24, "sampling.samples_per_forward": 3},
    "wan": {"model.height": 32, "model.width": 48, "sampling.samples_per_forward": 2},
}


@pytest.mark.filterwarnings("ignore:.*one by one")
@pytest.mark.parametrize("tuning", ["lora", "full"])
@pytest.mark.parametrize("name", ["flux_flow_grpo", "flux_dance_grpo", "wan_flow_grpo", "wan_dance_grpo"])
def test_every_shipped_recipe_trains_and_checks_in_small(name, tuning, folders, tmp_path, monkeypatch):
    """The recipes as they are but for size: five steps where they have more, tiny random pipelines, float32."""
    monkeypatch.chdir(ROOT)
    model = name.partition("_")[0]
    steps = 5
    settings = SMALL | SIZES[model] | {"run.folder": tmp_path / "run", "model.path": folders[model]}
    settings |= {"sampling.steps": steps, "tuning.method": tuning, "model.dtype": "float32", "model.autocast": "none"}
    if model == "wan" and "flow" in name:
        settings["model.frames"] = 9
    config = load_recipe(ROOT / f"recipes/{name}.toml", [str(w) for k, v in settings.items() for w in (f"--{k}", v)])
    train(config)
    lines = lines_of(tmp_path / "run")
    trained = 4 if "flow" in name else 2
    has_kl = config.objective.kl_beta > 0
    assert [line["iteration"] for line in lines] == [0, 1]
    for line in lines:
        assert line["grad_norm"] > 0
        assert line["ratio"] == 1
        assert line["forwards_per_sample"] == steps
        assert line["backwards_per_sample"] == trained
        assert line["reference_forwards_per_sample"] == (trained if has_kl else 0)
        assert line["guidance_branches"] == (2 if model == "wan" else 1)
    assert (tmp_path / "run/weights/live").is_dir()

    check(config, tmp_path / "check.json")
    rows = {row["schedule"]: row for row in json.loads((tmp_path / "check.json").read_text())["rows"]}
    assert rows["retain"]["is_bitwise"]
    for schedule in ("reweight", "two_sum", "hybrid"):
        assert not rows[schedule]["refused"]
        assert rows[schedule]["relative_l2"] < (1e-6 if model == "flux" else 2e-6)  # guidance amplifies rounding
        assert rows[schedule]["forwards"] == steps


@pytest.mark.parametrize("schedule", ["reweight", "retain", "two_sum", "native"])
def test_a_run_that_stopped_goes_on_as_one_that_never_did(schedule, recipe, tmp_path):
    """Stopped twice at different iterations, LoRA with EMA, a moving window, prompts in shuffled passes."""
    extra = [
        "--schedule.name",
        schedule,
        "--trained_steps.rule",
        "progressive_window",
        "--trained_steps.move_every",
        "1",
    ]
    whole = load_recipe(recipe(folder="whole"), extra)
    train(whole)
    path = recipe(folder="parts")
    for until in (1, 3, 4):
        train(
            load_recipe(
                path, [*extra, "--run.iterations", str(until), "--run.resume", "auto", "--evaluation.every", "0"]
            )
        )
    ours, theirs = lines_of(tmp_path / "parts"), lines_of(tmp_path / "whole")
    for line in theirs:
        line.pop("evaluation", None), line.pop("evaluation_at_start", None)
    assert ours == theirs
    a, b = state_of(tmp_path / "parts"), state_of(tmp_path / "whole")
    for key in ("weights", "optimizer", "ema", "num_optimizer_steps"):
        assert_same(a[key], b[key])


def test_kill_9_at_any_moment_loses_nothing(recipe, tmp_path):
    """Two real processes killed, one in the middle of an iteration and one right after it began."""
    train(load_recipe(recipe(folder="whole"), []))
    path = recipe(folder="killed")
    metrics = tmp_path / "killed/metrics.jsonl"
    for num_lines, delay in ((1, 0.0), (3, 0.05)):
        process = subprocess.Popen(
            [sys.executable, "-m", "stretto", "train", str(path), "--resume", "auto"], stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= num_lines:
                break
            time.sleep(0.005)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
    train(load_recipe(path, ["--run.resume", "auto"]))
    assert lines_of(tmp_path / "killed") == lines_of(tmp_path / "whole")
    a, b = state_of(tmp_path / "killed"), state_of(tmp_path / "whole")
    assert_same(a, b)


def test_a_truncated_checkpoint_is_named_and_the_one_before_it_used(recipe, tmp_path, capsys):
    path = recipe()
    train(load_recipe(path, ["--run.iterations", "3", "--evaluation.every", "0"]))
    newest = checkpoint.newest(tmp_path / "run/checkpoints")[0]
    os.truncate(newest / "__0_0.distcp", 100)
    train(load_recipe(path, ["--run.resume", "auto", "--evaluation.every", "0"]))
    out = capsys.readouterr().out
    assert f"{newest} is damaged" in out
    assert "going on from iteration 2 of 4" in out
    train(load_recipe(recipe(folder="whole"), ["--evaluation.every", "0"]))
    assert lines_of(tmp_path / "run") == lines_of(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint(number, recipe, tmp_path, monkeypatch):
    from stretto.learner import Learner

    learn = Learner.learn

    def learn_and_be_signalled(self, iteration):
        if iteration == 1:
            os.kill(os.getpid(), number)
        return learn(self, iteration)

    monkeypatch.setattr(Learner, "learn", learn_and_be_signalled)
    with pytest.raises(Interrupted):
        train(load_recipe(recipe(), ["--checkpoint.every", "0", "--evaluation.every", "0"]))
    assert checkpoint.newest_whole(tmp_path / "run/checkpoints").iteration == 2
    assert len(lines_of(tmp_path / "run")) == 2


@pytest.mark.parametrize("over", ["parts", "all"])
def test_several_updates_a_rollout_make_the_first_lean_and_the_others_native(over, recipe, tmp_path):
    extra = ["--optimizer.updates_per_rollout", "2", "--optimizer.updates_over", over, "--schedule.name", "retain"]
    train(load_recipe(recipe(), [*extra, "--run.iterations", "2"]))
    lines = lines_of(tmp_path / "run")
    trained, share = 3, 0.5 if over == "parts" else 1.0
    for line in lines:
        assert len(line["grad_norms"]) == 2
        assert line["forwards_per_sample"] == 4 + trained * share
        assert line["backwards_per_sample"] == trained * (0.5 + 0.5 if over == "parts" else 2)
        assert line["max_log_prob_difference"] > 0
    train(load_recipe(recipe(folder="native"), [*extra[:-1], "native", "--run.iterations", "2"]))
    assert_same(state_of(tmp_path / "run")["weights"], state_of(tmp_path / "native")["weights"])


def test_a_skipped_spike_changes_no_weight_and_is_counted(recipe, tmp_path):
    train(load_recipe(recipe(), ["--optimizer.spike_norm", "1e-30", "--run.iterations", "2"]))
    assert [line["skipped_steps"] for line in lines_of(tmp_path / "run")] == [1, 1]
    state = state_of(tmp_path / "run")
    assert state["num_optimizer_steps"] == 0
    assert_same(state["weights"], state["ema"])


def test_samples_do_not_depend_on_how_they_are_batched(recipe, tmp_path):
    fingerprints, rewards = set(), []
    for rows in (1, 2, 6):
        folder = f"rows{rows}"
        extra = ["--sampling.samples_per_forward", str(rows), "--run.iterations", "1", "--evaluation.every", "0"]
        train(load_recipe(recipe(folder=folder), extra))
        (line,) = lines_of(tmp_path / folder)
        fingerprints.add(line["noise_fingerprint"])
        rewards.append((line["reward"], line["grad_norm"]))
    assert len(fingerprints) == 1
    assert rewards[1] == pytest.approx(rewards[0], rel=1e-5)
    assert rewards[2] == pytest.approx(rewards[0], rel=1e-5)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("count_lines", r"reward '.*count_lines', sample 1 of prompt group 0 \(iteration 0\): returned nan"),
        ("two", r"returned shape \(2,\), not \(3,\)"),
    ],
)
def test_a_reward_that_misbehaves_stops_the_run_and_is_named(function, message, recipe, tmp_path):
    path = recipe()
    path.write_text(path.read_text().replace(":redness", f":{function}"))
    with pytest.raises(RewardError, match=message):
        train(load_recipe(path, ["--evaluation.every", "0"]))
    assert lines_of(tmp_path / "run") == []
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_checkpoint_of_another_model_is_refused(recipe, tmp_path):
    path = recipe()
    extra = ["--run.iterations", "1", "--evaluation.every", "0"]
    train(load_recipe(path, extra))
    with pytest.raises(ValueError, match="checkpoint of another model"):
        train(load_recipe(path, [*extra, "--run.resume", "auto", "--tuning.rank", "2"]))


def test_patience_stops_a_run_that_no_longer_improves(recipe, tmp_path):
    extra = ["--optimizer.lr", "1e-12", "--evaluation.every", "1", "--evaluation.patience", "2", "--ema.decay", "0"]
    train(load_recipe(recipe(), [*extra, "--run.iterations", "9", "--optimizer.weight_decay", "0"]))
    assert len(lines_of(tmp_path / "run")) < 9


def test_the_default_schedule_follows_the_recipe(recipe, tmp_path):
    for number, (extra, expected) in enumerate((([], "reweight"), (["--objective.kl_beta", "0.1"], "retain"))):
        folder = f"default{number}"
        train(load_recipe(recipe(folder=folder), [*extra, "--run.iterations", "1", "--evaluation.every", "0"]))
        assert state_of(tmp_path / folder)["history"]["choice"]["name"] == expected


def test_the_config_of_a_run_is_written_resolved_and_reads_back(recipe, tmp_path):
    config = load_recipe(recipe(), ["--run.iterations", "1", "--evaluation.every", "0"])
    train(config)
    again = load_recipe(tmp_path / "run/config.toml", [])
    assert isinstance(again, Config)
    assert again == config


def test_a_reward_that_draws_at_random_draws_the_same_after_a_resume(recipe, tmp_path):
    for folder, ends in (("whole", (3,)), ("parts", (2, 3))):
        path = recipe(folder)
        path.write_text(path.read_text().replace(":redness", ":dice"))
        for end in ends:
            extra = ["--run.iterations", str(end), "--run.resume", "auto", "--evaluation.every", "0"]
            train(load_recipe(path, extra))
    assert lines_of(tmp_path / "parts") == lines_of(tmp_path / "whole")


def test_a_run_that_patience_ended_stays_ended(recipe, tmp_path):
    extra = ["--optimizer.lr", "1e-12", "--evaluation.every", "1", "--evaluation.patience", "1", "--ema.decay", "0"]
    extra += ["--optimizer.weight_decay", "0", "--run.resume", "auto"]
    path = recipe()
    train(load_recipe(path, extra))
    before = lines_of(tmp_path / "run")
    train(load_recipe(path, extra))
    assert lines_of(tmp_path / "run") == before


def test_another_strength_or_base_is_another_model_and_other_changes_are_told(recipe, tmp_path, capsys):
    path = recipe()
    extra = ["--run.iterations", "1", "--evaluation.every", "0"]
    train(load_recipe(path, extra))
    resume = ["--run.iterations", "2", "--evaluation.every", "0", "--run.resume", "auto"]
    with pytest.raises(ValueError, match="alpha"):
        train(load_recipe(path, [*resume, "--tuning.alpha", "64"]))
    capsys.readouterr()
    train(load_recipe(path, [*resume, "--optimizer.lr", "2e-3", "--ema.decay", "0.5"]))
    out = capsys.readouterr().out
    assert "note: optimizer.lr is now 0.002, it was 0.01" in out
    assert "run.resume" not in out


def test_full_tuning_goes_on_only_from_its_own_base(recipe, folders, tmp_path):
    path = recipe()
    extra = ["--evaluation.every", "0", "--tuning.method", "full"]
    train(load_recipe(path, [*extra, "--run.iterations", "1"]))
    other = tmp_path / "other"
    shutil.copytree(folders["flux"], other)
    weights = other / "transformer/diffusion_pytorch_model.safetensors"
    tensors = {name: tensor + 1e-3 for name, tensor in safetensors.torch.load_file(weights).items()}
    safetensors.torch.save_file(tensors, weights)
    with pytest.raises(ValueError, match="base"):
        train(load_recipe(path, [*extra, "--model.path", str(other), "--run.resume", "auto"]))


def test_an_average_that_begins_late_begins_at_the_live_weights(recipe, tmp_path):
    path = recipe()
    train(load_recipe(path, ["--run.iterations", "1", "--evaluation.every", "0", "--ema.decay", "0"]))
    train(load_recipe(path, ["--run.iterations", "2", "--evaluation.every", "0", "--run.resume", "auto"]))
    assert state_of(tmp_path / "run")["num_ema_updates"] == 1


def test_a_kept_choice_is_not_kept_for_other_settings(recipe, tmp_path):
    path = recipe()
    train(load_recipe(path, ["--run.iterations", "1", "--evaluation.every", "0"]))
    extra = ["--run.iterations", "2", "--evaluation.every", "0", "--run.resume", "auto", "--objective.kl_beta", "0.1"]
    train(load_recipe(path, extra))
    assert [line["schedule"] for line in lines_of(tmp_path / "run")] == ["reweight", "retain"]


def test_equal_prompts_stay_apart_in_evaluation(recipe, tmp_path):
    """The recipe's prompts hold "a dog" twice, with weights 2 and 3."""
    path = recipe()
    path.write_text(path.read_text().replace(":redness", ":weight_of"))
    rewards = tmp_path / "rewards.py"
    rewards.write_text(rewards.read_text() + "def weight_of(media, prompts, weight):\n    return weight\n")
    train(load_recipe(path, ["--run.iterations", "1", "--evaluation.every", "1"]))
    assert lines_of(tmp_path / "run")[0]["evaluation"]["reward"] == 2


def test_a_failed_start_leaves_nothing(recipe, tmp_path):
    path = recipe()
    with pytest.raises(ValueError, match="is not a diffusers folder"):
        train(load_recipe(path, ["--model.path", str(tmp_path)]))
    assert not (tmp_path / "run").exists()


def test_an_evaluation_prompt_that_the_model_does_not_know_leaves_nothing(tmp_path):
    words = ["--evaluation.prompts", "x", "--sampling.samples_per_forward", "1", "--schedule.race", "0"]
    config = load_recipe(ROOT / "recipes/digits.toml", [*words, "--run.folder", str(tmp_path / "run")])
    with pytest.raises(ValueError, match="prompt 'x' is not a digit"):
        train(config)
    assert not (tmp_path / "run").exists()
