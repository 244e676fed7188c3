"""The FLUX adapter against the stock FluxPipeline, and its own errors."""

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel

from stretto.models.base import linear_layers
from stretto.overlap import FLUX_TP
from tests import tiny
from tests.models.ode import matched_linears, sample

STEPS = 4


def sample_stock(pipeline, latents, prompts, output_type="latent", **settings):
    return pipeline(
        prompts,
        latents=latents,
        height=16,
        width=24,
        num_inference_steps=STEPS,
        max_sequence_length=tiny.TEXT_LENGTH,
        output_type=output_type,
        **settings,
    ).images


@pytest.mark.parametrize("guidance_embedded", [1.0, 3.5])
def test_the_ode_gives_what_the_stock_pipeline_gives_bit_for_bit(load, guidance_embedded):
    adapter = load("flux", guidance_embedded=guidance_embedded)
    latents = torch.randn(1, *adapter.latent_shape, generator=torch.Generator().manual_seed(0))
    settings = {"guidance_scale": guidance_embedded}
    expected = sample_stock(adapter.pipeline, latents, ["a red fox"], **settings)
    sampled = sample(adapter, latents, adapter.encode(["a red fox"]))
    assert torch.equal(sampled, expected)
    expected = sample_stock(adapter.pipeline, latents, ["a red fox"], output_type="pt", **settings)
    assert torch.equal(adapter.decode(sampled), expected)
    assert expected.std() > 0.05


def test_several_prompts_in_one_batch_give_what_the_stock_pipeline_gives(load, inputs):
    adapter = load("flux")
    latents, _, condition = inputs(adapter, 3)
    expected = sample_stock(adapter.pipeline, latents, ["a red fox", "two owls", "snow"])
    torch.testing.assert_close(sample(adapter, latents, condition), expected, atol=1e-6, rtol=0)


def test_classifier_free_guidance_gives_what_the_stock_pipeline_gives(load, inputs):
    adapter = load("flux", guidance=4.0, negative_prompt="fog")
    latents, _, condition = inputs(adapter)
    expected = sample_stock(
        adapter.pipeline, latents, ["a red fox", "two owls"], negative_prompt=["fog"] * 2, true_cfg_scale=4.0
    )
    torch.testing.assert_close(sample(adapter, latents, condition), expected, atol=2e-6, rtol=0)
    unguided = sample_stock(adapter.pipeline, latents, ["a red fox", "two owls"])
    assert (expected - unguided).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_at_every_step_the_transformer_is_fed_what_the_stock_pipeline_feeds(load, monkeypatch, dtype):
    adapter = load("flux", dtype=dtype)
    fed = []
    adapter.transformer.register_forward_pre_hook(lambda _m, _a, kwargs: fed.append(kwargs), with_kwargs=True)
    monkeypatch.setattr("tests.models.test_flux.STEPS", 50)
    sample_stock(adapter.pipeline, torch.randn(1, *adapter.latent_shape), ["snow"])
    stock, condition = list(fed), adapter.encode(["snow"])
    assert len(stock) == 50
    for sigma, expected in zip(adapter.pipeline.scheduler.sigmas, stock):
        with torch.no_grad():
            adapter.velocity(expected["hidden_states"].float(), sigma[None], condition)
        for name, value in fed[-1].items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value.float(), expected[name].float()), name


def test_a_model_without_guidance_embeds_is_fed_none(folders, load, tmp_path):
    pipeline = FluxPipeline.from_pretrained(folders["flux"])
    pipeline.transformer = tiny.flux_transformer(guidance_embeds=False)
    pipeline.save_pretrained(tmp_path)
    adapter = load("flux", path=str(tmp_path))
    latents = torch.randn(1, *adapter.latent_shape)
    expected = sample_stock(adapter.pipeline, latents, ["snow"])
    assert torch.equal(sample(adapter, latents, adapter.encode(["snow"])), expected)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"height": 18}, "height=18 is not a multiple of 4; set model.height to 16"),
        ({"width": 0}, "width=0 is not a multiple of 4; set model.width to 4"),
    ],
)
def test_a_size_that_does_not_fit_is_one_clear_line(load, sizes, message):
    with pytest.raises(ValueError, match=message):
        load("flux", **sizes)


def test_the_layers_that_are_cut_and_adapted_are_those_of_diffusers_own_plan(load):
    names = {"colwise": "column", "rowwise": "row"}
    stated = {k: names.get(v, "row 1+4") for k, v in FluxTransformer2DModel._tp_plan.items()}
    styles = set(stated.values())
    cut = {style: linear_layers({k: s for k, s in FLUX_TP.items() if s == style}) for style in styles}
    assert {layer: style for style, layers in cut.items() for layer in layers} == stated
    adapter = load("flux")
    assert set(adapter.lora_targets) == stated.keys()
    left = matched_linears(adapter)
    assert all("norm" in n or "embed" in n or n == "proj_out" for n in left), left
