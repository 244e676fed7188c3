"""The shipped digits model: what it is, that it is deterministic, and how good its base is by the judge."""

import fnmatch
import itertools

import pytest
import torch

from stretto.models import load_adapter
from stretto.models.digits import BASE, DigitsAdapter, pack, unpack
from stretto.rewards import load_judge
from stretto.rewards.digits_judge import real_digits

NUM_STEPS = 8


@pytest.fixture(scope="module")
def adapter():
    return load_adapter("digits")


@torch.no_grad()
def draw(adapter, prompts, seed=0):
    """Media (B, 1, 8, 8) by the ODE on linear sigmas, from fixed noise."""
    latents = torch.randn(len(prompts), *adapter.latent_shape, generator=torch.Generator().manual_seed(seed))
    sigmas = torch.linspace(1, 0, NUM_STEPS + 1)
    condition = adapter.encode(prompts)
    for sigma, sigma_next in itertools.pairwise(sigmas):
        velocity = adapter.velocity(latents, sigma.expand(len(prompts)), condition)
        latents = latents + velocity * (sigma_next - sigma)
    return adapter.decode(latents)


@pytest.fixture(scope="module")
def drawn(adapter):
    prompts = [str(i % 10) for i in range(200)]
    return draw(adapter, prompts), prompts


def test_the_base_draws_clean_digits_but_often_the_wrong_one(drawn):
    verdict = load_judge("digits")(*drawn)
    assert 0.40 < verdict["accuracy"] < 0.56
    assert verdict["frechet"] < 0.4
    assert 0.15 < verdict["spread"] < 0.25


def test_drawing_again_gives_the_same_digits(adapter, drawn):
    torch.testing.assert_close(draw(adapter, drawn[1][:20]), drawn[0][:20], atol=1e-4, rtol=0)
    assert torch.equal(draw(adapter, drawn[1][:20]), draw(load_adapter("digits"), drawn[1][:20]))


def test_guidance_towards_the_prompt_draws_the_right_digit_more_often(drawn):
    guided = DigitsAdapter(guidance=2.0)
    assert guided.rows_per_sample == 2
    judge = load_judge("digits")
    assert judge(draw(guided, drawn[1]), drawn[1])["accuracy"] > judge(*drawn)["accuracy"] + 0.1


def test_the_transformer_is_the_real_class_frozen_in_eval_mode_and_of_its_stated_size(adapter):
    from diffusers import FluxTransformer2DModel

    assert isinstance(adapter.transformer, FluxTransformer2DModel)
    assert sum(weight.numel() for weight in adapter.transformer.parameters()) == 821_908
    assert not any(weight.requires_grad for weight in adapter.transformer.parameters())
    assert not adapter.transformer.training
    assert adapter.num_tokens == 16
    assert BASE.stat().st_size < 3.4e6


def test_decoded_media_are_pictures_between_0_and_1(adapter, drawn):
    media = drawn[0]
    assert media.shape == (200, 1, 8, 8)
    assert media.dtype == torch.float32
    assert media.min() == 0
    assert media.max() == 1
    assert adapter.decode(torch.full((1, 16, 4), 7.0, requires_grad=True)).unique().tolist() == [1.0]


def test_packing_is_undone_by_unpacking_and_by_decoding(adapter):
    pictures, _ = real_digits(0)
    assert torch.equal(unpack(pack(pictures)), pictures)
    assert torch.equal(adapter.decode(pack(pictures)), pictures)


def test_packing_is_that_of_the_stock_pipeline():
    from diffusers import FluxPipeline

    pictures, _ = real_digits(0)
    stock = FluxPipeline._pack_latents(pictures[:5] * 2 - 1, 5, 1, 8, 8)
    assert torch.equal(pack(pictures[:5]), stock)


def test_a_row_of_the_condition_does_not_depend_on_the_other_prompts(adapter):
    together, alone = adapter.encode(["3", "7", "3"]), adapter.encode(["7"])
    assert set(together) == {"prompt_embeds", "pooled_prompt_embeds"}
    for name, rows in together.items():
        assert torch.equal(rows[1:2], alone[name])
        assert torch.equal(rows[0], rows[2])
        assert not torch.equal(rows[0], rows[1])
        assert not rows.requires_grad


def test_the_velocity_of_a_sample_does_not_depend_on_the_others(adapter):
    latents = torch.randn(4, 16, 4, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([1.0, 0.7, 0.4, 0.1])
    together = adapter.velocity(latents, sigma, adapter.encode(["0", "1", "2", "3"]))
    alone = adapter.velocity(latents[2:3], sigma[2:3], adapter.encode(["2"]))
    assert together.shape == latents.shape
    torch.testing.assert_close(together[2:3], alone, atol=1e-5, rtol=1e-5)


def test_the_velocity_carries_gradient_to_weights_and_latents():
    adapter = load_adapter("digits", checkpointing=True)
    adapter.transformer.requires_grad_(True)
    latents = torch.randn(2, 16, 4, requires_grad=True)
    adapter.velocity(latents, torch.tensor([0.5, 0.5]), adapter.encode(["1", "2"])).square().sum().backward()
    assert latents.grad.abs().sum() > 0
    assert all(weight.grad is not None for weight in adapter.transformer.parameters())


def test_bf16_weights_take_and_give_float32():
    adapter = load_adapter("digits", dtype="bfloat16")
    latents = torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(0))
    velocity = adapter.velocity(latents, torch.tensor([0.5, 0.5]), adapter.encode(["1", "2"]))
    exact = load_adapter("digits")
    wanted = exact.velocity(latents, torch.tensor([0.5, 0.5]), exact.encode(["1", "2"]))
    assert velocity.dtype == torch.float32
    torch.testing.assert_close(velocity, wanted, atol=0.1, rtol=0.1)


def test_the_lora_targets_are_those_of_flux(adapter):
    from stretto.models.flux import LORA_TARGETS

    assert set(adapter.lora_targets) == set(LORA_TARGETS)


def test_every_lora_target_names_a_linear_layer(adapter):
    linears = [name for name, m in adapter.transformer.named_modules() if isinstance(m, torch.nn.Linear)]
    for pattern in adapter.lora_targets:
        assert fnmatch.filter(linears, pattern), pattern


@pytest.mark.parametrize("prompt", ["ten", "10", "a 3"])
def test_a_prompt_that_is_no_digit_is_named(adapter, prompt):
    with pytest.raises(ValueError, match=f"prompt '{prompt}' is not a digit"):
        adapter.encode(["1", prompt])


def test_a_missing_base_says_how_to_make_it(tmp_path):
    with pytest.raises(ValueError, match=r"is missing; make it with `python tools/make_digits\.py base`"):
        DigitsAdapter(base=tmp_path / "none.safetensors")


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_bf16_base_trains(method):
    from stretto.models.trainable import attach_lora, make_full

    adapter = load_adapter("digits", dtype="bfloat16")
    condition = adapter.encode(["3"])
    if method == "full":
        make_full(adapter.transformer)
    else:
        attach_lora(adapter.transformer, rank=2, alpha=2, targets=adapter.lora_targets, seed=0)
    velocity = adapter.velocity(torch.zeros(1, *adapter.latent_shape), torch.ones(1), condition)
    velocity.sum().backward()
    assert velocity.dtype is torch.float32
    assert any(p.grad is not None for p in adapter.transformer.parameters())
