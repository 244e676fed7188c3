"""What `bench.gpu` checks: every operation, sent as a device sends, beside one process that has everything.

Each check yields pairs, what this rank got and what one process computes: outputs and gradients. The hazard: both sum
in orders of their own, so a bound is one of rounding, not of bits.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.overlap import (
    GradientReducer,
    all_gather_matmul,
    attention_all_to_all,
    attention_reduce_scatter,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_reduce_scatter,
    replicate_matmul,
    weight_gather_matmul,
)

BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6}
SCHEDULES = {
    "plain": ("plain", 1),
    "direct m=1": ("direct", 1),
    "direct m=2": ("direct", 2),
    "direct m=4": ("direct", 4),
    "ring": ("ring", 1),
    "auto": ("auto", 1),
}
Pairs = Iterator[tuple[Tensor, Tensor]]


def checks(group: dist.ProcessGroup, device: torch.device) -> Iterator[tuple[str, float]]:
    """By name, the relative error over its bound: outputs and gradients beside one process that has everything."""
    for dtype, bound in BOUNDS.items():
        for check in CHECKS:
            pairs = check(group, device, dtype)
            error = max(float((mine - whole).norm() / whole.norm()) for mine, whole in pairs)
            yield f"{check.__name__.lstrip('_')}, {str(dtype).removeprefix('torch.')}", error / bound


def drawn(seed: int, device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)


def _parts(group: dist.ProcessGroup, whole: Tensor, dim: int) -> Tensor:
    part = whole.detach().chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]
    return part.clone().requires_grad_()


def _column_and_row(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> Pairs:
    n = dist.get_world_size(group)
    shapes = ((4 * n, 3, 16), (8 * n, 16), (16, 8 * n))
    x, up, down = (drawn(i, device, dtype, *shape).requires_grad_() for i, shape in enumerate(shapes))
    y = F.linear(torch.tanh(F.linear(x, up)), down)
    y.square().sum().backward()
    for schedule, m in SCHEDULES.values():
        mine = [_parts(group, x, 0), _parts(group, up, 0), _parts(group, down, 1)]
        hidden = all_gather_matmul(mine[0], mine[1], group, schedule=schedule, num_subslices=m)
        out = matmul_reduce_scatter(torch.tanh(hidden), mine[2], group, schedule=schedule, num_subslices=m)
        out.square().sum().backward()
        yield out.detach(), _parts(group, y, 0).detach()
        for part, whole, dim in zip(mine, (x, up, down), (0, 0, 1)):
            yield part.grad, _parts(group, whole.grad, dim).detach()


def _whole_rows(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> Pairs:
    """A column and a row layer between which, and around which, every rank has all rows."""
    n = dist.get_world_size(group)
    shapes = ((2 * n + 1, 3, 16), (8 * n, 16), (16, 8 * n))
    x, up, down = (drawn(i, device, dtype, *shape).requires_grad_() for i, shape in enumerate(shapes))
    y = F.linear(torch.tanh(F.linear(x, up)), down)
    y.square().sum().backward()
    for schedule, m in SCHEDULES.values():
        mine, my_up, my_down = x.detach().clone().requires_grad_(), _parts(group, up, 0), _parts(group, down, 1)
        (hidden,) = replicate_matmul(mine, [my_up], group, schedule=schedule, num_subslices=m)
        out = matmul_all_reduce(torch.tanh(hidden), my_down, group, schedule=schedule, num_subslices=m)
        out.square().sum().backward()
        yield from ((out.detach(), y.detach()), (mine.grad, x.grad))
        yield my_up.grad, _parts(group, up.grad, 0).detach()
        yield my_down.grad, _parts(group, down.grad, 1).detach()


def _weight_gather(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> Pairs:
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    shapes = ((n, 4, 16), (4 * n, 16))
    x, weight = (drawn(i, device, dtype, *shape).requires_grad_() for i, shape in enumerate(shapes))
    y = F.linear(x, weight)
    y.square().sum().backward()
    for schedule, m in SCHEDULES.values():
        mine, part = x.detach()[rank].clone().requires_grad_(), _parts(group, weight, 0)
        out = weight_gather_matmul(mine, part, group, schedule=schedule, num_subslices=m)
        out.square().sum().backward()
        yield from ((out.detach(), y.detach()[rank]), (mine.grad, x.grad[rank]))
        yield part.grad, _parts(group, weight.grad, 0).detach()


def _ulysses(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> Pairs:
    n = dist.get_world_size(group)
    q, k, v = (drawn(i, device, dtype, 2, 4 * n, 2 * n, 8).requires_grad_() for i in range(3))
    y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
    y = y.transpose(1, 2).flatten(2)
    y.square().sum().backward()
    mine = [_parts(group, t, 2) for t in (q, k, v)]
    out = attention_all_to_all(*mine, group, is_causal=True)
    out.square().sum().backward()
    yield out.detach(), _parts(group, y, 1).detach()
    for part, whole in zip(mine, (q, k, v)):
        yield part.grad, _parts(group, whole.grad, 2).detach()


def _query_split(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> Pairs:
    """Projected by an all-to-all, attended by head, projected and summed by row."""
    n = dist.get_world_size(group)
    shapes = ((2, 4 * n, 16), (16 * n, 16), (16, 16 * n))
    x, weight, out_weight = ((drawn(i, device, dtype, *s) / 4).requires_grad_() for i, s in enumerate(shapes))
    q = F.linear(x, weight).unflatten(-1, (-1, 8)).transpose(1, 2)
    y = F.linear(F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2), out_weight)
    y.square().sum().backward()
    for schedule, m in SCHEDULES.values():
        mine, whole, part = (
            _parts(group, x, 1),
            weight.detach().clone().requires_grad_(),
            _parts(group, out_weight, 1),
        )
        there = {"schedule": "direct" if schedule == "ring" else schedule, "num_subslices": m}
        (sent,) = matmul_all_to_all(mine, [whole], group, features=[[16] * n], **there)
        heads = sent.unflatten(-1, (-1, 8))
        back = {"schedule": schedule, "num_subslices": m, "is_causal": True}
        out = attention_reduce_scatter(heads, heads, heads, part, group, **back)
        out.square().sum().backward()
        dist.all_reduce(whole.grad, group=group)  # each rank's is its own rows' part
        yield out.detach(), _parts(group, y, 1).detach()
        yield mine.grad, _parts(group, x.grad, 1).detach()
        yield from ((whole.grad, weight.grad), (part.grad, _parts(group, out_weight.grad, 1).detach()))


def _reducer(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> Pairs:
    """On the group of the operations: nothing else runs on it meanwhile."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)).to(device, dtype)
    inputs = drawn(3, device, dtype, n, 4, 16)
    whole = torch.autograd.grad(model(inputs).square().sum() / n, list(model.parameters()))
    reducer = GradientReducer(model, group, bucket_bytes=1 << 9, last=model[0])
    model(inputs[rank]).square().sum().backward()
    reducer.finish()
    reducer.close()
    for parameter, expected in zip(model.parameters(), whole):
        assert parameter.grad is not None
        yield parameter.grad, expected


def _late_bound(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> Pairs:
    """Weights that come after every piece was sent, and the next backward's pieces on the way."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)).to(device, dtype)
    inputs, weights = drawn(4, device, dtype, 2, n, 4, 16), drawn(5, device, dtype, 2, n)
    losses = torch.stack([torch.stack([model(x).square().sum() for x in row]) for row in inputs])
    whole = torch.autograd.grad((weights * losses).sum(), list(model.parameters()))
    reducer = GradientReducer(model, group, bucket_bytes=1 << 9, late_bound=True)
    for row in inputs:
        model(row[rank]).square().sum().backward()
        reducer.finish()
    reducer.settle(weights)
    reducer.deliver()
    reducer.close()
    for parameter, expected in zip(model.parameters(), whole):
        assert parameter.grad is not None
        yield parameter.grad, expected


CHECKS = (_column_and_row, _whole_rows, _weight_gather, _ulysses, _query_split, _reducer, _late_bound)
