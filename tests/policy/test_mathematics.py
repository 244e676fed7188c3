"""Sigmas, stochastic steps, noise, trained steps, advantages, layout: each against what defines it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.policy import (
    AdvantageRule,
    KeyedNoise,
    NonFiniteError,
    Process,
    SampleKey,
    TrainedStepsRule,
    fingerprint,
    make_sigmas,
    ode,
)
from stretto.policy.noise import generator
from tests.policy.toy import make_batches, make_policy, run

DYNAMICS = ["flow_sde", "dance_sde", "cps", "wan_flow_sde"]
fast = settings(max_examples=80, deadline=None, derandomize=True)


@pytest.mark.parametrize("dynamics", DYNAMICS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_the_closed_form_cotangent_is_autograd_s(dynamics, dtype, bound):
    process = Process(make_sigmas("shifted", 10, shift=3.0), dynamics, 0.7)
    random = torch.Generator().manual_seed(0)
    x, velocity, noise = (torch.randn(9, 5, 4, generator=random, dtype=torch.float64).to(dtype) for _ in range(3))
    steps = torch.arange(9)
    velocity.requires_grad_(True)
    mean = process.mean(x, velocity, steps)
    x_next = (mean + process.noise_std(steps, x) * noise).detach()
    process.log_prob(mean, x_next, steps).sum().backward()
    closed = process.on_policy_cotangent(noise, steps)
    error = (closed + velocity.grad).flatten(1).norm(dim=1) / closed.flatten(1).norm(dim=1)
    assert float(error.max()) < bound


def test_step_sizes_of_the_gradient_span_what_was_measured():
    """Over the first 9 of 10 steps at shift 3: 0.051-0.868 for Flow-SDE, 0.066-0.25 for CPS 0.8."""
    sigmas, steps, unit = make_sigmas("shifted", 10, shift=3.0), torch.arange(9), torch.ones(9, 1)
    spans = {}
    for dynamics, level in (("flow_sde", 0.7), ("dance_sde", 0.3), ("wan_flow_sde", 0.0), ("cps", 0.8)):
        size = Process(sigmas, dynamics, level).on_policy_cotangent(unit, steps).abs()
        spans[dynamics] = (round(float(size.min()), 3), round(float(size.max()), 3))
    assert spans["flow_sde"] == pytest.approx((0.051, 0.868), abs=1e-3)
    assert spans["dance_sde"] == pytest.approx((0.63, 1.49), abs=1e-2)
    assert spans["wan_flow_sde"] == pytest.approx((0.20, 1.14), abs=1e-2)
    assert spans["cps"] == pytest.approx((0.066, 0.25), abs=1e-2)


def test_dance_sde_is_flow_sde_with_its_std():
    sigmas = make_sigmas("shifted", 8, shift=3.0)
    x, velocity = torch.randn(2, 1, 6, dtype=torch.float64)
    for i in range(8):
        steps = torch.tensor([i])
        std = 0.3 / math.sqrt(float(sigmas[i] / (1 - (sigmas[1] if i == 0 else sigmas[i]))))
        dance = Process(sigmas, "dance_sde", 0.3).mean(x, velocity, steps)
        torch.testing.assert_close(Process(sigmas, "flow_sde", std).mean(x, velocity, steps), dance)


def test_without_noise_every_step_is_the_ode():
    sigmas = make_sigmas("linear", 6)
    x, velocity = torch.randn(2, 5, 6, dtype=torch.float64)
    steps = torch.arange(5)
    for dynamics in ("flow_sde", "dance_sde", "cps"):
        process = Process(sigmas, dynamics, 1e-12)
        torch.testing.assert_close(process.mean(x, velocity, steps), process.ode_mean(x, velocity, steps))


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("num_steps", [1, 4, 10])
def test_pipeline_sigmas_are_diffusers_own(num_steps, shift):
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(num_steps)
    ours = make_sigmas("pipeline", num_steps, scheduler_config=scheduler.config)
    torch.testing.assert_close(ours.float(), scheduler.sigmas, atol=1e-6, rtol=0)


@pytest.mark.parametrize("shift", [0.1, 0.3, 0.45, 3.0])
def test_shifted_sigmas_begin_at_exactly_one(shift):
    sigmas = make_sigmas("shifted", 10, shift=shift)
    assert float(sigmas[0]) == 1
    std = Process(sigmas, "flow_sde", 0.7)._stochastic["std"]
    assert float(std.max()) < 20


@pytest.mark.parametrize("num_steps", [4, 10])
def test_pipeline_sigmas_of_wan_are_unipc_s(num_steps):
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=3.0, prediction_type="flow_prediction")
    scheduler.set_timesteps(num_steps)
    ours = make_sigmas("pipeline", num_steps, scheduler_config=scheduler.config)
    torch.testing.assert_close(ours.float(), scheduler.sigmas, atol=1e-5, rtol=0)


def test_pipeline_sigmas_of_flux_are_the_points_that_its_pipeline_passes():
    config = {"shift": 1.0, "use_dynamic_shifting": False, "passes_points": True}
    assert make_sigmas("pipeline", 4, scheduler_config=config).tolist() == [1, 0.75, 0.5, 0.25, 0]


@pytest.mark.parametrize("kind", ["exponential", "linear"])
def test_dynamic_sigmas_are_diffusers_own(kind):
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type=kind)
    mu = calculate_shift(1024)
    scheduler.set_timesteps(sigmas=[1 - i / 8 for i in range(8)], mu=mu)
    for name in ("pipeline", "dynamic"):
        ours = make_sigmas(name, 8, num_tokens=1024, scheduler_config=scheduler.config)
        torch.testing.assert_close(ours.float(), scheduler.sigmas, atol=1e-6, rtol=0)


def test_a_schedule_that_does_not_fall_and_a_step_without_noise_are_refused():
    with pytest.raises(ValueError, match="fall strictly"):
        Process([1.0, 0.5, 0.5, 0.0], "flow_sde")
    with pytest.raises(ValueError, match="at most 1"):
        Process([1.0000000000000002, 0.5, 0.0], "flow_sde")
    with pytest.raises(ValueError, match=r"noise_level = 2.0: cps takes a level in \(0, 1\]"):
        Process(make_sigmas("linear", 4), "cps", 2.0)
    with pytest.raises(ValueError, match="trained step 3 of 4 adds no noise under cps"):
        Process(make_sigmas("linear", 4), "cps", 0.8).check_trained((2, 3))
    with pytest.raises(ValueError, match="num_steps = 0"):
        make_sigmas("linear", 0)
    with pytest.raises(ValueError, match="guard"):
        make_policy(dynamics="cps", guard=True)


@fast
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=1, unique=True))
def test_a_draw_depends_on_its_key_alone(keys):
    noise = KeyedNoise(7, (3, 2))
    samples = [SampleKey(*key) for key in keys]
    together = noise.step(samples, 5)
    alone = torch.cat([noise.step([key], 5) for key in reversed(samples)])
    assert torch.equal(together, alone.flip(0))
    assert len({fingerprint(row) for row in together}) == len(samples)
    assert not torch.equal(noise.step(samples, 5), noise.step(samples, 4))
    assert not torch.equal(noise.initial(samples), KeyedNoise(8, (3, 2)).initial(samples))


def test_initial_noise_is_shared_by_a_prompt_group_on_request_and_step_noise_never():
    noise = KeyedNoise(0, (4,), "group")
    samples = [SampleKey(0, 0, 0), SampleKey(0, 0, 1), SampleKey(0, 1, 0)]
    a, b, c = noise.initial(samples)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    a, b, _ = noise.step(samples, 0)
    assert not torch.equal(a, b)


def test_the_noise_is_standard_normal_and_its_streams_differ():
    noise = KeyedNoise(3, (2000,)).initial([SampleKey(0, p, m) for p in range(10) for m in range(10)])
    assert abs(float(noise.mean())) < 0.01
    assert abs(float(noise.std()) - 1) < 0.01
    draws = [torch.randn(4, generator=generator(*key)) for key in ((0, "a", 1), (0, "b", 1), (2**32, "a", 1))]
    assert len({fingerprint(draw) for draw in draws}) == 3


def test_no_two_of_many_draws_are_equal():
    """torch's own 32-bit seeds would give equal noise about six times among these."""
    noise = KeyedNoise(0, (4,))
    keys = [SampleKey(i, p, m) for i in range(20) for p in range(48) for m in range(240)]
    draws = torch.stack([torch.randn(4, generator=generator(0, "step_noise", *key)) for key in keys[::8]])
    assert len(draws.unique(dim=0)) == len(draws)
    assert torch.equal(draws[3], noise._draw("step_noise", *keys[24]))


def test_a_fingerprint_names_exact_values():
    x = torch.randn(50)
    y = x.clone()
    y[20] = torch.nextafter(y[20], torch.tensor(9.0))
    assert fingerprint(x) == fingerprint(x.clone())
    assert len({fingerprint(x), fingerprint(y), fingerprint(x.flip(0))}) == 3


@fast
@given(data=st.data())
def test_trained_steps_are_ascending_distinct_and_leave_the_last_out(data):
    num_steps = data.draw(st.integers(2, 12))
    rule = TrainedStepsRule(
        data.draw(st.sampled_from(["all_but_last", "fraction", "random_window", "progressive_window"])),
        fraction=data.draw(st.floats(0.01, 1.0)),
        size=data.draw(st.integers(1, num_steps - 1)),
        start_max=data.draw(st.sampled_from([None, 0, 2])),
        move_every=data.draw(st.integers(1, 3)),
        stride=data.draw(st.integers(1, 3)),
        drawn_per=data.draw(st.sampled_from(["group", "iteration"])),
    )
    rule.check(num_steps)
    for iteration in range(4):
        drawn = [rule.draw(0, num_steps, iteration, prompt) for prompt in range(3)]
        for steps in drawn:
            assert list(steps) == sorted(set(steps))
            assert steps[0] >= 0
            assert steps[-1] < num_steps - 1
            if rule.rule.endswith("window"):
                assert steps == tuple(range(steps[0], steps[0] + rule.size))
            if rule.rule == "random_window" and rule.start_max is not None:
                assert steps[0] <= rule.start_max
        if rule.drawn_per == "iteration":
            assert len(set(drawn)) == 1
        assert drawn == [rule.draw(0, num_steps, iteration, prompt) for prompt in range(3)]


def test_a_progressive_window_moves_and_comes_back():
    rule = TrainedStepsRule("progressive_window", size=2, move_every=2, stride=1)
    assert [rule.draw(0, 5, i, 0)[0] for i in range(8)] == [0, 0, 1, 1, 2, 2, 0, 0]


def test_random_windows_reach_every_start_and_differ_between_groups():
    rule = TrainedStepsRule("random_window", size=2)
    starts = [[rule.draw(1, 6, i, p)[0] for p in range(8)] for i in range(20)]
    assert {s for row in starts for s in row} == {0, 1, 2, 3}
    assert any(len(set(row)) > 1 for row in starts)


@pytest.mark.parametrize(
    ("rule", "num_steps", "message"),
    [
        (TrainedStepsRule("list", steps=(1, 9)), 5, r"steps = \[1, 9\]: list distinct steps in 0..4"),
        (TrainedStepsRule("list", steps=(1, 1)), 5, "distinct"),
        (TrainedStepsRule("list"), 5, "at least one"),
        (TrainedStepsRule("random_window", size=5), 5, "a window of a 5-step trajectory holds 1 to 4"),
        (TrainedStepsRule(), 1, "the last step is never trained"),
        (TrainedStepsRule("fraction", fraction=0.0), 5, "share"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(rule, num_steps, message):
    with pytest.raises(ValueError, match=message):
        rule.check(num_steps)


@fast
@given(data=st.data())
def test_advantages_are_affine_clamped_and_exactly_zero_without_spread(data):
    groups, samples, rewards = (data.draw(st.integers(low, 5)) for low in (1, 2, 1))
    values = torch.tensor(
        data.draw(
            st.lists(st.floats(-1e5, 1e5), min_size=groups * samples * rewards, max_size=groups * samples * rewards)
        ),
        dtype=torch.float64,
    ).view(groups, samples, rewards)
    values[0] = values[0, :1]  # a group without spread
    rule = AdvantageRule(
        std=data.draw(st.sampled_from(["group", "global"])),
        unbiased=data.draw(st.booleans()),
        clamp=data.draw(st.sampled_from([0.5, 5.0])),
        rewards=data.draw(st.sampled_from(["weighted_sum", "normalized"])),
        weights=tuple(1.0 + k for k in range(rewards)),
    )
    result = rule(values)
    assert bool((result.values[0] == 0).all())
    assert bool(result.zero_spread[0])
    assert float(result.values.abs().max()) <= rule.clamp
    channels = rule.channels(values)
    affine = (result.coefficient.unsqueeze(1) * (channels - result.mean.unsqueeze(1))).sum(-1)
    torch.testing.assert_close(result.affine, affine)
    torch.testing.assert_close(result.affine.sum(1), torch.zeros(groups).double(), atol=1e-6 * samples, rtol=0)


def test_advantages_by_hand():
    rewards = torch.tensor([[[1.0], [2.0], [3.0]], [[10.0], [10.0], [16.0]]])
    grouped = AdvantageRule()(rewards).values
    std = math.sqrt(2 / 3)
    assert grouped[0].tolist() == pytest.approx([-1 / (std + 1e-4), 0, 1 / (std + 1e-4)])
    everything = float(rewards.double().std(correction=0)) + 1e-4
    assert AdvantageRule("global")(rewards).values[1].tolist() == pytest.approx([v / everything for v in (-2, -2, 4)])
    two = torch.stack([rewards[..., 0], -rewards[..., 0] * 100], dim=-1)
    assert AdvantageRule(rewards="normalized", weights=(1.0, 1.0))(two).values.abs().max() < 1e-3
    assert AdvantageRule(weights=(1.0, 1.0))(two).values[0, 0] > 1


def test_best_of_n_keeps_the_top_and_the_bottom_and_gives_the_rest_exactly_zero():
    rewards = torch.tensor([[[3.0], [1.0], [2.0], [5.0], [4.0]]])
    full = AdvantageRule()(rewards).values[0]
    kept = AdvantageRule(best=1, worst=2)(rewards).values[0]
    assert kept.tolist() == [0, full[1], full[2], full[3], 0]


def test_a_sample_that_is_not_finite_is_named_with_step_and_dtype():
    policy = make_policy(steps=4)
    velocity = policy.velocity
    second = torch.tensor([False, True])
    policy.velocity = lambda x, s, c: velocity(x, s, c).masked_fill(((s < 0.95) & second).view(2, 1, 1), float("inf"))
    with pytest.raises(NonFiniteError, match=r"sample 1 of prompt group 0 \(iteration 0\).*step 1 in torch.float32"):
        run("native", policy, make_batches(1, 2, 2, (0, 1)), torch.randn(1, 2, 1))


def test_the_ode_sampler_is_euler_s_method():
    sigmas = make_sigmas("linear", 50)
    x = torch.randn(3, 4)
    ours = ode(lambda x, s, c: x * s.unsqueeze(1), sigmas, x, {})
    expected = x.clone()
    for a, b in zip(sigmas[:-1].tolist(), sigmas[1:].tolist()):
        expected = expected + expected * a * (b - a)
    torch.testing.assert_close(ours, expected)
