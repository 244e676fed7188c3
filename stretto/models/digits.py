"""The shipped toy: a real FLUX transformer of 0.82 M parameters that draws the 8 x 8 digits of scikit-learn.

An image is packed 2 x 2 into 16 tokens of 4 channels, scaled to [-1, 1]; there is no autoencoder, so the
latent is the picture. The prompts are the ten digits and "" (no digit, for guidance); their embeddings are
frozen and stored beside the weights. The hazard is deliberate: half of the labels were random when the base
was trained, so it draws clean digits but often the wrong one, and leaves something for a reward to teach.
`tools/make_digits.py` makes the file. The packing and the ids are those of diffusers' FluxPipeline.
"""

from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file
from torch import Tensor

from stretto.models.base import Condition, encode_guided, guided_velocity, linear_layers
from stretto.overlap import FLUX_TP

__all__ = [
    "BASE",
    "CONDITION_PREFIX",
    "DigitsAdapter",
    "build_transformer",
    "image_ids",
    "load",
    "pack",
    "unpack",
]

PROMPTS = (*"0123456789", "")
BASE = Path(__file__).with_name("digits_base.safetensors")
CONDITION_PREFIX = "condition."
CONDITION_KEYS = ("prompt_embeds", "pooled_prompt_embeds")
TEXT_TOKENS = 2


def build_transformer() -> FluxTransformer2DModel:
    """A freshly initialised FluxTransformer2DModel of 821,908 parameters, float32, 4 heads of 24."""
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=3,
        attention_head_dim=24,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=False,
        axes_dims_rope=(8, 8, 8),
    )


def pack(images: Tensor) -> Tensor:
    """Images (B, 1, 8, 8) in [0, 1] to latents (B, 16, 4) in [-1, 1], exactly undone by `unpack`."""
    rows = images.shape[0]
    tiles = images.reshape(rows, 1, 4, 2, 4, 2).permute(0, 2, 4, 1, 3, 5)
    return tiles.reshape(rows, 16, 4) * 2 - 1


def unpack(latents: Tensor) -> Tensor:
    """Latents (B, 16, 4) to images (B, 1, 8, 8); 0 and 1 are black and white, values beyond are kept."""
    rows = latents.shape[0]
    tiles = ((latents + 1) / 2).reshape(rows, 4, 4, 1, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return tiles.reshape(rows, 1, 8, 8)


def image_ids() -> Tensor:
    """Position of each image token, (16, 3): nothing, row, column."""
    ids = torch.zeros(4, 4, 3)
    ids[..., 1] = torch.arange(4)[:, None]
    ids[..., 2] = torch.arange(4)[None, :]
    return ids.reshape(16, 3)


class DigitsAdapter:
    """The `Adapter` of the digits model.

    | tensor | shape | dtype |
    |---|---|---|
    | latents, velocity | (B, 16, 4) | float32 |
    | sigma | (B,) in [0, 1] | float32 |
    | condition["prompt_embeds"] | (B, 2, 32) | dtype |
    | condition["pooled_prompt_embeds"] | (B, 32) | dtype |
    | decoded media | (B, 1, 8, 8) in [0, 1] | float32 |

    Args:
        dtype: storage of the frozen transformer and of the condition.
        device: where both live.
        guidance: classifier-free guidance scale; 1 runs the conditional branch alone.
        negative_prompt: the prompt of the unconditional branch, "" (no digit) or a digit to keep away from.
        checkpointing: activation checkpointing inside the transformer.
        base: a file made by `tools/make_digits.py`; the shipped one by default.

    Raises:
        ValueError: the base file is missing, or a prompt is not a digit.
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        guidance: float = 1.0,
        negative_prompt: str = "",
        checkpointing: bool = False,
        base: Path = BASE,
    ) -> None:
        if not base.is_file():
            raise ValueError(f"{base} is missing; make it with `python tools/make_digits.py base`")
        tensors = load_file(base)
        embeds = {name: tensors.pop(CONDITION_PREFIX + name) for name in CONDITION_KEYS}
        transformer = build_transformer()
        transformer.load_state_dict(tensors)
        torch.nn.Module.to(transformer, device=device, dtype=dtype)  # diffusers' own `to` warns about nothing here
        transformer.eval().requires_grad_(False)
        if checkpointing:
            transformer.enable_gradient_checkpointing()
        self.transformer: torch.nn.Module = transformer
        self.latent_shape: tuple[int, ...] = (16, 4)
        self.num_tokens = 16
        self.scheduler_config: dict[str, Any] = {}
        self.prompts: list[str] = [prompt for prompt in PROMPTS if prompt]
        self.lora_targets: list[str] = linear_layers(FLUX_TP)
        self.rows_per_sample = 1 if guidance == 1.0 else 2
        self._guidance = guidance
        self._negative_prompt = negative_prompt
        self._embeds = {name: value.to(device=device, dtype=dtype) for name, value in embeds.items()}
        self._image_ids = image_ids().to(device)
        self._text_ids = torch.zeros(TEXT_TOKENS, 3, device=device)

    def encode(self, prompts: list[str]) -> Condition:
        """The stored embeddings, one row a prompt, and their `negative_` twins under guidance."""
        return encode_guided(self._encode_one, self._guidance, prompts, self._negative_prompt)

    def _encode_one(self, prompt: str) -> Condition:
        if prompt not in PROMPTS:
            raise ValueError(f'prompt {prompt!r} is not a digit; the digits model knows "0" to "9"')
        row = PROMPTS.index(prompt)
        return {name: value[row : row + 1] for name, value in self._embeds.items()}

    def velocity(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """One transformer forward; gradients flow to its weights and to `latents`. Shapes as in the class."""
        return guided_velocity(self._forward, self._guidance, latents, sigma, condition)

    def _forward(self, latents: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        transformer: Any = self.transformer
        dtype = transformer.x_embedder.weight.dtype  # read at each call: full tuning makes the weights float32
        velocity: Tensor = transformer(
            hidden_states=latents.to(dtype),
            timestep=sigma.to(dtype),
            encoder_hidden_states=condition["prompt_embeds"].to(dtype),
            pooled_projections=condition["pooled_prompt_embeds"].to(dtype),
            img_ids=self._image_ids,
            txt_ids=self._text_ids,
            return_dict=False,
        )[0]
        return velocity.to(latents.dtype)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents (B, 16, 4) to images (B, 1, 8, 8), clamped to [0, 1], float32."""
        return unpack(latents.float()).clamp(0, 1)


def load(
    *,
    dtype: torch.dtype,
    device: torch.device,
    guidance: float,
    negative_prompt: str,
    checkpointing: bool,
    **not_used: Any,
) -> DigitsAdapter:
    """The adapter for `load_adapter`; path, size and embedded guidance have no meaning here."""
    return DigitsAdapter(
        dtype=dtype,
        device=device,
        guidance=guidance,
        negative_prompt=negative_prompt,
        checkpointing=checkpointing,
    )
