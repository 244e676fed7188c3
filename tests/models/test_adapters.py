"""What holds for every adapter: frozen, deterministic, differentiable where it must be, in every precision."""

import copy

import pytest
import torch

from stretto.models.base import guided_velocity
from stretto.models.trainable import make_full, trainable_parameters

both = pytest.mark.parametrize("name", ["flux", "wan"])


def gradients(adapter, inputs, autocast=False):
    latents, sigma, condition = inputs(adapter)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        velocity = adapter.velocity(latents, sigma, condition)
    velocity.square().mean().backward()
    found = {n: p.grad.clone() for n, p in trainable_parameters(adapter.transformer).items()}
    adapter.transformer.zero_grad()
    return velocity.detach(), found


@both
def test_everything_is_frozen_and_in_eval_mode_on_loading(load, name):
    adapter = load(name)
    modules = [m for m in adapter.pipeline.components.values() if isinstance(m, torch.nn.Module)]
    assert len(modules) >= 3
    for module in modules:
        assert not module.training
        assert not any(parameter.requires_grad for parameter in module.parameters())


@both
def test_a_row_of_encode_does_not_depend_on_the_other_prompts(load, name):
    adapter = load(name, guidance=3.0, negative_prompt="fog")
    condition = adapter.encode(["two owls", "snow", "two owls"])
    alone = adapter.encode(["snow"])
    assert any(key.startswith("negative_") for key in condition)
    for key, value in condition.items():
        assert value.shape[0] == 3
        assert not value.requires_grad
        assert torch.equal(value[1:2], alone[key])
        assert torch.equal(value[0], value[2])
        if not key.startswith("negative_"):
            assert not torch.equal(value[0], value[1])


@both
def test_no_prompts_is_an_error(load, name):
    with pytest.raises(ValueError, match="no prompts"):
        load(name).encode([])


@both
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_velocity_runs_the_transformer_once_on_the_stated_rows(load, inputs, name, guidance):
    adapter = load(name, guidance=guidance)
    latents, sigma, condition = inputs(adapter, 3)
    rows = []
    adapter.transformer.register_forward_pre_hook(
        lambda _m, _a, kwargs: rows.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    adapter.velocity(latents, sigma, condition)
    assert rows == [3 * adapter.rows_per_sample]


@both
def test_velocity_is_differentiable_in_weights_and_latents(load, inputs, name):
    adapter = load(name, guidance=3.0)
    make_full(adapter.transformer)
    latents, sigma, condition = inputs(adapter)
    latents.requires_grad_()
    adapter.velocity(latents, sigma, condition).square().mean().backward()
    assert latents.grad.abs().max() > 0
    assert all(p.grad is not None for p in trainable_parameters(adapter.transformer).values())


@both
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_gives_the_same_gradient_bit_for_bit(load, inputs, name, autocast):
    plain, kept = load(name), load(name, checkpointing=True)
    calls = 0

    def count(*_):
        nonlocal calls
        calls += 1

    for adapter in (plain, kept):
        make_full(adapter.transformer)
    blocks = kept.transformer.blocks if name == "wan" else kept.transformer.single_transformer_blocks
    blocks[0].register_forward_pre_hook(count)
    velocity, expected = gradients(plain, inputs, autocast)
    velocity_kept, found = gradients(kept, inputs, autocast)
    assert not kept.transformer.training
    assert calls == 2  # once forward, once again inside the backward
    assert torch.equal(velocity, velocity_kept)
    for key, gradient in expected.items():
        assert torch.equal(gradient, found[key]), key


@both
@pytest.mark.parametrize("how", ["bfloat16 weights", "autocast"])
def test_low_precision_stays_near_float32_and_returns_float32(load, inputs, name, how):
    exact = load(name)
    latents, sigma, condition = inputs(exact)
    expected = exact.velocity(latents, sigma, condition)
    adapter = load(name, dtype="bfloat16") if how == "bfloat16 weights" else exact
    condition = adapter.encode(["a red fox", "two owls"])
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        velocity = adapter.velocity(latents, sigma, condition)
        decoded = adapter.decode(latents)
    assert velocity.dtype == decoded.dtype == torch.float32
    error = (velocity - expected).norm() / expected.norm()
    assert 0 < error < 0.05


@both
def test_float64_weights_and_latents_give_float64_velocities(load, inputs, name):
    adapter = load(name)
    adapter.transformer.double()
    latents, sigma, condition = inputs(adapter)
    assert adapter.velocity(latents.double(), sigma.double(), condition).dtype == torch.float64


@both
def test_a_shallow_copy_with_another_transformer_is_an_adapter(load, inputs, name):
    adapter = load(name)
    other = copy.copy(adapter)
    other.transformer = copy.deepcopy(adapter.transformer)
    with torch.no_grad():
        other.transformer.proj_out.weight.mul_(2)
        other.transformer.proj_out.bias.mul_(2)
        arguments = inputs(adapter)
        assert torch.equal(other.velocity(*arguments), 2 * adapter.velocity(*arguments))


def test_guidance_carries_w_to_the_conditional_branch_and_the_rest_to_the_other():
    condition = {"text": torch.tensor([[1.0], [2.0]]), "negative_text": torch.tensor([[5.0], [7.0]])}
    for tensor in condition.values():
        tensor.requires_grad_()
    latents, sigma = torch.ones(2, 1), torch.tensor([0.5, 0.25])

    def forward(latents, sigma, condition):
        assert condition.keys() == {"text"}
        assert sigma.tolist() == [0.5, 0.25, 0.5, 0.25]
        return latents * condition["text"]

    velocity = guided_velocity(forward, 3.0, latents, sigma, condition)
    assert velocity.flatten().tolist() == [3 * 1 - 2 * 5, 3 * 2 - 2 * 7]
    velocity.sum().backward()
    assert condition["text"].grad.flatten().tolist() == [3, 3]
    assert condition["negative_text"].grad.flatten().tolist() == [-2, -2]
