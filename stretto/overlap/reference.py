"""The same operations with plain collectives: the specification, which the tests hold every schedule to.

Four collectives with their gradients, and every operation as a composition of one of them with
`torch.nn.functional.linear`. Slow, plain, and hides nothing. The hazard: a plain collective sums in the dtype
of the wire and in an order of its own. Rows come first, (rows, inner, features). Source: the conjugate pairs
of Megatron-LM's sequence parallelism.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from stretto.overlap.queries import Attention, slice_mask

__all__ = [
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_to_all",
    "attend",
    "join_heads",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "reduce_scatter",
    "replicate",
    "replicate_matmul",
]


def _gather(x: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    padded = x.new_zeros(max(sizes), *x.shape[1:])
    padded[: len(x)] = x
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(gathered, sizes)])


def _scatter(x: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    padded = x.new_zeros(len(sizes), max(sizes), *x.shape[1:])
    for place, part in zip(padded, x.split(list(sizes))):
        place[: len(part)] = part
    own = torch.empty_like(padded[0])
    dist.reduce_scatter(own, list(padded.unbind()), group=group)
    return own[: sizes[dist.get_rank(group)]].clone()


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _gather(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _scatter(grads[0], ctx.sizes, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _scatter(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(grads[0], ctx.sizes, ctx.group), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, shapes: Sequence[Sequence[int]], *pieces: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.shapes = group, [piece.shape for piece in pieces]
        return _trade(pieces, shapes, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_trade(grads, ctx.shapes, ctx.group)


def _trade(pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    counts = [math.prod(shape) for shape in shapes]
    received = pieces[0].new_empty(sum(counts))
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    dist.all_to_all_single(received, sent, counts, [piece.numel() for piece in pieces], group=group)
    return tuple(part.view(*shape) for part, shape in zip(received.split(counts), shapes))


def all_to_all(
    pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Piece p goes to rank p; the results are the pieces from every rank, of `shapes`; gradients go back."""
    result: tuple[Tensor, ...] = _AllToAll.apply(group, shapes, *pieces)
    return result


def all_gather(x: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """(sizes[rank], ...) -> (sum(sizes), ...), rank by rank; the gradient is reduce-scattered."""
    result: Tensor = _AllGather.apply(x, sizes, group)
    return result


def reduce_scatter(x: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """(sum(sizes), ...) -> (sizes[rank], ...), summed over ranks; the gradient is gathered."""
    result: Tensor = _ReduceScatter.apply(x, sizes, group)
    return result


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums over ranks; the gradient, equal on all ranks, passes through."""
    result: Tensor = _AllReduce.apply(x, group)
    return result


def replicate(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The identity on a tensor that is equal on all ranks; the gradient is summed over ranks."""
    result: Tensor = _Replicate.apply(x, group)
    return result


def all_gather_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    group: dist.ProcessGroup,
    biases: Sequence[Tensor | None],
    sizes: Sequence[int],
) -> list[Tensor]:
    """x (sizes[rank], inner, K), each weight (F, K) -> each (sum(sizes), inner, F)."""
    gathered = all_gather(x, sizes, group)
    return [F.linear(gathered.to(weight.dtype), weight, bias) for weight, bias in zip(weights, biases)]


def matmul_reduce_scatter(
    x: Tensor,
    weights: Sequence[Tensor],
    group: dist.ProcessGroup,
    biases: Sequence[Tensor | None],
    sizes: Sequence[int],
) -> list[Tensor]:
    """x (sum(sizes), inner, K), each weight (F, K) -> each (sizes[rank], inner, F); biases after the sum."""
    ys = [reduce_scatter(F.linear(x, weight), sizes, group) for weight in weights]
    return [y if bias is None else y + replicate(bias, group) for y, bias in zip(ys, biases)]


def matmul_all_reduce(
    x: Tensor, weights: Sequence[Tensor], group: dist.ProcessGroup, biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """x (rows, inner, K), each weight (F, K) -> each (rows, inner, F) on all ranks; biases after the sum."""
    ys = [all_reduce(F.linear(x, weight), group) for weight in weights]
    return [y if bias is None else y + bias for y, bias in zip(ys, biases)]


def replicate_matmul(
    x: Tensor, weights: Sequence[Tensor], group: dist.ProcessGroup, biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """x (rows, inner, K) on all ranks, each weight (F, K) -> (rows, inner, F); x's gradient is summed."""
    x = replicate(x, group)
    return [F.linear(x.to(weight.dtype), weight, bias) for weight, bias in zip(weights, biases)]


def matmul_all_to_all(
    x: Tensor,
    weights: Sequence[Tensor],
    group: dist.ProcessGroup,
    biases: Sequence[Tensor | None],
    features: Sequence[Sequence[int]],
    sizes: Sequence[int],
) -> Tensor:
    """x (sizes[rank], inner, K), weights (F, K) -> (sum(sizes), inner, this rank's features of all)."""
    ys = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases)]
    split = [y.split(list(cut), -1) for y, cut in zip(ys, features)]
    pieces = [torch.cat(parts, -1) for parts in zip(*split)]
    width = sum(cut[dist.get_rank(group)] for cut in features)
    return torch.cat(all_to_all(pieces, [(size, x.shape[1], width) for size in sizes], group))


def attend(
    q: Tensor, k: Tensor, v: Tensor, attention: Attention, attn_mask: Tensor | None, is_causal: bool
) -> Tensor:
    """q (rows, batch, heads, d), k and v (rows, batch, kv_heads, d) -> (rows, batch, heads * d)."""
    mask = slice_mask(attn_mask, is_causal, slice(0, len(q)), len(k), q.device)
    query, key, value = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    return attention(query, key, value, mask).permute(2, 0, 1, 3).flatten(2)


def join_heads(
    attended: Tensor,
    group: dist.ProcessGroup,
    features: Sequence[int],
    sizes: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """(sum(sizes), batch, features[rank]) -> (sizes[rank], batch, sum(features)), or projected."""
    own, batch = sizes[dist.get_rank(group)], attended.shape[1]
    shapes = [(own, batch, count) for count in features]
    joined = torch.cat(all_to_all(attended.split(list(sizes)), shapes, group), -1)
    return joined if weight is None else F.linear(joined, weight, bias)
