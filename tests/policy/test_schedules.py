"""Every schedule gives native's gradient, and does exactly the work that it says."""

import gc
import warnings
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.policy import AdvantageRule, StalePolicyError
from stretto.policy.schedules import Native, Retain, Reweight, TwoSum, make_schedule
from tests.policy.toy import distance, make_batches, make_policy, make_toy, run

DYNAMICS = ["flow_sde", "dance_sde", "cps", "wan_flow_sde"]
LEAN = ["reweight", "two_sum", "hybrid"]


def make_rewards(num_groups, num_samples, num_rewards=1, offset=0.0, spread=1.0):
    random = torch.Generator().manual_seed(num_groups * 31 + num_samples)
    values = torch.randn(num_groups, num_samples, num_rewards, generator=random, dtype=torch.float64)
    return offset + spread * values


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


class Interruption(Exception):
    """Something that goes wrong in the middle."""


@pytest.mark.parametrize("where", ["rollout", "reward", "stale"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["retain", *LEAN])
def test_after_an_error_the_next_update_is_as_if_nothing_had_happened(name, rows, where):
    rewards, batches = make_rewards(2, 3), make_batches(2, 3, rows, (0, 1, 2))
    expected = run(name, make_policy(kl_beta=0.1), batches, rewards)[0]
    policy = make_policy(kl_beta=0.1)
    schedule = make_schedule(name, policy, rule=AdvantageRule(), num_samples=3)

    def score(batch, latents):
        return torch.stack([rewards[key.prompt, key.sample] for key in batch.samples])

    def failing(batch, latents):
        raise Interruption

    first = schedule.rollout(batches[0], score)
    if where == "rollout":
        good, policy.velocity = policy.velocity, lambda x, s, c: failing(x, s) if float(s[0]) < 0.8 else good(x, s, c)
        with pytest.raises(Interruption):
            schedule.rollout(batches[1], score)
        policy.velocity = good
    elif where == "reward":
        with pytest.raises(Interruption):
            schedule.rollout(batches[1], failing)
    else:
        policy.moved()
        with pytest.raises(StalePolicyError):
            schedule.update([first], [torch.ones(len(batches[0].samples))], 1.0)
    assert all(p.grad is None for p in policy.parameters.values())
    with pytest.raises(StalePolicyError):
        schedule.update([first], [torch.ones(len(batches[0].samples))], 1.0)

    trajectories = [schedule.rollout(batch, score) for batch in batches]
    values = AdvantageRule()(rewards).values.flatten().split([len(b.samples) for b in batches])
    schedule.update(trajectories, list(values), 1 / 18)
    assert distance({k: p.grad for k, p in policy.parameters.items()}, expected) == 0


@pytest.mark.parametrize("name", LEAN)
def test_an_update_takes_every_sample_once(name):
    schedule = make_schedule(name, make_policy(), rule=AdvantageRule(), num_samples=2)
    a, b = make_batches(1, 4, 2, (0, 1))
    first = schedule.rollout(a, lambda b, _: torch.arange(2.0).view(2, 1))
    schedule.rollout(b, lambda b, _: torch.arange(2.0).view(2, 1))
    with pytest.raises(StalePolicyError, match="4 samples were rolled out since the last update, 2 are given"):
        schedule.update([first], [torch.ones(2)], 1.0)
    schedule.rollout(a, lambda b, _: torch.arange(2.0).view(2, 1))
    with pytest.raises(ValueError, match="was rolled out already"):
        schedule.rollout(a, lambda b, _: torch.arange(2.0).view(2, 1))


def test_two_sum_asks_for_whole_prompt_groups():
    schedule = TwoSum(make_policy(), AdvantageRule(), 3)
    (batch,) = make_batches(1, 2, 2, (0, 1))
    trajectory = schedule.rollout(batch, lambda b, _: torch.arange(2.0).view(2, 1))
    with pytest.raises(ValueError, match=r"prompt group \(0, 0\) is incomplete"):
        schedule.update([trajectory], [torch.ones(2)], 1.0)


def flattened(toy):
    """Runs a layer on (rows * tokens, width): rows of the layer are then not samples."""
    layer = toy.last
    toy.last = torch.nn.Sequential(Flat(layer))


class Flat(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class OddNorm(torch.nn.LayerNorm):
    """A norm that is not linear in its scale as LayerNorm is."""

    def forward(self, x):
        return torch.nn.functional.layer_norm(x, self.normalized_shape, 1 + self.weight, self.bias, self.eps)


def odd_norm(toy):
    toy.block.norm = OddNorm(8)


def weight_normed(toy):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        toy.last = torch.nn.utils.weight_norm(toy.last)


def own_forward(toy):
    plain = toy.last.forward
    toy.last.forward = lambda x: plain(x) * 2


def compiled(toy):
    toy.block = torch.compile(toy.block, backend="eager")


@pytest.mark.parametrize("change", [flattened, odd_norm, weight_normed, own_forward, compiled])
def test_a_module_whose_samples_cannot_be_told_apart_runs_one_by_one(change):
    rewards, batches = make_rewards(1, 4), make_batches(1, 4, 4, (0, 1, 2))
    networks = make_toy(), make_toy()
    for network in networks:
        change(network)
    native = run("native", make_policy(toy=networks[0]), make_batches(1, 4, 1, (0, 1, 2)), rewards)[0]
    policy = make_policy(toy=networks[1])
    schedule = Reweight(policy)
    schedule.prepare(batches[0])
    assert not schedule.is_batched
    with pytest.warns(UserWarning, match="one by one"):
        trajectory = schedule.rollout(batches[0], lambda b, _: rewards[0])
    schedule.update([trajectory], [AdvantageRule()(rewards).values[0]], 1 / 12)
    assert distance({k: p.grad for k, p in policy.parameters.items()}, native) < 1e-6
    if change is own_forward:
        assert "forward" in vars(networks[1].last)


def test_a_weight_that_is_used_beside_its_layer_is_refused():
    toy = make_toy()
    plain = toy.forward
    toy.forward = lambda x, s, t: plain(x, s, t) + x @ toy.embed.weight.T[:, :4]
    policy = make_policy(toy=toy)
    (batch,) = make_batches(1, 4, 4, (0, 1))
    with pytest.raises(ValueError, match=r"embed\.weight is used in other ways"):
        Reweight(policy).rollout(batch, lambda b, _: torch.zeros(4, 1))
    assert all(p.grad is None for p in policy.parameters.values())


def test_prepare_leaves_a_well_behaved_module_batched():
    for tuning in ("lora", "full"):
        schedule = Reweight(make_policy(tuning, guidance=2.0))
        schedule.prepare(make_batches(1, 4, 4, (0, 1))[0])
        assert schedule.is_batched


@pytest.mark.parametrize("name", ["retain", "hybrid"])
def test_graphs_are_freed_by_the_update(name):
    policy = make_policy()
    schedule = make_schedule(name, policy, rule=AdvantageRule(), num_samples=4)
    alive = []
    inner = policy.velocity

    def velocity(x, s, c):
        out = inner(x, s, c)
        if out.grad_fn is not None:
            alive.append(weakref.ref(out))
        return out

    policy.velocity = velocity
    gc.collect()
    gc.disable()
    try:
        for rewards in (torch.arange(4.0), torch.zeros(4)):
            (batch,) = make_batches(1, 4, 4, (0, 1, 2))
            trajectory = schedule.rollout(batch, lambda b, _, rewards=rewards: rewards.unsqueeze(1))
            values = AdvantageRule()(rewards.view(1, 4, 1)).values[0]
            schedule.update([trajectory], [values], 1.0)
            assert not [ref for ref in alive if ref() is not None]
    finally:
        gc.enable()


def test_a_policy_that_is_gone_leaves_no_hook_behind():
    toy = make_toy()
    policy = make_policy(toy=toy)
    assert len(toy._forward_hooks) == 1
    del policy
    gc.collect()
    assert not toy._forward_hooks


def test_active_dropout_is_refused():
    toy = make_toy()
    toy.block.drop = torch.nn.Dropout(0.1)
    with pytest.raises(ValueError, match=r"dropout is active in block.drop.*module.eval"):
        make_policy(toy=toy)
    toy.eval()
    make_policy(toy=toy)


def test_a_step_of_a_fused_optimizer_and_exchanged_storages_are_noticed():
    policy = make_policy()
    before = policy.version
    parameter = next(iter(policy.parameters.values()))
    live = parameter.data
    parameter.data = live.clone()
    assert policy.version != before
    parameter.data = live
    assert policy.version == before
    policy.moved()
    assert policy.version != before
