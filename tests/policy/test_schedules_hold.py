"""Schedules under errors, misuse and odd modules: refused or exact, never silently wrong."""

import gc
import warnings
import weakref

import pytest
import torch

from stretto.policy import AdvantageRule, StalePolicyError
from stretto.policy.schedules import Reweight, TwoSum, make_schedule
from tests.policy.toy import distance, make_batches, make_policy, make_rewards, make_toy, run

LEAN = ["reweight", "two_sum", "hybrid"]


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
def test_a_sample_is_in_flight_once_and_never_across_a_move_of_the_weights(name):
    policy = make_policy()
    schedule = make_schedule(name, policy, rule=AdvantageRule(), num_samples=2)
    a, b = make_batches(2, 2, 2, (0, 1))
    first = schedule.rollout(a, lambda b, _: torch.arange(2.0).view(2, 1))
    schedule.rollout(b, lambda b, _: torch.arange(2.0).view(2, 1))
    with pytest.raises(ValueError, match="was rolled out already"):
        schedule.rollout(b, lambda b, _: torch.arange(2.0).view(2, 1))
    first = schedule.rollout(a, lambda b, _: torch.arange(2.0).view(2, 1))
    schedule.rollout(b, lambda b, _: torch.arange(2.0).view(2, 1))
    schedule.update([first], [torch.ones(2)], 1.0)
    policy.moved()
    with pytest.raises(StalePolicyError, match="2 samples that were rolled out before the weights moved"):
        schedule.rollout(a, lambda b, _: torch.arange(2.0).view(2, 1))


@pytest.mark.parametrize("name", ["retain", *LEAN])
@pytest.mark.parametrize("kl_beta", [0.0, 0.1])
def test_one_wave_is_updated_while_the_next_is_in_flight(name, kl_beta):
    def gradients(in_flight):
        policy = make_policy(kl_beta=kl_beta)
        schedule = make_schedule(name, policy, rule=AdvantageRule(), num_samples=3)
        batches = make_batches(2, 3, 3, (0, 1))
        rewards = torch.arange(3.0, dtype=torch.float64).view(3, 1).square()
        values = AdvantageRule()(rewards.unsqueeze(0)).values[0]
        stats = schedule.stats()
        if in_flight:
            first, second = (schedule.rollout(batch, lambda b, _: rewards) for batch in batches)
            stats.merge(schedule.update([first], [values], 1 / 12))
            stats.merge(schedule.update([second], [values], 1 / 12))
        else:
            for batch in batches:
                stats.merge(schedule.update([schedule.rollout(batch, lambda b, _: rewards)], [values], 1 / 12))
        return {k: p.grad for k, p in policy.parameters.items()}, stats.summary()

    (ours, counted), (expected, expected_counts) = gradients(True), gradients(False)
    assert distance(ours, expected) < 1e-6
    shares, expected_shares = counted.pop("gradient_share"), expected_counts.pop("gradient_share")
    assert shares == pytest.approx(expected_shares)
    assert counted == pytest.approx(expected_counts)


@pytest.mark.parametrize("name", LEAN)
def test_a_prompt_group_is_in_flight_once(name):
    schedule = make_schedule(name, make_policy(), rule=AdvantageRule(), num_samples=2)
    (a,) = make_batches(1, 2, 2, (0, 1))
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
