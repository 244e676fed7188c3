"""Every schedule and every reduction on a sharded FLUX transformer gives the gradient of one process."""

import functools

import pytest

from tests import sharded_cases
from tests.policy.toy import distance

CASE = {"tuning": "full", "dtype": "float64", "samples": 4}
MODULES, STEPS = 4, 3
NOT_OF_THE_GRADIENT = ("reduction", "send", "copies", "step")
IMPORTS_S = 240
"""Each rank's first case imports diffusers, all at once on however few cores."""
TOLERANCE = {"float64": 1e-11, "float32": 2e-6}


@functools.cache
def in_one_process(case):
    return sharded_cases.gradient_in_one_process(dict(case))


def off(gradient, case, **other):
    """How far a gradient is from that of the case in one process."""
    relevant = {key: value for key, value in {**case, **other}.items() if key not in NOT_OF_THE_GRADIENT}
    return distance(gradient, in_one_process(tuple(sorted(relevant.items()))))


def check(ranks, num_ranks, **case):
    case = {**CASE, **case}
    results = ranks.run(num_ranks, sharded_cases.sharded, case, timeout_s=IMPORTS_S)
    assert off(results[0]["gradient"], case) < TOLERANCE[case["dtype"]]
    assert sum(result["rows"] for result in results) == 2 * case["samples"] * STEPS
    return results


@pytest.mark.parametrize(
    ("schedule", "reduction", "tuning", "kl"),
    [
        ("native", "per_step", "full", 0.2),
        ("native", "coalesced", "lora", 0.0),
        ("retain", "per_step", "lora", 0.2),
        ("retain", "coalesced", "full", 0.0),
    ],
)
def test_schedules_that_know_their_weights(ranks, schedule, reduction, tuning, kl):
    """3 ranks have 4 samples: 2 rounds, in the second of which two ranks run companions; shards need padding."""
    case = {"schedule": schedule, "reduction": reduction, "tuning": tuning, "kl": kl, "zero_spread": True}
    for result in check(ranks, 3, **case):
        rounds, training = 4, MODULES if tuning == "full" else MODULES - 1
        own = rounds * STEPS * training if reduction == "per_step" else 0
        assert result["reduce_scatter_single"] == own
        assert result["sent"] == (0 if reduction == "per_step" else training)


@pytest.mark.parametrize("reduction", ["late", "coalesced"])
@pytest.mark.parametrize(
    ("num_ranks", "tuning", "more"),
    [
        (2, "lora", {"kl": 0.3, "checkpointing": True}),
        (2, "full", {}),
        (3, "lora", {"clamp": 0.5, "kl": 0.3}),
        (3, "full", {"zero_spread": True, "kl": 0.3}),
        (4, "full", {}),
    ],
)
def test_reweight(ranks, num_ranks, tuning, more, reduction):
    """Folded (two sums), or where a clamp is active or one round is enough, not; KL apart; companions."""
    training, kl = MODULES if tuning == "full" else MODULES - 1, 2 if "kl" in more else 0
    rounds = 2 * -(-4 // num_ranks)
    for result in check(ranks, num_ranks, schedule="reweight", reduction=reduction, tuning=tuning, **more):
        assert result["sent"] == training * (rounds + kl if reduction == "late" else 1)
        assert result["reduce_scatter_single"] == 0
        assert result["backwards"] == rounds * STEPS * (2 if kl else 1)


HYBRID = [
    (2, 1, "lora", {"kl": 0.3, "checkpointing": True}),
    (3, 1, "full", {"kl": 0.3, "zero_spread": True}),
]
MORE = [
    (3, 3, "lora", {}),
    (2, 2, "full", {}),
    (2, 3, "full", {"kl": 0.3, "checkpointing": True}),
    (3, 2, "lora", {"clamp": 0.5, "kl": 0.3}),
    (2, 1, "full", {"dtype": "float32", "step": True}),
    (4, 2, "full", {"copies": 2, "kl": 0.1, "samples": 6}),
]


@pytest.mark.parametrize("reduction", ["late", "coalesced"])
@pytest.mark.parametrize(
    ("num_ranks", "retain", "tuning", "more"),
    [*HYBRID, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_hybrid(ranks, num_ranks, retain, tuning, more, reduction):
    """What is retained leaves once a prompt group, beside the KL of what is not; nothing is run twice.

    Native's gradient differs from hybrid's in one process by float32's rounding: FLUX rotates queries in float32.
    """
    case = {"schedule": "hybrid", "retain": retain, "reduction": reduction, "tuning": tuning, **more}
    training, kl = MODULES if tuning == "full" else MODULES - 1, "kl" in more
    rounds = 2 * -(-more.get("samples", 4) // num_ranks)
    results = check(ranks, num_ranks, **case)
    assert off(results[0]["gradient"], {**CASE, **case}, schedule="native") < TOLERANCE["float32"]
    for result in results:
        assert result["sent"] == training * (rounds + 2 * kl + 2 if reduction == "late" else 1)
        assert result["reduce_scatter_single"] == 0
        assert result["forwards"] == rounds * 4
        assert result["backwards"] == rounds * (STEPS + kl * (STEPS - retain))


@pytest.mark.parametrize("reduction", ["late", "coalesced"])
def test_copies_of_a_sharded_model(ranks, reduction):
    for result in check(ranks, 4, schedule="reweight", reduction=reduction, copies=2, kl=0.1, samples=6):
        assert result["all_reduce"] == MODULES


def test_every_step_may_send(ranks):
    case = {"schedule": "reweight", "reduction": "late", "send": "every", "dtype": "float32", "step": True}
    for result in check(ranks, 2, **case):
        assert result["sent"] == MODULES * 4 * STEPS


def test_retain_runs_nothing_twice_though_weights_were_dropped_after_each_forward(ranks):
    """The kept graphs gather their weights again, one by one, in native's order."""
    for result in check(ranks, 2, schedule="retain", reduction="coalesced", dtype="float32"):
        assert (result["forwards"], result["backwards"]) == (4 * 4, 4 * STEPS)


@pytest.mark.parametrize(
    ("schedule", "reduction", "tuning"),
    [("retain", "coalesced", "full"), ("reweight", "late", "full"), ("reweight", "coalesced", "lora")],
)
def test_computing_in_bf16_is_as_exact_as_on_one_rank(ranks, schedule, reduction, tuning):
    case = {**CASE, "dtype": "float32", "bf16": True, "tuning": tuning, "schedule": schedule, "reduction": reduction}
    gradient = ranks.run(2, sharded_cases.sharded, case, timeout_s=IMPORTS_S)[0]["gradient"]
    one_process = in_one_process(tuple(sorted(case.items())))
    assert 1e-3 < off(gradient, case, bf16=False) < 1.2 * off(one_process, case, bf16=False)


def test_what_cannot_be_sharded_is_refused(ranks):
    ranks.run(2, sharded_cases.refusals, timeout_s=IMPORTS_S)
