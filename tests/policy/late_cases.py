"""What every rank does in tests of late reduction: its own samples, beside one process that has them all."""

import dataclasses
import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist

from stretto.overlap import GradientReducer
from stretto.policy import AdvantageRule, Late, LateHybrid, Reducer, StalePolicyError
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


def make_late(case, policy, reducer) -> Late:
    """Late, or with a number of steps to retain late hybrid."""
    if "retain" in case:
        return LateHybrid(policy, reducer, rule_of(case), case["samples"], retain_last=case["retain"])
    return Late(policy, reducer, rule_of(case), case["samples"])


def expected_of(case, every, rewards):
    """The gradient of one process: reweight's, or hybrid's, which is native's too."""
    if "retain" not in case:
        return run("reweight", make(case), every, rewards, rule_of(case))[0]
    native = run("native", make(case), every, rewards, rule_of(case))[0]
    expected = run("hybrid", make(case), every, rewards, rule_of(case), retain_last=case["retain"])[0]
    assert distance(expected, native) < (1e-12 if case["dtype"] == "float64" else 1e-6)
    return expected


def gradients_equal_one_process(*cases) -> list[bool]:
    """Of each case, whether its rounds were folded."""
    return [gradient_equals_one_process(case) for case in cases]


def gradient_equals_one_process(case) -> bool:
    """The delivered gradient, two iterations, against one process; whether rounds were folded.

    behind: so many waves are rolled out before the oldest is updated.
    """
    dtype, trained = getattr(torch, case["dtype"]), case.get("trained", TRAINED)
    rewards = rewards_of(case)
    every = make_batches(case["groups"], case["samples"], 1, trained, dtype)
    expected = expected_of(case, every, rewards)
    policy, group = make(case), dist.new_group()
    reducer = GradientReducer(policy.module, group, late_bound=True, bucket_bytes=200)
    taken: Reducer = reducer
    late = make_late(case, policy, taken)
    batch_of, scale = {batch.samples[0][1:]: batch for batch in every}, 1 / (len(every) * len(trained))
    offset, spread = case.get("offset", (0.0, 1.0))
    tolerance = max(1e-12 if dtype is torch.float64 else 1e-6, torch.finfo(torch.float64).eps * offset / spread)
    waves, behind = waves_of(case["groups"], case["samples"], dist.get_world_size()), case.get("behind", 0)
    num_apart = (bool(case.get("kl")) + ("retain" in case)) * (1 if behind else len(waves))
    for _ in range(2):
        before, flights = reducer.num_sent, []
        for wave in waves:
            flights.append((wave, rolled_out(late, wave, batch_of, rewards, folds=not behind)))
            if len(flights) > behind:
                updated(late, *flights.pop(0), rewards, scale, folds=bool(behind))
            assert all(p.grad is None for p in policy.parameters.values())
        for flight in flights:
            updated(late, *flight, rewards, scale, folds=True)
        num_sent = reducer.num_sent
        assert num_sent - before == len(reducer._buckets) * (sum(map(len, waves)) + num_apart)
        gradient = delivered(late)
        assert num_sent == reducer.num_sent, "nothing is left to reduce when the weights are known"
        far = distance(gradient, expected)
        assert far < tolerance, far
    reducer.close()
    dist.destroy_process_group(group)
    return late.folds


def one_wave(late, wave, batch_of, rewards, scale):
    """Roll this rank's samples of a wave out, fold where they fold, update."""
    return updated(late, wave, rolled_out(late, wave, batch_of, rewards), rewards, scale)


def rolled_out(late, wave, batch_of, rewards, *, folds=True):
    """Roll this rank's samples of a wave out, fold where they fold."""
    rank, mine = dist.get_rank(), []
    for places in wave:
        if places[rank] is None:
            late.idle()
        else:
            mine.append(late.rollout(batch_of[places[rank]], score_of(rewards)))
        if folds and late.folds:
            fold(late, places, rewards)
    return mine


def fold(late, places, rewards):
    has_sample = torch.tensor([place is not None for place in places])
    none = torch.full_like(rewards[0, 0], float("nan"))
    late.fold_round(torch.stack([none if place is None else rewards[place] for place in places]), has_sample)


def updated(late, wave, mine, rewards, scale, *, folds=False):
    """Update a wave that was rolled out; fold it before where that was left."""
    for places in wave if folds and late.folds else []:
        fold(late, places, rewards)
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


def after_errors(case) -> None:
    """What a reset gave up leaves no trace, no graph among it, and requests out of order are refused."""
    rank, n = dist.get_rank(), dist.get_world_size()
    case = {"groups": 1, "samples": 2 * n, "tuning": "lora", "dtype": "float64", "kl": 0.1, "clamp": 1.0, **case}
    rewards = rewards_of(case)
    every = make_batches(1, 2 * n, 1, TRAINED, torch.float64)
    batch_of = {batch.samples[0][1:]: batch for batch in every}
    expected = expected_of(case, every, rewards)
    policy, group = make(case), dist.new_group()
    late = make_late(case, policy, GradientReducer(policy.module, group, late_bound=True))
    trajectory = late.rollout(every[rank], score_of(rewards))
    kept = graphs_of(trajectory)
    assert len(kept) == case.get("retain", 0)
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
    del trajectory
    gc.collect()
    assert not any(reference() is not None for reference in kept)
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


def graphs_of(trajectory):
    """Weak references to the velocities whose graphs are kept."""
    return [weakref.ref(velocity) for part in trajectory.kept for velocity in part.graphs]


def what_hybrid_holds_and_counts(case) -> None:
    """On one rank late hybrid holds, runs and logs what hybrid does; each graph is let go with its update."""
    case = {"groups": 2, "samples": 3, "tuning": "full", "dtype": "float64", "clamp": 0.4, **case}
    rewards, every = rewards_of(case), make_batches(2, 3, 1, (0, 1, 2), torch.float64)
    plain, policy = make(case), make(case)
    expected, values, hybrid, stats = run("hybrid", plain, every, rewards, rule_of(case), retain_last=case["retain"])
    late = make_late(case, policy, GradientReducer(policy.module, dist.group.WORLD, late_bound=True))
    made = [late.rollout(batch, score_of(rewards)) for batch in every]
    assert late.held_bytes == hybrid.held_bytes
    kept = [graphs_of(trajectory) for trajectory in made]
    assert sum(map(len, kept)) == 6 * case["retain"]
    ours = late.stats()
    for group in range(2):
        own = list(values[group].split(1))
        ours.merge(late.update(made[3 * group : 3 * group + 3], own, 1 / 18, values[group].unsqueeze(1)))
        alive = [reference() is not None for references in kept[3 * group :] for reference in references]
        assert alive == [False] * 3 * case["retain"] + [True] * (len(alive) - 3 * case["retain"])
    assert distance(delivered(late), expected) < 1e-12
    assert policy.counter.take() == plain.counter.take()
    assert (ours.num_rows, ours.skipped_backwards) == (stats.num_rows, stats.skipped_backwards)
    assert ours.wasted_backwards == stats.wasted_backwards == (3 if "zero_spread" in case else 0)
    mine, theirs = ours.summary(), stats.summary()
    assert mine.pop("gradient_share") == pytest.approx(theirs.pop("gradient_share"), rel=1e-9)
    assert mine == pytest.approx(theirs, rel=1e-9)
    late.held_bytes = 0
    late.rollout(every[0], score_of(rewards))
    assert late.held_bytes == hybrid.held_bytes / 6
    late.reset()
    late.reducer.close()
