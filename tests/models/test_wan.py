"""The Wan adapter against the stock WanPipeline with its flow Euler scheduler, and its own errors."""

import pytest
import torch
from diffusers import WanPipeline

from tests import tiny
from tests.models.ode import matched_linears, sample


def sample_stock(pipeline, latents, prompts, output_type="latent", **settings):
    return pipeline(
        prompts,
        latents=latents,
        height=32,
        width=48,
        num_frames=9,
        num_inference_steps=4,
        max_sequence_length=tiny.TEXT_LENGTH,
        output_type=output_type,
        **settings,
    ).frames


def test_the_ode_gives_what_the_stock_pipeline_gives(load):
    adapter = load("wan")
    latents = torch.randn(1, *adapter.latent_shape, generator=torch.Generator().manual_seed(0))
    expected = sample_stock(adapter.pipeline, latents, ["a red fox"], guidance_scale=1.0)
    sampled = sample(adapter, latents, adapter.encode(["a red fox"]))
    assert torch.equal(sampled, expected)
    expected = sample_stock(adapter.pipeline, latents, ["a red fox"], output_type="pt", guidance_scale=1.0)
    torch.testing.assert_close(adapter.decode(sampled), expected, atol=1e-5, rtol=0)
    assert expected.shape == (1, 9, 3, 32, 48)
    assert expected.std() > 0.01


def test_classifier_free_guidance_gives_what_the_stock_pipeline_gives(load, inputs):
    adapter = load("wan", guidance=5.0, negative_prompt="fog")
    latents, _, condition = inputs(adapter)
    prompts = ["a red fox", "two owls"]
    expected = sample_stock(adapter.pipeline, latents, prompts, negative_prompt=["fog"] * 2, guidance_scale=5.0)
    torch.testing.assert_close(sample(adapter, latents, condition), expected, atol=1e-5, rtol=0)
    unguided = sample_stock(adapter.pipeline, latents, prompts, guidance_scale=1.0)
    assert (expected - unguided).abs().max() > 1e-2


def test_bfloat16_keeps_in_float32_what_the_model_wants_in_float32(load):
    adapter = load("wan", dtype="bfloat16")
    dtypes = {name: parameter.dtype for name, parameter in adapter.transformer.named_parameters()}
    assert dtypes["blocks.0.scale_shift_table"] == torch.float32
    assert dtypes["blocks.0.attn1.to_q.weight"] == dtypes["patch_embedding.weight"] == torch.bfloat16
    assert adapter.pipeline.vae.dtype == torch.float32


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"height": 40}, "height=40 is not a multiple of 16; set model.height to 32"),
        ({"width": 47}, "width=47 is not a multiple of 16; set model.width to 48"),
        ({"frames": 8}, r"frames=8 is not 4k \+ 1; set model.frames to 9"),
        ({"frames": 0}, r"frames=0 is not 4k \+ 1; set model.frames to 1"),
    ],
)
def test_a_size_that_does_not_fit_is_one_clear_line(load, sizes, message):
    with pytest.raises(ValueError, match=message):
        load("wan", **sizes)


def test_one_frame_is_an_image(load):
    adapter = load("wan", frames=1)
    assert adapter.latent_shape == (4, 1, 4, 6)
    assert adapter.decode(torch.randn(2, *adapter.latent_shape)).shape == (2, 1, 3, 32, 48)


def test_a_two_stage_wan_is_refused(folders, load, tmp_path):
    pipeline = WanPipeline.from_pretrained(folders["wan"])
    pipeline.register_modules(transformer_2=tiny.wan_transformer())
    pipeline.register_to_config(boundary_ratio=0.9)
    pipeline.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"two transformers.*use a Wan 2\.1"):
        load("wan", path=str(tmp_path))


def test_the_lora_targets_cover_attention_and_mlp_of_every_block(load):
    left = matched_linears(load("wan"))
    assert left
    assert not [name for name in left if name.startswith("blocks.")]
