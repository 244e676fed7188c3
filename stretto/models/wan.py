"""Wan 2.1 text-to-video behind the adapter's three methods: latents (C, F, H, W), timestep sigma * 1000.

The hazard is for whoever tunes it fully: the patch embedding is a Conv3d and every block holds a raw
parameter `scale_shift_table`, so linear layers are not all of its weights; and it keeps time embedding,
tables and norms in float32 under bfloat16. Source: WanPipeline of diffusers, which the tests hold it against.
"""

from typing import Any

import torch
from diffusers import WanPipeline
from torch import Tensor

from stretto.models.base import Condition, encode_guided, guided_velocity, linear_layers
from stretto.models.pipeline import check_multiple, open_pipeline
from stretto.overlap import WAN_TP

__all__ = ["LORA_TARGETS", "WanAdapter", "load"]

LORA_TARGETS = linear_layers(WAN_TP)
"""Attention and MLP of every block."""


class WanAdapter:
    """Wan 2.1: latents (16, (frames-1)/4 + 1, height/8, width/8) for the released models; see `Adapter`."""

    def __init__(
        self,
        pipeline: WanPipeline,
        *,
        height: int,
        width: int,
        frames: int,
        guidance: float = 1.0,
        negative_prompt: str = "",
        text_length: int = 512,
    ) -> None:
        _check_one_stage(pipeline)
        config = pipeline.transformer.config
        spatial, temporal = pipeline.vae_scale_factor_spatial, pipeline.vae_scale_factor_temporal
        _, patch_height, patch_width = config.patch_size
        check_multiple(height=(height, spatial * patch_height), width=(width, spatial * patch_width))
        if frames < 1 or (frames - 1) % temporal:
            nearest = max(0, round((frames - 1) / temporal)) * temporal + 1
            raise ValueError(f"frames={frames} is not {temporal}k + 1; set model.frames to {nearest}")
        self.pipeline = pipeline
        self.transformer: torch.nn.Module = pipeline.transformer
        self.guidance, self.negative_prompt = guidance, negative_prompt
        self.text_length = text_length
        latent_frames = (frames - 1) // temporal + 1
        self.latent_shape = (config.in_channels, latent_frames, height // spatial, width // spatial)
        self.num_tokens = latent_frames * (height // spatial // patch_height) * (width // spatial // patch_width)
        self.scheduler_config = dict(pipeline.scheduler.config)
        self.prompts: list[str] = []
        self.lora_targets = list(LORA_TARGETS)
        self.rows_per_sample = 1 if guidance == 1.0 else 2

    def encode(self, prompts: list[str]) -> Condition:
        """prompt_embeds (B, text_length, text_dim), in the encoder's dtype, zero past a prompt's end."""
        return encode_guided(self._encode_one, self.guidance, prompts, self.negative_prompt)

    def velocity(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """See `Adapter.velocity`; latents (B, C, F, H, W)."""
        return guided_velocity(self._forward, self.guidance, latents, sigma, condition)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents (B, C, F, H, W) -> videos (B, frames, 3, height, width), float32 in [0, 1]."""
        vae = self.pipeline.vae
        mean, std = (
            latents.new_tensor(x)[:, None, None, None] for x in (vae.config.latents_mean, vae.config.latents_std)
        )
        video = vae.decode((latents * std + mean).to(vae.dtype), return_dict=False)[0]
        return self.pipeline.video_processor.postprocess_video(video, output_type="pt").float()

    def _encode_one(self, prompt: str) -> Condition:
        embeds, _ = self.pipeline.encode_prompt(
            prompt,
            do_classifier_free_guidance=False,
            max_sequence_length=self.text_length,
            device=self.pipeline.device,
        )
        return {"prompt_embeds": embeds}

    def _forward(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        embedder: Any = self.transformer.patch_embedding
        dtype = embedder.weight.dtype
        output = self.transformer(
            hidden_states=latents.to(dtype),
            timestep=sigma * 1000,
            encoder_hidden_states=condition["prompt_embeds"].to(dtype),
            return_dict=False,
        )[0]
        return output.to(latents.dtype)


def load(
    *,
    path: str,
    height: int,
    width: int,
    frames: int,
    dtype: torch.dtype,
    device: torch.device,
    checkpointing: bool = False,
    guidance_embedded: float = 1.0,
    **settings: Any,
) -> WanAdapter:
    """Wan from a diffusers folder or hub id; see `load_adapter`. `guidance_embedded` is ignored.

    The autoencoder stays float32, as the model's authors ask; transformer and text encoder are in `dtype`.
    """
    dtypes = {"default": dtype, "vae": torch.float32}
    pipeline = open_pipeline(path, WanPipeline, dtypes, device, checkpointing=checkpointing)
    return WanAdapter(pipeline, height=height, width=width, frames=frames, **settings)


def _check_one_stage(pipeline: WanPipeline) -> None:
    """Wan 2.2 splits the trajectory between two transformers, or gives every token its own timestep."""
    if pipeline.transformer is None or pipeline.config.boundary_ratio is not None or pipeline.config.expand_timesteps:
        raise ValueError(
            "this Wan has two transformers or a timestep a token (2.2); use a Wan 2.1 text-to-video model"
        )
