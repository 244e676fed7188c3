"""How an attention trades own tokens for own heads and back: an all-to-all on either side of it, hidden.

Others' head groups are projected first and sent, and so are others' tokens attended first (`matmul_all_to_all`,
`attention_all_to_all`). peft's LoRA on a projection travels in the projection's message. The hazard is a layer that
is neither a plain linear layer nor plain LoRA (patched, hooked, DoRA, tensor parallel): it is called whole, and what
it gave is traded with nothing beside it, which is said once. Source: DeepSpeed-Ulysses (arXiv 2309.14509).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import dispatch_attention_fn
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.overlap import attention_all_to_all, matmul_all_to_all, reference, split_heads
from stretto.overlap.norms import features_rms_norms
from stretto.overlap.p2p import peers_of

__all__ = ["Exchange", "even"]


class Plain(NamedTuple):
    """A linear layer as its numbers."""

    weight: Tensor
    bias: Tensor | None
    low_rank: tuple[Tensor, Tensor] | None
    """What LoRA adds, as `matmul_all_to_all` takes it."""


def even(total: int, parts: int) -> list[int]:
    """`total` in as even parts as can be; the first have more."""
    return [total // parts + (part < total % parts) for part in range(parts)]


@dataclass(frozen=True)
class Exchange:
    """How the attentions of one model trade tokens for heads; the same on every rank of the group."""

    group: dist.ProcessGroup
    head_dim: int
    options: dict[str, Any] = field(default_factory=dict)
    """schedule, num_subslices, check: as of `matmul_all_to_all`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Exchange":
        """A copy of a model trades over the same group."""
        return self

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return dist.get_world_size(self.group)

    def heads(self, num_features: int) -> list[int]:
        """Of every rank, where a projection has so many features."""
        return split_heads(num_features // self.head_dim, self.world_size)[0]

    def project(
        self, layers: Sequence[nn.Module], x: Tensor, sizes: list[int], name: str, norms: Sequence[nn.Module] = ()
    ) -> list[Tensor]:
        """x (batch, own rows, K) -> of each layer (batch, all rows, own heads, head_dim).

        `norms` are of the first layers' outputs, over all heads' features.
        """
        plain = [_plain(layer, x) for layer in layers]
        read = [one for one in plain if one is not None]
        if len(read) < len(layers) or not all(_is_plain(norm, nn.RMSNorm) for norm in norms):
            outputs = self._trade_outputs(layers, x, sizes, norms)
        else:
            x, read = _autocast(x, read)
            features = [[self.head_dim * h for h in self.heads(len(one.weight))] for one in read]
            outputs = matmul_all_to_all(
                x,
                [one.weight for one in read],
                self.group,
                features=features,
                biases=[one.bias for one in read],
                low_rank=[one.low_rank for one in read],
                sizes=sizes,
                tuned_as=name,
                **self.options,
            )
            outputs = self._normed(outputs, norms, features)
        return [output.unflatten(-1, (-1, self.head_dim)) for output in outputs]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, sizes: list[int], heads: list[int], backend: Any, recompute: bool
    ) -> Tensor:
        """q, k, v (batch, all rows, own heads, head_dim) -> (batch, own rows, all heads' features)."""

        def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> Tensor:
            turned = (tensor.transpose(1, 2) for tensor in (query, key, value))
            return dispatch_attention_fn(*turned, attn_mask=attn_mask, backend=backend).transpose(1, 2)

        options = {"sizes": sizes, "heads": heads, "attention": attention, "recompute": recompute, **self.options}
        return attention_all_to_all(q, k, v, self.group, **options)

    def _normed(self, outputs: list[Tensor], norms: Sequence[Any], features: list[list[int]]) -> list[Tensor]:
        """The first outputs normed over all ranks' features."""
        if not norms:
            return outputs
        cut, rank = features[0], dist.get_rank(self.group)
        normed = features_rms_norms(
            outputs[: len(norms)],
            [None if norm.weight is None else norm.weight.split(cut)[rank] for norm in norms],
            self.group,
            eps=[norm.eps for norm in norms],
            num_features=sum(cut),
            check=self.options.get("check", True),
        )
        return [*normed, *outputs[len(norms) :]]

    def _trade_outputs(
        self, layers: Sequence[nn.Module], x: Tensor, sizes: list[int], norms: Sequence[nn.Module]
    ) -> list[Tensor]:
        """The layers' own forwards, then an all-to-all of what they gave: nothing is computed beside it."""
        peers = peers_of(self.group)
        peers.records.say_once(
            peers.group,
            "attention's projections are called whole (patched, hooked, sharded, or no plain linear or LoRA layers): "
            "what they trade is not overlapped",
        )
        ys = [layer(x) for layer in layers]
        ys = [norm(y) for norm, y in zip(norms, ys)] + ys[len(norms) :]
        cuts = [[self.head_dim * h for h in self.heads(y.shape[-1])] for y in ys]
        pieces = [torch.cat(parts, -1) for parts in zip(*(y.split(cut, -1) for y, cut in zip(ys, cuts)))]
        own = [cut[peers.rank] for cut in cuts]
        shapes = [(len(x), size, sum(own)) for size in sizes]
        return list(torch.cat(reference.all_to_all(pieces, shapes, self.group), 1).split(own, -1))


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is just of a kind: nobody patched it, watches it, or sharded it."""
    watched = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    sharded = any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False))
    return type(module) is kind and "forward" not in vars(module) and not any(watched) and not sharded


def _plain(layer: Any, x: Tensor) -> Plain | None:
    """Weight, bias and low-rank pair of a linear layer with or without LoRA, or None for any other."""
    if _is_plain(layer, nn.Linear):
        return Plain(layer.weight, layer.bias, None)
    base: Any = getattr(layer, "base_layer", None)
    if not _is_plain(layer, LoraLinear) or not _is_plain(base, nn.Linear):
        return None
    if layer.disable_adapters and layer.merged:
        return None  # peft unmerges when it is called
    if layer.disable_adapters or layer.merged:
        return Plain(base.weight, base.bias, None)
    pairs = []
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        up = layer.lora_B[name]
        if name in layer.lora_variant or not _is_plain(up, nn.Linear) or up.bias is not None:
            return None
        down = layer.lora_A[name]
        given = layer._cast_input_dtype(x, down.weight.dtype)
        pairs.append((down(layer.lora_dropout[name](given)) * layer.scaling[name], up.weight))
    if len(pairs) < 2:
        return Plain(base.weight, base.bias, pairs[0] if pairs else None)
    lows, ups = zip(*pairs)
    return Plain(base.weight, base.bias, (torch.cat(lows, -1), torch.cat(ups, -1)))


def _autocast(x: Tensor, read: list[Plain]) -> tuple[Tensor, list[Plain]]:
    """All of them in autocast's dtype, where it is on: as `nn.Linear` computes."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x, read
    dtype = torch.get_autocast_dtype(device)
    cast: list[Plain] = []
    for weight, bias, pair in read:
        bias = None if bias is None else bias.to(dtype)
        cast.append(Plain(weight.to(dtype), bias, None if pair is None else (pair[0].to(dtype), pair[1].to(dtype))))
    return x.to(dtype), cast
