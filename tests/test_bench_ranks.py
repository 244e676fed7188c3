"""The bench of ranks on one machine: its arithmetic, and what the README makes of it."""

import json

import pytest

from bench import readme
from bench.ranks import PHASES, WHOLE, summarise, whole


def line(iteration, reward, seconds, fingerprint="0a", **more):
    return {
        "iteration": iteration,
        "reward": reward,
        "grad_norm": 2.0,
        "schedule": "retain",
        "reduction": "coalesced",
        "noise_fingerprint": fingerprint,
        "seconds": {"rollout": seconds, "backward": 0.5, "reduction_blocked": 0.1, "reward_behind": 9.0},
        **more,
    }


def test_seconds_are_medians_without_the_first_iteration_and_differences_are_the_first_ones():
    one = [line(0, -4.0, 9.0), line(1, -3.0, 1.0), line(2, -3.0, 2.0), line(3, -3.0, 6.0)]
    other = [line(0, -4.004, 9.0), *one[1:3], line(3, -9.0, 6.0, "0b")]
    case = summarise(other, one)
    assert case["seconds_an_iteration"] == 2.5
    assert case["seconds"] == {phase: {"rollout": 2.0, "backward": 0.5}.get(phase, 0.0) for phase in PHASES}
    assert case["seconds_blocked"] == pytest.approx(0.1)
    assert case["relative_difference"] == pytest.approx({"reward": 1e-3, "grad_norm": 0.0})
    assert not case["same_noise"]
    assert summarise(one, one)["same_noise"]


def test_a_whole_run_is_judged_and_its_phases_are_added_up():
    last = line(1, -1.0, 2.0, evaluation={"judge/accuracy": 0.9})
    last["seconds"]["evaluation"] = 4.0
    case = whole([line(0, -4.0, 1.0, evaluation_at_start={"judge/accuracy": 0.5}), last], 20.0)
    assert (case["seconds"]["rollout"], case["seconds"]["evaluation"], case["seconds_of_training"]) == (3.0, 4.0, 4.0)
    assert case["seconds_of_the_command"] == 20.0
    assert case["seconds_blocked"] == pytest.approx(0.2)
    assert (case["before"]["judge/accuracy"], case["after"]["judge/accuracy"]) == (0.5, 0.9)


def test_the_readme_tells_each_number_of_ranks_and_the_whole_run(tmp_path):
    one = [line(0, -4.0, 9.0), line(1, -3.0, 1.0)]
    ended = line(1, -1.0, 2.0, evaluation={"judge/accuracy": 0.9})
    cases = {
        "recipe, 1 rank": summarise(one, one),
        WHOLE: whole([line(0, -4.0, 1.0, evaluation_at_start={"judge/accuracy": 0.5}), ended], 20.0),
    }
    (tmp_path / "ranks.json").write_text(json.dumps({"command": "a command", "cpus": 2, "cases": cases}))
    told = readme._ranks(tmp_path)
    assert "| recipe, 1 rank | retain, coalesced | 1.50 | 1.00 | 0.50 | 0.10 | 0 | the same |" in told
    assert told[-1].endswith("0.500 → 0.900 after 20 s, of which rollout 3, backward 1.")
