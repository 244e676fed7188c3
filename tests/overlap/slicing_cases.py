"""What every rank does in the tests of bench.llm's slicing: the same numbers as without it."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from bench.llm_slicing import sliced
from stretto.overlap import (
    all_gather_matmul,
    attention_all_to_all,
    attention_reduce_scatter,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_reduce_scatter,
    replicate_matmul,
)
from tests.overlap.matmul_cases import Draw, same


def block(x: Tensor, ws: list[Tensor], how: dict) -> Tensor:
    """Rows gathered, multiplied, multiplied and scattered again: the chunks' order within does not show."""
    group = dist.group.WORLD
    return matmul_reduce_scatter(all_gather_matmul(x, ws[0], group, **how).square(), ws[1], group, **how)


def whole_rows(x: Tensor, ws: list[Tensor], how: dict) -> Tensor:
    """Tensor parallelism with every row everywhere, both directions."""
    (y,) = replicate_matmul(x, [ws[0]], dist.group.WORLD, **how)
    return matmul_all_reduce(y.square(), ws[1], dist.group.WORLD, **how)


def ulysses(x: Tensor, ws: list[Tensor], how: dict) -> Tensor:
    n = dist.get_world_size()
    projected = matmul_all_to_all(x[None], [ws[2]] * 3, dist.group.WORLD, features=[[4] * n] * 3, **how)
    q, k, v = (part.unflatten(-1, (1, 4)) for part in projected)
    return attention_all_to_all(q, k, v, dist.group.WORLD, weight=ws[3], is_causal=True, **how)


def query_split(x: Tensor, ws: list[Tensor], how: dict) -> Tensor:
    y = all_gather_matmul(x, ws[4], dist.group.WORLD, **how)[None].unflatten(-1, (1, 4))
    return attention_reduce_scatter(y, y, y, ws[5], dist.group.WORLD, **how)


def compare(operation: str, k: int) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    draw = Draw(3)
    rows = 8 * n if operation == "whole_rows" else 8
    x = draw(n, rows, 6)[0 if operation == "whole_rows" else rank]
    shapes = [(n, 10, 6), (n, 6, 10), (1, 4 * n, 6), (1, 6, 4 * n), (n, 4, 6), (n, 6, 4)]
    ws = [draw(*shape)[rank % shape[0]] for shape in shapes]
    grad, found = None, []
    for context, how in ((nullcontext(), {"schedule": "plain"}), (sliced(), {"num_subslices": k})):
        inputs = [t.clone().requires_grad_() for t in (x, *ws)]
        with context:
            out = globals()[operation](inputs[0], inputs[1:], how)
            grad = torch.ones_like(out).cumsum(0) if grad is None else grad
            out.backward(grad)
        found.append([out.detach(), *(t.grad for t in inputs)])
    for index, (one, other) in enumerate(zip(*found)):
        assert (one is None) == (other is None)
        if one is not None:
            same(f"{operation} {index}", other, one)
