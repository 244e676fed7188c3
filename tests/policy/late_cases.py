"""What every rank does in tests of late reduction: its own samples, beside one process that has them all."""

import dataclasses
import warnings

import pytest
import torch
import torch.distributed as dist

from stretto.overlap import GradientReducer
from stretto.policy import AdvantageRule, Late, Reducer, StalePolicyError
from tests.policy.toy import distance, make_batches, make_policy, make_rewards, run

TRAINED = (0, 2)


def waves_of(num_groups: int, num_samples: int, num_ranks: int) -> list[list[list[tuple[int, int] | None]]]:
    """Waves of rounds of one (prompt, sample) or None a rank: the shared-prompt layout."""
    if num_samples < num_ranks:
        together = num_ranks // num_samples
        groups = [range(p, min(p + together, num_groups)) for p in range(0, num_groups, together)]
    else:
        groups = [range(p, p + 1) for p in range(num_groups)]
    waves = []
    for wave in groups:
        places: list[tuple[int, int] | None] = [(p, m) for p in wave for m in range(num_samples)]
        places += [None] * (-len(places) % num_ranks)
        waves.append([places[i : i + num_ranks] for i in range(0, len(places), num_ranks)])
    return waves


def rewards_of(case):
    rewards = make_rewards(case["groups"], case["samples"], case.get("rewards", 1), *case.get("offset", (0.0, 1.0)))
    if case.get("zero_spread"):
        rewards[0] = rewards[0, :1]
    return rewards


def rule_of(case):
    num_rewards = case.get("rewards", 1)
    kind = "normalized" if num_rewards > 1 else "weighted_sum"
    weights = (0.4, -0.3, 0.2)[:num_rewards] if num_rewards > 1 else (1.0,)
    return AdvantageRule(
        std=case.get("std", "group"), unbiased=case.get("unbiased", False), clamp=case.get("clamp", 5.0),
        rewards=kind, weights=weights, best=case.get("best", 0), worst=case.get("best", 0),
    )  # fmt: skip


def make(case):
    return make_policy(case["tuning"], dtype=getattr(torch, case["dtype"]), kl_beta=case.get("kl", 0.0))


def gradients_equal_one_process(*cases) -> list[bool]:
    """Of each case, whether its rounds were folded."""
    return [gradient_equals_one_process(case) for case in cases]


def gradient_equals_one_process(case) -> bool:
    """The delivered gradient, two iterations, against reweight in one process; whether rounds were folded."""
    dtype = getattr(torch, case["dtype"])
    rewards, rule = rewards_of(case), rule_of(case)
    every = make_batches(case["groups"], case["samples"], 1, TRAINED, dtype)
    expected = run("reweight", make(case), every, rewards, rule)[0]
    policy, group = make(case), dist.new_group()
    reducer = GradientReducer(policy.module, group, late_bound=True, bucket_bytes=200)
    taken: Reducer = reducer
    late = Late(policy, taken, rule, case["samples"])
    batch_of, scale = {batch.samples[0][1:]: batch for batch in every}, 1 / (len(every) * len(TRAINED))
    offset, spread = case.get("offset", (0.0, 1.0))
    tolerance = max(1e-12 if dtype is torch.float64 else 1e-6, torch.finfo(torch.float64).eps * offset / spread)
    for _ in range(2):
        for wave in waves_of(case["groups"], case["samples"], dist.get_world_size()):
            one_wave(late, wave, batch_of, rewards, scale)
            assert all(p.grad is None for p in policy.parameters.values())
        num_sent, gradient = reducer.num_sent, delivered(late)
        assert num_sent == reducer.num_sent, "nothing is left to reduce when the weights are known"
        far = distance(gradient, expected)
        assert far < tolerance, far
    reducer.close()
    dist.destroy_process_group(group)
    return late.folds


def one_wave(late, wave, batch_of, rewards, scale):
    """Roll this rank's samples of a wave out, fold where they fold, update."""
    rank, mine = dist.get_rank(), []
    for places in wave:
        if places[rank] is None:
            late.idle()
        else:
            mine.append(late.rollout(batch_of[places[rank]], score_of(rewards)))
        if late.folds:
            has_sample = torch.tensor([place is not None for place in places])
            none = torch.full_like(rewards[0, 0], float("nan"))
            row = [none if place is None else rewards[place] for place in places]
            late.fold_round(torch.stack(row), has_sample)
    values = late.rule(rewards).values
    worth = [[values.new_zeros(()) if place is None else values[place] for place in places] for places in wave]
    own = [torch.stack([values[k.prompt, k.sample] for k in t.batch.samples]) for t in mine]
    return late.update(mine, own, scale, torch.stack([torch.stack(row) for row in worth]))


def score_of(rewards):
    return lambda batch, latents: torch.stack([rewards[k.prompt, k.sample] for k in batch.samples])


def delivered(late):
    """The gradient by parameter, which is then dropped."""
    late.reducer.deliver()
    gradient = {name: p.grad for name, p in late.policy.parameters.items()}
    for parameter in late.policy.parameters.values():
        parameter.grad = None
    return gradient


def samples_shared_by_two_ranks() -> None:
    """Ranks 2r and 2r + 1 share a sample, each with a part of its gradient (here, all of it: the sum is double)."""
    case = {"groups": 1, "samples": 5, "tuning": "full", "dtype": "float64", "kl": 0.2, "unbiased": True}
    rewards, rule = rewards_of(case), rule_of(case)
    every = make_batches(1, 5, 1, TRAINED, torch.float64)
    expected = run("reweight", make(case), every, rewards, rule)[0]
    policy, group = make(case), dist.new_group()
    reducer = GradientReducer(policy.module, group, late_bound=True)
    late = Late(policy, reducer, rule, 5, ranks_per_sample=2)
    (wave,) = waves_of(1, 5, dist.get_world_size() // 2)
    doubled = [[place for place in places for _ in range(2)] for places in wave]
    one_wave(late, doubled, {batch.samples[0][1:]: batch for batch in every}, rewards, 0.5 / (5 * len(TRAINED)))
    assert late.folds
    assert distance(delivered(late), expected) < 1e-12
    assert not Late(policy, reducer, rule, dist.get_world_size() // 2, ranks_per_sample=2).folds
    reducer.close()
    dist.destroy_process_group(group)


def after_errors() -> None:
    """What a reset gave up leaves no trace, and requests out of order are refused."""
    rank, n = dist.get_rank(), dist.get_world_size()
    case = {"groups": 1, "samples": 2 * n, "tuning": "lora", "dtype": "float64", "kl": 0.1, "clamp": 1.0}
    rewards, rule = rewards_of(case), rule_of(case)
    every = make_batches(1, 2 * n, 1, TRAINED, torch.float64)
    batch_of = {batch.samples[0][1:]: batch for batch in every}
    expected = run("reweight", make(case), every, rewards, rule)[0]
    policy, group = make(case), dist.new_group()
    late = Late(policy, GradientReducer(policy.module, group, late_bound=True), rule, 2 * n)
    trajectory = late.rollout(every[rank], score_of(rewards))
    with pytest.raises(ValueError, match="was rolled out already"):
        late.rollout(every[rank], score_of(rewards))
    with pytest.raises(StalePolicyError, match="given up by a reset"):
        late.update([trajectory], [torch.ones(1)], 1.0, torch.ones(1, n))
    trajectory = late.rollout(every[rank], score_of(rewards))
    with pytest.raises(ValueError, match="weights of 2 rounds, but 1 were rolled out"):
        late.update([trajectory], [torch.ones(1)], 1.0, torch.ones(2, n))
    with pytest.raises(RuntimeError, match="no reward today"):
        late.rollout(every[rank], no_reward)
    late.idle()
    (wave,) = waves_of(1, 2 * n, n)
    late.reset()
    one_wave(late, wave, batch_of, rewards, 1 / (2 * n * len(TRAINED)))
    assert distance(delivered(late), expected) < 1e-12
    with torch.no_grad():
        trajectory = late.rollout(every[rank], score_of(rewards))
        next(iter(policy.parameters.values())).add_(1)
    with pytest.raises(StalePolicyError, match="cannot give the gradient"):
        late.update([trajectory], [torch.ones(1)], 1.0, torch.ones(1, n))
    late.reducer.close()
    dist.destroy_process_group(group)


def no_reward(batch, latents):
    raise RuntimeError("no reward today")


def batches_run_row_by_row() -> None:
    """A batch is as many rounds as it has rows, and that is said once; one rank needs no weights."""
    case = {"groups": 1, "samples": 4, "tuning": "full", "dtype": "float64"}
    rewards, rule = rewards_of(case), rule_of(case)
    every = make_batches(1, 4, 2, TRAINED, torch.float64)
    expected, values = run("reweight", make(case), every, rewards, rule)[:2]
    policy = make(case)
    late = Late(policy, GradientReducer(policy.module, dist.group.WORLD, late_bound=True), rule, 4)
    late.rule = dataclasses.replace(rule, std="global")  # one group: the same, and not folded
    late.prepare(every[0])
    with pytest.warns(UserWarning, match="one by one"):
        trajectories = [late.rollout(batch, score_of(rewards)) for batch in every[:1]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trajectories += [late.rollout(batch, score_of(rewards)) for batch in every[1:]]
    assert not late.folds
    stats = late.update(trajectories, list(values[0].split(2)), 1 / 8)
    assert stats.num_rows == 8
    assert late.held_bytes == 4 * sum(p.numel() * 8 for p in policy.parameters.values())
    assert distance(delivered(late), expected) < 1e-12
    late.reducer.close()
