"""Attention of FLUX and Wan over a sequence that is shared out: own tokens outside, own heads of all tokens inside.

Two processors in diffusers' sense, put in place by `split_sequence`. The hazard is FLUX's joint sequence, here in the
order text 0, image 0, text 1, image 1, ... of the ranks: positions must be in that order too. Source:
DeepSpeed-Ulysses (arXiv 2309.14509); the arithmetic is that of diffusers' FluxAttnProcessor and WanAttnProcessor.
"""

from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor

from stretto.models.ulysses_exchange import Exchange, even

__all__ = ["FluxUlysses", "Rows", "WanUlysses"]


@dataclass(frozen=True)
class Rows:
    """How many text and image tokens each rank has."""

    text: list[int]
    image: list[int]

    @property
    def joint(self) -> list[int]:
        """Of both together."""
        return [text + image for text, image in zip(self.text, self.image)]

    def join(self, text: Tensor, image: Tensor, dim: int) -> Tensor:
        """All text and all image tokens along `dim`, in the order of the ranks that have them."""
        pairs = zip(text.split(self.text, dim), image.split(self.image, dim))
        return torch.cat([piece for pair in pairs for piece in pair], dim)


class FluxUlysses:
    """A processor of `FluxAttention`: own image and text tokens in double blocks, own joint ones in single blocks.

    `rows` comes through the transformer's `joint_attention_kwargs`; `image_rotary_emb` is of all tokens, joined.
    """

    _attention_backend = None
    _parallel_config = None

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.recomputes = False
        """Whether the transformer's activations are checkpointed: then the attention's are not kept either."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        rows: Rows | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Own tokens in, own tokens out."""
        assert rows is not None
        if attention_mask is not None:
            raise ValueError(
                "attention_mask is of whole sequences; a transformer that is split by sequence takes none"
            )
        layers, exchange = [attn.to_q, attn.to_k, attn.to_v], self.exchange
        double = encoder_hidden_states is not None
        sizes, name = (rows.image, "image") if double else (rows.joint, "joint")
        q, k, v = exchange.project(layers, hidden_states, sizes, name)
        q, k = attn.norm_q(q), attn.norm_k(k)
        if encoder_hidden_states is not None:
            layers = [attn.add_q_proj, attn.add_k_proj, attn.add_v_proj]
            text_q, text_k, text_v = exchange.project(layers, encoder_hidden_states, rows.text, "text")
            text_q, text_k = attn.norm_added_q(text_q), attn.norm_added_k(text_k)
            q, k, v = (rows.join(text, image, 1) for text, image in ((text_q, q), (text_k, k), (text_v, v)))
        if image_rotary_emb is not None:
            q, k = (apply_rotary_emb(one, image_rotary_emb, sequence_dim=1) for one in (q, k))
        heads = exchange.heads(attn.heads * exchange.head_dim)
        out = exchange.attend(q, k, v, rows.joint, heads, self._attention_backend, self.recomputes)
        if encoder_hidden_states is None:
            return out
        text, image = out.split([encoder_hidden_states.shape[1], hidden_states.shape[1]], 1)
        return attn.to_out[1](attn.to_out[0](image.contiguous())), attn.to_add_out(text.contiguous())


class WanUlysses:
    """A processor of the self-attention of `WanAttention`; `rotary_emb` is of all tokens."""

    _attention_backend = None
    _parallel_config = None

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.recomputes = False
        """Whether the transformer's activations are checkpointed: then the attention's are not kept either."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Own tokens in, own tokens out."""
        assert rotary_emb is not None
        assert encoder_hidden_states is None
        if attention_mask is not None:
            raise ValueError(
                "attention_mask is of whole sequences; a transformer that is split by sequence takes none"
            )
        exchange, layers = self.exchange, [attn.to_q, attn.to_k, attn.to_v]
        sizes = even(rotary_emb[0].shape[1], exchange.world_size)
        q, k, v = exchange.project(layers, hidden_states, sizes, "video", [attn.norm_q, attn.norm_k])
        q, k = (_rotated(one, *rotary_emb) for one in (q, k))
        heads = exchange.heads(attn.heads * exchange.head_dim)
        out = exchange.attend(q, k, v, sizes, heads, self._attention_backend, self.recomputes)
        return attn.to_out[1](attn.to_out[0](out))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (batch, rows, heads, head_dim), cos and sin (1, rows, 1, head_dim): as Wan pairs features."""
    one, other = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack([one * cos - other * sin, one * sin + other * cos], -1).flatten(-2).type_as(x)
