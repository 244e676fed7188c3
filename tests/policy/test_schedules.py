"""Every schedule gives native's gradient, and does exactly the work that it says."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.policy import AdvantageRule, StalePolicyError
from stretto.policy.schedules import Native, Retain, Reweight, TwoSum
from tests.policy.toy import distance, make_batches, make_policy, make_rewards, make_toy, run

DYNAMICS = ["flow_sde", "dance_sde", "cps", "wan_flow_sde"]
LEAN = ["reweight", "two_sum", "hybrid"]


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float64, None), (torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)],
    ids=["float64", "float32", "bfloat16", "autocast"],
)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("tuning", ["lora", "full"])
@pytest.mark.parametrize("rows", [1, 3])
def test_retain_equals_native_bit_for_bit(tuning, checkpointing, dtype, autocast, rows):
    rewards = make_rewards(2, 3)
    latent_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    gradients = []
    for name in ("native", "retain"):
        toy = make_toy(tuning, checkpointing, dtype)
        policy = make_policy(dtype=latent_dtype, autocast=autocast, toy=toy, kl_beta=0.1)
        if dtype is torch.bfloat16:
            inner = policy.velocity
            policy.velocity = lambda x, s, c, inner=inner: inner(
                x.bfloat16(), s.bfloat16(), {k: v.bfloat16() for k, v in c.items()}
            ).float()
        batches = make_batches(2, 3, rows, (0, 1, 2), latent_dtype)
        gradients.append(run(name, policy, batches, rewards)[0])
    native, retain = gradients
    assert all(torch.equal(native[k], retain[k]) for k in native)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_schedule_gives_the_native_gradient(data):
    """T, S, M, groups, rows a forward, dynamics, tuning, guidance, KL, Guard, checkpointing, reward scale: drawn."""
    steps = data.draw(st.integers(2, 6), label="T")
    trained = sorted(data.draw(st.sets(st.integers(0, steps - 2), min_size=1), label="S"))
    num_groups, num_samples = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 5), label="M")
    rows = data.draw(st.integers(1, num_groups * num_samples), label="rows")
    dynamics = data.draw(st.sampled_from(DYNAMICS))
    double = data.draw(st.booleans(), label="float64")
    options = {
        "tuning": data.draw(st.sampled_from(["lora", "full"])),
        "dynamics": dynamics,
        "steps": steps,
        "checkpointing": data.draw(st.booleans()),
        "guidance": data.draw(st.sampled_from([1.0, 3.5])),
        "kl_beta": data.draw(st.sampled_from([0.0, 0.2])),
        "kl_convention": data.draw(st.sampled_from(["flow_grpo", "wan"])),
        "guard": dynamics != "cps" and data.draw(st.booleans()),
        "noise_untrained": data.draw(st.booleans()),
        "dtype": torch.float64 if double else torch.float32,
    }
    num_rewards = data.draw(st.integers(1, 2))
    rule = AdvantageRule(
        std=data.draw(st.sampled_from(["group", "global"])),
        unbiased=data.draw(st.booleans()),
        clamp=data.draw(st.sampled_from([0.8, 5.0])),
        rewards=data.draw(st.sampled_from(["weighted_sum", "normalized"])),
        weights=(1.0, -0.3)[:num_rewards],
    )
    rewards = make_rewards(num_groups, num_samples, num_rewards, data.draw(st.sampled_from([0.0, 50.0])))
    if data.draw(st.booleans(), label="a group without spread"):
        rewards[0] = 0.1
    batches = make_batches(num_groups, num_samples, rows, trained, options["dtype"])
    native = run("native", make_policy(**options), batches, rewards, rule)[0]
    retain_last = data.draw(st.integers(0, len(trained)), label="retain_last")
    if not any(g is not None and bool(g.any()) for g in native.values()):
        return
    native = {k: g for k, g in native.items() if g is not None}
    for name in LEAN:
        ours = run(name, make_policy(**options), batches, rewards, rule, retain_last=retain_last)[0]
        assert distance(ours, native) < (1e-9 if double else 1e-6), name


@pytest.mark.parametrize("name", LEAN)
@pytest.mark.parametrize("rows", [1, 4])
def test_lean_schedules_are_exact_to_1e_6_in_float32_and_1e_9_in_float64(name, rows):
    for dtype, bound in ((torch.float32, 1e-6), (torch.float64, 1e-9)):
        for tuning in ("lora", "full"):
            batches = make_batches(2, 4, rows, (0, 1, 2), dtype)
            rewards = make_rewards(2, 4)
            native = run("native", make_policy(tuning, dtype=dtype), batches, rewards)[0]
            ours = run(name, make_policy(tuning, dtype=dtype), batches, rewards)[0]
            assert distance(ours, native) < bound


@pytest.mark.parametrize("name", LEAN)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_in_bf16_the_error_is_no_larger_than_native_s(name, rows, tuning):
    """Against a float32 truth on the same latents, over several draws of weights."""
    rewards = make_rewards(2, 8)
    batches = make_batches(2, 8, rows, (0, 1, 2, 3, 4))
    truth, native, ours = (
        run(which, make_policy(tuning, steps=6, autocast=autocast), batches, rewards)[0]
        for which, autocast in (("native", None), ("native", torch.bfloat16), (name, torch.bfloat16))
    )
    assert distance(ours, truth) <= 1.1 * distance(native, truth)


@pytest.mark.parametrize("name", LEAN)
def test_rewards_of_1e5_plus_minus_1e_2_lose_nothing(name):
    rewards = make_rewards(2, 4, offset=1e5, spread=1e-2)
    batches = make_batches(2, 4, 2, (0, 1, 2))
    native = run("native", make_policy(), batches, rewards)[0]
    assert distance(run(name, make_policy(), batches, rewards)[0], native) < 1e-6


@pytest.mark.parametrize("name", ["native", "retain", *LEAN])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_work_is_counted_at_the_top_of_the_network(name, rows, guidance, checkpointing):
    steps, trained, samples = 5, (0, 2, 3), 4
    policy = make_policy("lora", steps=steps, guidance=guidance, kl_beta=0.1, checkpointing=checkpointing)
    run(name, policy, make_batches(1, samples, rows, trained), make_rewards(1, samples))
    counts = policy.counter.take()
    again = len(trained) if name == "native" else 0
    assert counts["forwards"] == samples * (steps + again)
    assert counts["forwards_with_grad"] == samples * len(trained)
    kl_backwards = {"reweight": len(trained), "two_sum": len(trained), "hybrid": len(trained) - 1}.get(name, 0)
    assert counts["backwards"] == samples * (len(trained) + kl_backwards)
    assert counts["reference_forwards"] == samples * len(trained)
    assert counts["branches"] == (1 if guidance == 1.0 else 2)


@pytest.mark.parametrize("replay_batch", [0, 3, 8])
@pytest.mark.parametrize("best", [0, 1])
def test_native_with_batched_replay_gives_the_same_gradient_in_fewer_forwards(replay_batch, best):
    rewards, batches = make_rewards(2, 4), make_batches(2, 4, 1, (0, 1, 2))
    rule = AdvantageRule(best=best, worst=best)
    plain = run("native", make_policy(), batches, rewards, rule)[0]
    policy = make_policy()
    calls = []
    policy.module.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    packed = run("native", policy, batches, rewards, rule, replay_batch=replay_batch)[0]
    assert distance(packed, plain) < 1e-6
    rows = 3 * (4 if best else 8)
    assert sum(calls) == -(-rows // (replay_batch or rows))


def test_an_active_clamp_is_mended_exactly_and_counted():
    rewards, batches = make_rewards(2, 5), make_batches(2, 5, 2, (0, 1, 2))
    rule = AdvantageRule(clamp=0.9, std="global")
    native, values, _, _ = run("native", make_policy(), batches, rewards, rule)
    ours, _, _, stats = run("two_sum", make_policy(), batches, rewards, rule)
    assert stats.mended == int((rule(rewards).affine.abs() > 0.9).sum()) > 0
    assert distance(ours, native) < 1e-6
    assert values.abs().max() == 0.9


def test_two_sum_refuses_best_of_n_and_names_the_alternative():
    with pytest.raises(ValueError, match=r"best = 1.*use schedule.name = reweight or retain"):
        TwoSum(make_policy(), AdvantageRule(best=1, worst=1), 4)


@pytest.mark.parametrize("make", [Retain, Reweight])
def test_a_gradient_of_another_policy_version_raises(make):
    policy = make_policy()
    (batch,) = make_batches(1, 2, 2, (0, 1))
    schedule = make(policy)
    trajectory = schedule.rollout(batch, lambda b, _: torch.zeros(2, 1))
    with torch.no_grad():
        next(iter(policy.parameters.values())).add_(1e-3)
    with pytest.raises(StalePolicyError, match="version"):
        schedule.update([trajectory], [torch.ones(2)], 1.0)
    assert all(p.grad is None for p in policy.parameters.values())


@pytest.mark.parametrize("make", [Retain, Reweight])
def test_a_gradient_cannot_be_used_twice(make):
    (batch,) = make_batches(1, 2, 2, (0, 1))
    schedule = make(make_policy())
    trajectory = schedule.rollout(batch, lambda b, _: torch.zeros(2, 1))
    schedule.update([trajectory], [torch.ones(2)], 1.0)
    with pytest.raises(StalePolicyError, match="used already"):
        schedule.update([trajectory], [torch.ones(2)], 1.0)


def test_the_ratio_is_exactly_one_on_policy_and_clipped_after_a_step():
    policy = make_policy()
    batches, rewards = make_batches(1, 4, 2, (0, 1, 2)), make_rewards(1, 4)
    native = Native(policy)
    trajectories = [
        native.rollout(b, lambda b, _: torch.stack([rewards[0, k.sample] for k in b.samples])) for b in batches
    ]
    values = [AdvantageRule()(rewards).values[0, i : i + 2] for i in (0, 2)]
    on_policy = native.update(trajectories, values, 1.0).summary()
    assert (on_policy["ratio"], on_policy["max_log_prob_difference"], on_policy["clip_fraction"]) == (1, 0, 0)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.add_(parameter.grad, alpha=-1e-2)
    off_policy = native.update(trajectories, values, 1.0).summary()
    assert off_policy["clip_fraction"] > 0.5
    assert off_policy["approximate_kl"] > 0


def test_existing_gradients_are_added_to():
    rewards, batches = make_rewards(1, 4), make_batches(1, 4, 2, (0, 1))
    for name in ("native", "retain", *LEAN):
        policy = make_policy()
        alone = run(name, policy, batches, rewards)[0]
        policy = make_policy()
        for p in policy.parameters.values():
            p.grad = None
        once = {k: g.clone() for k, g in run(name, policy, batches, rewards)[0].items()}
        assert distance(once, alone) == 0


def test_kl_has_a_gradient_that_no_advantage_scales():
    rewards = torch.zeros(1, 4, 1)
    batches = make_batches(1, 4, 2, (0, 1, 2))
    for name in ("native", "retain", *LEAN):
        gradient = run(name, make_policy(kl_beta=0.3), batches, rewards)[0]
        assert sum(float(g.abs().sum()) for g in gradient.values()) > 0
    native = run("native", make_policy(kl_beta=0.3), batches, rewards)[0]
    double = run("native", make_policy(kl_beta=0.6), batches, rewards)[0]
    assert distance({k: g * 2 for k, g in native.items()}, double) < 1e-6


def test_samples_run_one_by_one_where_a_weight_has_no_per_sample_gradient():
    toy = make_toy()
    toy.shift = torch.nn.Parameter(torch.zeros(4))
    plain = toy.forward
    toy.forward = lambda x, s, t: plain(x, s, t) + toy.shift
    policy, reference = make_policy(toy=toy), make_policy(toy=toy)
    rewards, batches = make_rewards(1, 4), make_batches(1, 4, 4, (0, 1, 2))
    with pytest.warns(UserWarning, match="one by one: no per-sample gradient for shift"):
        ours, _, schedule, _ = run("reweight", policy, batches, rewards)
    ours = {k: g.clone() for k, g in ours.items()}
    assert not schedule.is_batched
    native = run("native", reference, make_batches(1, 4, 1, (0, 1, 2)), rewards)[0]
    assert distance(ours, native) < 1e-6


@pytest.mark.parametrize("name", ["native", "retain", *LEAN])
def test_a_sample_without_advantage_costs_no_backward_where_that_is_known(name):
    rewards = torch.full((1, 4, 1), 0.1, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, _, _, stats = run(name, make_policy(), make_batches(1, 4, 2, (0, 1, 2)), rewards)
    expected = {"native": (12, 0), "retain": (12, 0), "hybrid": (4, 8)}.get(name, (0, 12))
    assert (stats.skipped_backwards, stats.wasted_backwards) == expected


def test_each_step_s_share_of_the_gradient_follows_the_closed_form():
    policy = make_policy(steps=6)
    trained = (0, 1, 2, 3, 4)
    batches, rewards = make_batches(1, 6, 3, trained), make_rewards(1, 6)
    shares = {}
    for name in ("native", "retain", *LEAN):
        shares[name] = run(name, make_policy(steps=6), batches, rewards)[3].summary()["gradient_share"]
    values = AdvantageRule()(rewards).values[0]
    expected = torch.zeros(5)
    for i in trained:
        steps = torch.full((6,), i)
        keys = [k for b in batches for k in b.samples]
        norms = policy.process.on_policy_cotangent(policy.noise.step(keys, i), steps).flatten(1).norm(dim=1)
        expected[i] = (norms * values.abs()).sum()
    expected = expected / expected.sum()
    for share in shares.values():
        torch.testing.assert_close(torch.tensor(list(share.values())), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LEAN)
def test_one_by_one_is_exact_for_every_lean_schedule(name):
    toy, other = make_toy(), make_toy()
    for network in (toy, other):
        network.shift = torch.nn.Parameter(torch.zeros(4))
        plain = network.forward
        network.forward = lambda x, s, t, plain=plain, network=network: plain(x, s, t) + network.shift
    rewards = make_rewards(2, 3)
    with pytest.warns(UserWarning, match="one by one"):
        ours = run(name, make_policy(toy=toy), make_batches(2, 3, 4, (0, 1, 2)), rewards)[0]
    native = run("native", make_policy(toy=other), make_batches(2, 3, 1, (0, 1, 2)), rewards)[0]
    assert distance(ours, native) < 1e-6
