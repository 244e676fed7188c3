"""FLUX behind the adapter's three methods: packed latents (tokens, channels), position ids made inside.

The hazard is the timestep: the stock pipeline takes sigma to 1000 and back before the transformer multiplies
by 1000 again, and that rounding moves the sinusoidal embedding, so it is repeated here. Source: FluxPipeline
of diffusers, which the tests hold it against.
"""

from typing import Any

import torch
from diffusers import FluxPipeline
from torch import Tensor

from stretto.models.base import Condition, encode_guided, guided_velocity, linear_layers
from stretto.models.pipeline import check_multiple, open_pipeline
from stretto.overlap import FLUX_TP

__all__ = ["LORA_TARGETS", "FluxAdapter", "load"]

LORA_TARGETS = linear_layers(FLUX_TP)
"""Attention and MLP of both kinds of block, neither modulation nor embedders."""


class FluxAdapter:
    """FLUX.1: latents (height/16 * width/16, 64) for the released models; see `Adapter`.

    `guidance_embedded` reaches models with guidance embeds (FLUX.1-dev); `guidance` other than 1 is
    classifier-free guidance with a negative prompt, the pipeline's `true_cfg_scale`.
    """

    def __init__(
        self,
        pipeline: FluxPipeline,
        *,
        height: int,
        width: int,
        guidance: float = 1.0,
        guidance_embedded: float = 3.5,
        negative_prompt: str = "",
        text_length: int = 512,
    ) -> None:
        multiple = pipeline.vae_scale_factor * 2
        check_multiple(height=(height, multiple), width=(width, multiple))
        rows, columns = height // multiple, width // multiple
        self.pipeline = pipeline
        self.transformer: torch.nn.Module = pipeline.transformer
        self.height, self.width = height, width
        self.guidance, self.negative_prompt = guidance, negative_prompt
        self.guidance_embedded = guidance_embedded if pipeline.transformer.config.guidance_embeds else None
        self.text_length = text_length
        self.num_tokens = rows * columns
        self.latent_shape = (self.num_tokens, pipeline.transformer.config.in_channels)
        self.scheduler_config = {**pipeline.scheduler.config, "passes_points": True}
        self.prompts: list[str] = []
        self.lora_targets = list(LORA_TARGETS)
        self.rows_per_sample = 1 if guidance == 1.0 else 2
        # (tokens, 3): 0, row, column
        axes = [torch.arange(length, dtype=torch.float32) for length in (1, rows, columns)]
        self.image_ids = torch.cartesian_prod(*axes).to(pipeline.device)

    def encode(self, prompts: list[str]) -> Condition:
        """prompt_embeds (B, text_length, joint_dim) and pooled_prompt_embeds (B, pooled_dim), encoders' dtype."""
        return encode_guided(self._encode_one, self.guidance, prompts, self.negative_prompt)

    def velocity(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """See `Adapter.velocity`; latents (B, tokens, channels)."""
        return guided_velocity(self._forward, self.guidance, latents, sigma, condition)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents (B, tokens, channels) -> images (B, 3, height, width), float32 in [0, 1]."""
        vae, scale = self.pipeline.vae, self.pipeline.vae_scale_factor
        unpacked = self.pipeline._unpack_latents(latents, self.height, self.width, scale)
        unpacked = unpacked / vae.config.scaling_factor + vae.config.shift_factor
        image = vae.decode(unpacked.to(vae.dtype), return_dict=False)[0]
        return self.pipeline.image_processor.postprocess(image, output_type="pt").float()

    def _encode_one(self, prompt: str) -> Condition:
        embeds, pooled, _ = self.pipeline.encode_prompt(
            prompt, device=self.image_ids.device, max_sequence_length=self.text_length
        )
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def _forward(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        embedder: Any = self.transformer.x_embedder
        dtype = embedder.weight.dtype
        text = condition["prompt_embeds"].to(dtype)
        guidance = self.guidance_embedded
        output = self.transformer(
            hidden_states=latents.to(dtype),
            timestep=(sigma * 1000).to(dtype) / 1000,
            guidance=None if guidance is None else torch.full_like(sigma, guidance),
            pooled_projections=condition["pooled_prompt_embeds"].to(dtype),
            encoder_hidden_states=text,
            txt_ids=self.image_ids.new_zeros(text.shape[1], 3),
            img_ids=self.image_ids,
            return_dict=False,
        )[0]
        return output.to(latents.dtype)


def load(
    *,
    path: str,
    height: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    checkpointing: bool = False,
    frames: int = 1,
    **settings: Any,
) -> FluxAdapter:
    """FLUX from a diffusers folder or hub id; see `load_adapter`. `frames` is ignored."""
    pipeline = open_pipeline(path, FluxPipeline, dtype, device, checkpointing=checkpointing)
    return FluxAdapter(pipeline, height=height, width=width, **settings)
