"""The examples do what they say."""

import importlib.util
import json
from pathlib import Path

from stretto.recipe import load_recipe
from stretto.train import train

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_policy_room_alone_learns_the_circle():
    spec = importlib.util.spec_from_file_location("policy_by_hand", EXAMPLES / "policy_by_hand.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rewards = module.main()
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1


def test_a_reward_from_a_file_rises(tmp_path, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    overrides = ["--run.folder", str(tmp_path / "run"), "--run.iterations", "8", "--schedule.race", "0"]
    train(load_recipe(EXAMPLES / "custom_reward.toml", [*overrides, "--evaluation.every", "0", "--run.threads", "1"]))
    rewards = [json.loads(line)["reward"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert sum(rewards[-3:]) > sum(rewards[:3])
