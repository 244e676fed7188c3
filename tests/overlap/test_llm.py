"""The language model of the examples learns the same over several ranks as in one process."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
PARALLEL = {"dp": 2, "up": 2, "tp": 2, "tpsp": 2, "tpsp+dp": 4}


@pytest.fixture(autouse=True)
def _examples_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def train(options):
    import llm

    return llm.train(llm.Settings(**options))


def refusal(options):
    try:
        train(options)
    except ValueError as refused:
        return str(refused)
    return "nothing was refused"


@functools.cache
def one_process(steps):
    return train({"steps": steps})


def compare(ranks, parallel, steps):
    results = ranks.run(PARALLEL[parallel], train, {"parallel": parallel, "steps": steps}, timeout_s=300)
    expected = one_process(steps)
    for losses in results:
        assert [loss for loss, _ in losses] == pytest.approx([loss for loss, _ in expected], rel=0, abs=1e-5)
        assert [norm for _, norm in losses] == pytest.approx([norm for _, norm in expected], rel=1e-4)
    return results


@pytest.mark.parametrize("parallel", PARALLEL)
def test_losses_and_norms_are_those_of_one_process(ranks, parallel):
    compare(ranks, parallel, 6)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", PARALLEL)
def test_fifty_steps_stay_those_of_one_process_and_learn(ranks, parallel):
    for losses in compare(ranks, parallel, 50):
        assert losses[-1][0] < 0.5 * losses[0][0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"parallel": "dp", "batch": 3}, "--batch 3 cannot be split over 2 ranks"),
        ({"parallel": "up", "length": 127}, "--length 127 cannot be split over 2 ranks"),
        ({"parallel": "tpsp", "length": 127}, "--length 127 cannot be split over 2 ranks"),
        ({"parallel": "tp", "heads": 3, "kv_heads": 3, "hidden": 24}, "num_heads=3 cannot be split over 2 ranks"),
        ({"parallel": "tp", "batch": 3}, "--batch 3 must be even"),
        ({"parallel": "none"}, "--parallel none does not go with 2 ranks"),
    ],
)
def test_settings_that_do_not_fit_the_ranks_are_refused(ranks, options, text):
    for message in ranks.run(2, refusal, options):
        assert text in message


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"heads": 5}, "--hidden 96 must be a multiple of twice --heads 5"),
        ({"kv_heads": 3}, "--heads 4 must be a multiple of --kv-heads 3"),
        ({"batch": 0}, "--batch 0 must be at least 1"),
        ({"steps": 0}, "--steps 0 must be at least 1"),
        ({"length": 99999}, "--length 99999 is longer than the text"),
    ],
)
def test_settings_that_make_no_model_are_refused(options, text):
    assert text in refusal(options)


def test_halves_take_no_mask_and_no_attention_that_needs_one():
    import llm
    import llm_halves

    model, tokens = llm.make_model(llm.Settings()), torch.zeros(2, 4, dtype=torch.int64)
    model.config._attn_implementation = "eager"
    with pytest.raises(ValueError, match="attention is 'eager'"):
        llm_halves.use_halves(model)
    model.config._attn_implementation = "sdpa"
    llm_halves.use_halves(model)
    with pytest.raises(TypeError, match="attention_mask"):
        model(tokens, attention_mask=torch.ones_like(tokens))


def test_a_wrong_setting_is_one_line_and_exit_code_2():
    command = [sys.executable, EXAMPLES / "llm.py", "--parallel", "dp"]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 2
    assert ended.stderr == "llm.py: --parallel dp does not go with 1 ranks; see --help\n"
