"""Ulysses sequence parallelism for the transformers of FLUX (and the digits) and Wan: tokens over a group's ranks.

Outside of attention a rank computes its own text and image tokens alone. The transformer still takes whole latents
and gives the whole velocity, on every rank. Nothing of diffusers is replaced but attention processors: hooks take the
own tokens going in and join all ranks' velocities coming out, at `proj_out`, where diffusers' `_cp_plan` does. The
hazard: every rank of the group must make the same forwards and backwards in the same order, with the same inputs.
Source: DeepSpeed-Ulysses (arXiv 2309.14509).
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from stretto.models.ulysses_attention import FluxUlysses, Rows, WanUlysses
from stretto.models.ulysses_exchange import Exchange, even
from stretto.overlap import reference
from stretto.overlap.modules import ParallelLinear
from stretto.overlap.p2p import peers_of

__all__ = ["split_sequence"]

_IDS = ("txt_ids", "img_ids")


def split_sequence(
    transformer: nn.Module,
    group: dist.ProcessGroup | DeviceMesh,
    *,
    schedule: str = "auto",
    num_subslices: int = 1,
    check: bool = True,
) -> nn.Module:
    """Share a transformer's tokens out over the ranks of a group, in place.

    Text and image tokens (Wan: the video's; its text stays whole, for it is only attended to) are cut as evenly as
    can be, and so are heads; neither needs to be divided by the ranks, and a rank may have no token at all. LoRA may
    be injected before or after. Parameters and state dict stay as they are, whole on every rank. A deep copy is split
    as well, over the same group. Beside tensor parallelism, which comes first and must leave rows whole, each rank's
    own heads are split again; FSDP2 comes after.

    Args:
        transformer: a FluxTransformer2DModel or WanTransformer3DModel of diffusers.
        group: its ranks, or a one-dimensional mesh of them; all must be given the same weights and inputs.
        schedule: "auto" (each shape is measured once), "direct" or "plain": see `matmul_all_to_all`.
        num_subslices: pieces a rank's tokens are cut in.
        check: compare headers; see `matmul_all_to_all`.

    Returns:
        The same module: whole latents in, whole velocity out, the same on every rank.

    Gradients:
        Every rank holds the same loss. A parameter's gradient is the part of the rank's own tokens and heads: the SUM
        over the group is that of one process. So is the latents' gradient.

    Communication:
        Forward and backward of each attention: q, k and v of own tokens out, one head group to each rank, and what
        was attended back; hidden behind the projections and the attention. Wan's norms over all heads: two numbers a
        token, waited for. Once a forward: the velocity is gathered, waited for; nothing in its backward.

    Raises:
        ValueError: for another transformer, one that is split already, fewer heads than ranks, and processors that
            are not diffusers' own.
    """
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    world_size = peers_of(group).world_size
    attentions = _checked(transformer, world_size)
    if world_size == 1:
        return transformer
    config: Any = transformer.config
    options = {"schedule": schedule, "num_subslices": num_subslices, "check": check}
    exchange = Exchange(group, config.attention_head_dim, options)
    flux = isinstance(transformer, FluxTransformer2DModel)
    for attention in attentions:
        attention.set_processor(FluxUlysses(exchange) if flux else WanUlysses(exchange))
    if flux:
        transformer.register_forward_pre_hook(_FluxTokens(exchange), with_kwargs=True)
    else:
        transformer.register_forward_pre_hook(_WanTokens(exchange), with_kwargs=True)
        blocks: Any = transformer.blocks
        blocks[0].register_forward_pre_hook(_OwnTokens(exchange), with_kwargs=True)
    return transformer


def _checked(transformer: Any, world_size: int) -> list[Any]:
    """The attentions that see all tokens, or `ValueError`."""
    if not isinstance(transformer, FluxTransformer2DModel | WanTransformer3DModel):
        raise ValueError(
            f"{type(transformer).__name__} cannot be split by sequence; FluxTransformer2DModel and "
            f"WanTransformer3DModel of diffusers can"
        )
    attentions = _attentions(transformer)
    for attention in attentions:
        name = type(attention.processor).__name__
        if name in ("FluxUlysses", "WanUlysses"):
            raise ValueError("this transformer is split by sequence already")
        if name not in ("FluxAttnProcessor", "WanAttnProcessor"):
            raise ValueError(f"a transformer with {name} cannot be split by sequence; reset its attention processors")
    if any(isinstance(one, ParallelLinear) and one.options.sequence_parallel for one in transformer.modules()):
        raise ValueError("its layers are split with sharded rows; beside parallel.ulysses split them with rows whole")
    num_heads = min(attention.heads for attention in attentions)
    if num_heads < world_size:
        divisors = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
        raise ValueError(
            f"num_heads={num_heads} cannot be split over {world_size} ranks; set parallel.ulysses to at most "
            f"{num_heads} (divisors of it, {divisors}, give every rank as many)"
        )
    return attentions


def _attentions(transformer: Any) -> list[Any]:
    """Those that see all tokens: all of FLUX's, Wan's self-attentions."""
    if isinstance(transformer, WanTransformer3DModel):
        return [block.attn1 for block in transformer.blocks]
    return [block.attn for block in (*transformer.transformer_blocks, *transformer.single_transformer_blocks)]


@dataclass
class _FluxTokens:
    """Before FLUX's forward: own latent and text tokens; positions of all, in the order of the joint sequence."""

    exchange: Exchange

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = _named(module, args, kwargs)
        for name in ("controlnet_block_samples", "controlnet_single_block_samples"):
            if given.get(name) is not None:
                raise ValueError(f"{name} are of all tokens; a transformer that is split by sequence takes none")
        latents, text, world_size = given["hidden_states"], given["encoder_hidden_states"], self.exchange.world_size
        rows = Rows(even(text.shape[1], world_size), even(latents.shape[1], world_size)[::-1])
        rank = dist.get_rank(self.exchange.group)
        given["hidden_states"] = latents.split(rows.image, 1)[rank]
        given["encoder_hidden_states"] = text.split(rows.text, 1)[rank]
        text_ids, image_ids = (given[name][0] if given[name].ndim == 3 else given[name] for name in _IDS)
        joined = rows.join(text_ids, image_ids, 0)  # forward puts one behind the other, and reads no more of them
        given["txt_ids"], given["img_ids"] = joined.split([text.shape[1], latents.shape[1]])
        given["joint_attention_kwargs"] = {**(given.get("joint_attention_kwargs") or {}), "rows": rows}
        _join_at_the_end(module, self.exchange, rows.image)
        return (), given


@dataclass
class _WanTokens:
    """Before Wan's forward: how many tokens its video will have."""

    exchange: Exchange

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = _named(module, args, kwargs)
        if given["timestep"].ndim != 1:
            raise ValueError("a timestep a token (Wan 2.2) cannot be split by sequence; give one a sample")
        sizes = zip(given["hidden_states"].shape[2:], module.config.patch_size)
        num_tokens = 1
        for size, patch in sizes:
            num_tokens *= size // patch
        _join_at_the_end(module, self.exchange, even(num_tokens, self.exchange.world_size))
        return (), given


@dataclass
class _OwnTokens:
    """Before Wan's first block: own tokens of (batch, tokens, features)."""

    exchange: Exchange

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = _named(module, args, kwargs)
        tokens, group = given["hidden_states"], self.exchange.group
        given["hidden_states"] = tokens.split(even(tokens.shape[1], self.exchange.world_size), 1)[
            dist.get_rank(group)
        ]
        return (), given


@dataclass
class _AllTokens:
    """After `proj_out`: own tokens (batch, own, features) become all of them, on every rank."""

    exchange: Exchange
    sizes: list[int]

    def __call__(self, module: Any, args: Any, output: Tensor) -> Tensor:
        joined: Tensor = _Joined.apply(output, self.sizes, self.exchange.group)
        return joined


def _join_at_the_end(module: Any, exchange: Exchange, sizes: list[int]) -> None:
    """Let this forward's `proj_out` join; peft may have wrapped or unwrapped it since the last one.

    And let the processors know whether activations are checkpointed.
    """
    for attention in _attentions(module):
        attention.processor.recomputes = module.gradient_checkpointing
    for inner in module.proj_out.modules():
        for key, hook in list(inner._forward_hooks.items()):
            if isinstance(hook, _AllTokens):
                del inner._forward_hooks[key]
    module.proj_out.register_forward_hook(_AllTokens(exchange, sizes))


class _Joined(torch.autograd.Function):
    """All ranks' tokens; every rank holds the same loss, so the gradient of the own ones is the own part of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        """(batch, own, features) -> (batch, all, features)."""
        ctx.sizes, ctx.rank = sizes, dist.get_rank(group)
        return reference.all_gather(x.transpose(0, 1).contiguous(), sizes, group).transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Nothing is sent."""
        return grads[0].split(ctx.sizes, 1)[ctx.rank].contiguous(), None, None


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward by name."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return {**dict(zip(names, args)), **kwargs}
