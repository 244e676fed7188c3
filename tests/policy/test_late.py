"""Gradients that leave before their advantages are known equal those of one process that has every sample."""

import dataclasses

import pytest
import torch

from stretto.policy import AdvantageRule, Late, Policy, make_schedule
from tests.policy import late_cases
from tests.policy.toy import distance, make_batches, make_policy, make_rewards, run

SPLITS = [(1, 4), (2, 4), (3, 4), (4, 4), (2, 5), (4, 6), (4, 2), (3, 2)]
"""(ranks, samples of a prompt group): whole and broken quotients either way."""


@pytest.mark.parametrize(("num_ranks", "num_samples"), SPLITS)
def test_late_gradients_equal_one_process_in_float64(ranks, num_ranks, num_samples):
    case = {"groups": 2, "samples": num_samples, "tuning": "lora", "dtype": "float64"}
    not_folded, with_kl = {"kl": 0.3, "clamp": 0.4, "tuning": "full"}, {"kl": 0.3, "zero_spread": True}
    cases = [case, {**case, **not_folded}, {**case, **with_kl}]
    several = num_samples > num_ranks
    for folded in ranks.run(num_ranks, late_cases.gradients_equal_one_process, *cases):
        assert folded == [several, False, several]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("more", [{}, {"kl": 0.1}, {"best": 2}], ids=["folded", "kl", "best of n"])
def test_late_gradients_equal_one_process_in_float32(ranks, num_ranks, more):
    case = {"groups": 2, "samples": 5, "tuning": "full", "dtype": "float32", **more}
    assert set(ranks.run(num_ranks, late_cases.gradient_equals_one_process, case)) == {"best" not in more}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_rewards_with_a_large_offset_lose_nothing(ranks, dtype):
    case = {"groups": 2, "samples": 6, "tuning": "full", "dtype": dtype, "offset": (1e5, 1e-2)}
    assert ranks.run(2, late_cases.gradient_equals_one_process, case) == [True, True]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_separately_normalised_rewards_take_a_sum_each(ranks, num_ranks):
    case = {"groups": 2, "samples": 5, "tuning": "lora", "dtype": "float64", "rewards": 3, "kl": 0.1}
    assert set(ranks.run(num_ranks, late_cases.gradient_equals_one_process, case)) == {True}


def test_ranks_that_share_a_sample_count_it_once(ranks):
    ranks.run(4, late_cases.samples_shared_by_two_ranks)


@pytest.mark.parametrize(
    ("num_ranks", "num_samples"),
    [(2, 5), *(pytest.param(*s, marks=pytest.mark.slow) for s in [*SPLITS[:4], (3, 2)])],
)
def test_graphs_kept_beside_what_left_early_give_the_gradient_of_one_process(ranks, num_ranks, num_samples):
    """Some or all steps retained, folded or not, with the next wave in flight or not; KL; groups without spread."""
    case = {"groups": 3, "samples": num_samples, "tuning": "lora", "dtype": "float64", "trained": (0, 1, 3)}
    cases = [
        {**case, "retain": 1, "kl": 0.3, "zero_spread": True},
        {**case, "retain": 1, "kl": 0.3, "behind": 1},
        {**case, "retain": 2, "behind": 1, "clamp": 0.4, "tuning": "full"},
        {**case, "retain": 3, "kl": 0.3, "behind": 1},
        {**case, "retain": 4, "best": 1, "tuning": "full"},
    ]
    several = num_samples > num_ranks
    for folded in ranks.run(num_ranks, late_cases.gradients_equal_one_process, *cases):
        assert folded == [several, several, False, several, False]


def test_late_gradients_of_a_wave_are_taken_while_the_next_is_in_flight(ranks):
    case = {"groups": 3, "samples": 4, "tuning": "full", "dtype": "float64", "kl": 0.3}
    cases = [{**case, "behind": 1}, {**case, "behind": 1, "clamp": 0.4}, {**case, "behind": 2}]
    for folded in ranks.run(2, late_cases.gradients_equal_one_process, *cases):
        assert folded == [True, False, True]


@pytest.mark.parametrize("retain", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_kept_graphs_in_float32(ranks, retain):
    case = {"groups": 2, "samples": 5, "tuning": "full", "dtype": "float32", "trained": (0, 1, 3), "kl": 0.1}
    assert ranks.run(2, late_cases.gradient_equals_one_process, {**case, "retain": retain}) == [True, True]


@pytest.mark.parametrize("case", [{"retain": 1, "kl": 0.2}, {"retain": 2, "zero_spread": True}])
def test_late_hybrid_holds_runs_and_logs_what_hybrid_does(ranks, case):
    ranks.run(1, late_cases.what_hybrid_holds_and_counts, case)


@pytest.mark.parametrize("case", [{}, {"retain": 1}], ids=["late", "hybrid"])
def test_what_a_reset_gave_up_leaves_no_trace(ranks, case):
    ranks.run(3, late_cases.after_errors, case)


def test_a_batch_runs_row_by_row_and_says_so_once(ranks):
    ranks.run(1, late_cases.batches_run_row_by_row)


@pytest.mark.parametrize(
    ("change", "num_samples", "folds"),
    [({}, 26, True), ({}, 27, False), ({"unbiased": True}, 26, True), ({"unbiased": True}, 27, False),
     ({"std": "global"}, 8, False), ({"best": 1}, 8, False), ({}, 2, False),
     ({"rewards": 3}, 20, True), ({"rewards": 3, "clamp": 3.0}, 20, False)],
)  # fmt: skip
def test_rounds_fold_where_no_clamp_can_be_active(change, num_samples, folds):
    class TwoRanks:
        world_size = 2

    assert Late(make_policy(), TwoRanks(), late_cases.rule_of(change), num_samples).folds is folds


@pytest.mark.parametrize("name", ["native", "retain", "hybrid"])
@pytest.mark.parametrize("options", [{}, {"replay_batch": 3}])
def test_in_lockstep_every_backward_is_run(name, options):
    rewards = make_rewards(2, 3)
    rewards[0] = 1.0
    counts, gradients = [], []
    for in_lockstep in (False, True):
        policy: Policy = make_policy()
        policy.in_lockstep = in_lockstep
        gradient, _, _, stats = run(name, policy, make_batches(2, 3, 1, (0, 1, 2)), rewards, **options)
        counts.append((policy.counter.take()["backwards"], stats.skipped_backwards))
        gradients.append(gradient)
    assert counts[1] == (18, 0)
    assert counts[0][0] + counts[0][1] == 18
    assert counts[0][1] > 0
    assert distance(gradients[1], gradients[0]) < 1e-6


@pytest.mark.parametrize("name", ["native", "retain", "reweight", "hybrid"])
@pytest.mark.parametrize("options", [{}, {"replay_batch": 0}])
def test_a_companion_is_run_and_counts_nowhere(name, options):
    def update(batches):
        policy = make_policy(kl_beta=0.3, dtype=torch.float64)
        policy.in_lockstep = True
        schedule = make_schedule(name, policy, rule=AdvantageRule(), num_samples=3, **options)
        trajectories = [schedule.rollout(batch, late_cases.score_of(rewards)) for batch in batches]
        advantages = [torch.full((1,), 0.5 + i) for i in range(len(batches))]
        stats = schedule.update(trajectories, advantages, 0.1)
        seen = {"rows": stats.num_rows, "kl": stats.summary()["kl"], **stats.summary()["gradient_share"]}
        return {key: p.grad for key, p in policy.parameters.items()}, seen, policy.counter.take()["backwards"]

    rewards = make_rewards(1, 4)
    batches = make_batches(1, 4, 1, (0, 2), torch.float64)
    gradient, seen, backwards = update(batches[:3])
    mine, mine_seen, mine_backwards = update([*batches[:3], dataclasses.replace(batches[3], is_companion=True)])
    assert distance(mine, gradient) < 1e-12
    assert mine_seen == pytest.approx(seen, rel=1e-12)
    assert mine_backwards == backwards * 4 / 3
