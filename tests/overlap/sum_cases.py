"""What every rank does in the tests of accumulation: 16-bit sums against float64, and the same call twice."""

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.overlap import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from tests.overlap.matmul_cases import Draw


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x and weight of this rank in `dtype`, and the float64 sum over ranks of the products."""
    draw, rank, n = Draw(3), dist.get_rank(), dist.get_world_size()
    x, weight = draw(16 * n, 24 * n).to(dtype), draw(20, 24 * n).to(dtype)
    exact = x.double() @ weight.double().t()
    columns = slice(24 * rank, 24 * (rank + 1))
    return x[:, columns].contiguous(), weight[:, columns].contiguous(), exact


def relative_error(schedule: str, dtype: torch.dtype) -> float:
    x, weight, exact = problem(dtype)
    own = matmul_reduce_scatter(x, weight, dist.group.WORLD, schedule=schedule)
    assert own.dtype == dtype
    mine = exact[16 * dist.get_rank() :][:16]
    errors = torch.stack([(own.double() - mine).square().sum(), mine.square().sum()])
    dist.all_reduce(errors)
    return float((errors[0] / errors[1]).sqrt())


def direct_sum_in_fixed_order(dtype: torch.dtype) -> None:
    """Bit for bit the sum r-1, r-2, ..., r+1, own last of the rounded partials, in float32, rounded once."""
    rank, n = dist.get_rank(), dist.get_world_size()
    draw = Draw(3)
    x, weight = draw(16 * n, 24 * n).to(dtype), draw(20, 24 * n).to(dtype)
    bias = draw(20).to(dtype)
    total = torch.zeros(16, 20)
    for hop in range(1, n + 1):
        columns = slice(24 * ((rank - hop) % n), 24 * ((rank - hop) % n + 1))
        total += x[16 * rank : 16 * (rank + 1), columns].contiguous() @ weight[:, columns].contiguous().t()
    expected = (total + bias).to(dtype)
    mine, my_weight, _ = problem(dtype)
    got = matmul_reduce_scatter(mine, my_weight, dist.group.WORLD, biases=bias, schedule="direct")
    assert torch.equal(got, expected)


def twice(schedule: str) -> None:
    """Outputs and gradients of two runs, and the all-reduced output of all ranks, are bitwise equal."""
    group = dist.group.WORLD
    x, weight, _ = problem(torch.float32)
    runs = []
    for _ in range(2):
        a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        hidden = matmul_reduce_scatter(a, w, group, schedule=schedule, num_subslices=2)
        y = all_gather_matmul(hidden, w.t().contiguous(), group, schedule=schedule)
        y.square().sum().backward()
        runs.append((y.detach(), a.grad, w.grad))
    assert all(torch.equal(one, other) for one, other in zip(*runs))
    y = matmul_all_reduce(x, weight, group, schedule=schedule)
    everyones = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, y)
    assert all(torch.equal(y, other) for other in everyones)


def bias_gradients(schedule: str, num_subslices: int) -> None:
    """Every rank holds the whole bias: its gradient is bitwise the same on each."""
    group, rank, n = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # else rows are alike
    weight, bias = torch.ones(9, 4), torch.zeros(9, requires_grad=True)
    x = torch.randn(33 * n, 4, requires_grad=True)
    y = matmul_reduce_scatter(x, weight, group, biases=bias, schedule=schedule, num_subslices=num_subslices)
    y.backward(torch.randn_like(y))
    assert bias.grad is not None
    everyones = [torch.empty_like(bias.grad) for _ in range(n)]
    dist.all_gather(everyones, bias.grad)
    assert all(torch.equal(bias.grad, other) for other in everyones)


def sixteen_bit_gradients(dtype: torch.dtype) -> float:
    """The error of the weight's gradient, summed over slices, relative to one rounding of the exact one."""
    group, rank, n = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    draw = Draw(5)
    x, weight, load = draw(64 * n, 8).to(dtype), draw(6, 8).to(dtype), draw(64 * n, 6).to(dtype)
    mine, w = x[64 * rank : 64 * (rank + 1)].clone().requires_grad_(), weight.clone().requires_grad_()
    y = all_gather_matmul(mine, w, group)
    y.backward(load)
    exact = load.double().t() @ x.double()
    assert w.grad.dtype == dtype
    return float((w.grad.double() - exact).norm() / (exact.to(dtype).double() - exact).norm())
