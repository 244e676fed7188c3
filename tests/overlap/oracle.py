"""The reference with the signatures of the library: the same cases run through both."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from stretto.overlap import reference
from stretto.overlap.inputs import listed, rows_first, rows_last
from stretto.overlap.queries import scaled_dot_product_attention
from stretto.overlap.routes import slice_sizes


class Whole:
    """A result that is complete, with the handle's interface."""

    def __init__(self, out: Any) -> None:
        self.out = out

    def wait(self) -> Any:
        return self.out


def sizes_of(x: Tensor, sizes: Any, group: dist.ProcessGroup) -> list[int]:
    n = dist.get_world_size(group)
    if sizes is None:
        return [len(x)] * n
    if sizes == "exchange":
        counts = [torch.empty(1, dtype=torch.int64) for _ in range(n)]
        dist.all_gather(counts, torch.tensor([len(x)]), group=group)
        return [int(count) for count in counts]
    return list(sizes)


def all_gather_matmul(
    x: Tensor,
    weights: Any,
    group: dist.ProcessGroup,
    *,
    dim: int = 0,
    biases: Any = None,
    sizes: Any = None,
    **_: Any,
) -> list[Tensor]:
    ws, bs = listed(weights, biases)
    dim %= x.ndim
    rows = rows_first(x, dim)
    outs = reference.all_gather_matmul(rows, ws, group, bs, sizes_of(rows, sizes, group))
    return [rows_last(out, x, dim) for out in outs]


def matmul_reduce_scatter(
    x: Tensor,
    weights: Any,
    group: dist.ProcessGroup,
    *,
    dim: int = 0,
    biases: Any = None,
    sizes: Any = None,
    **_: Any,
) -> Any:
    ws, bs = listed(weights, biases)
    dim %= x.ndim
    rows = rows_first(x, dim)
    given = slice_sizes(len(rows), dist.get_world_size(group)) if sizes is None else sizes
    outs = [rows_last(out, x, dim) for out in reference.matmul_reduce_scatter(rows, ws, group, bs, given)]
    return outs[0] if isinstance(weights, Tensor) else outs


def matmul_all_reduce_start(
    x: Tensor, weights: Any, group: dist.ProcessGroup, *, biases: Any = None, **_: Any
) -> Whole:
    ws, bs = listed(weights, biases)
    rows = x.reshape(math.prod(x.shape[:-1]), 1, x.shape[-1])
    outs = [out.view(*x.shape[:-1], -1) for out in reference.matmul_all_reduce(rows, ws, group, bs)]
    return Whole(outs[0] if isinstance(weights, Tensor) else outs)


def replicate_matmul(
    x: Tensor, weights: Sequence[Tensor], group: dist.ProcessGroup, *, biases: Any = None, **_: Any
) -> list[Tensor]:
    rows = x.reshape(math.prod(x.shape[:-1]), 1, x.shape[-1])
    outs = reference.replicate_matmul(rows, weights, group, listed(list(weights), biases)[1])
    return [out.view(*x.shape[:-1], out.shape[-1]) for out in outs]


def weight_gather_matmul(
    x: Tensor, weight: Tensor, group: dist.ProcessGroup, *, sizes: Any = None, **_: Any
) -> Tensor:
    return F.linear(x, reference.all_gather(weight, sizes_of(weight, sizes, group), group))


def matmul_all_to_all(
    x: Tensor,
    weights: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    features: Any,
    biases: Any = None,
    sizes: Any = None,
    **_: Any,
) -> list[Tensor]:
    rows = rows_first(x, 1)
    bs = listed(list(weights), biases)[1]
    out = reference.matmul_all_to_all(rows, weights, group, bs, features, sizes_of(rows, sizes, group))
    widths = [cut[dist.get_rank(group)] for cut in features]
    return [part.transpose(0, 1) for part in out.split(widths, -1)]


def attention_all_to_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup,
    *,
    heads: Any = None,
    weight: Any = None,
    bias: Any = None,
    attention: Any = scaled_dot_product_attention,
    attn_mask: Any = None,
    is_causal: bool = False,
    sizes: Any = None,
    **_: Any,
) -> Tensor:
    n = dist.get_world_size(group)
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    features = [count * v.shape[3] for count in ([q.shape[2]] * n if heads is None else heads)]
    given = slice_sizes(len(q), n) if sizes is None else sizes
    attended = reference.attend(q, k, v, attention, attn_mask, is_causal)
    return reference.join_heads(attended, group, features, given, weight, bias).transpose(0, 1)


def attention_reduce_scatter(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup,
    *,
    bias: Any = None,
    attention: Any = scaled_dot_product_attention,
    attn_mask: Any = None,
    is_causal: bool = False,
    sizes: Any = None,
    **_: Any,
) -> Tensor:
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    given = slice_sizes(len(q), dist.get_world_size(group)) if sizes is None else sizes
    attended = reference.attend(q, k, v, attention, attn_mask, is_causal)
    return reference.matmul_reduce_scatter(attended, [weight], group, [bias], given)[0].transpose(0, 1)
