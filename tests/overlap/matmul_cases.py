"""What every rank does in the tests of products: the library's call beside the whole problem by one process.

Every rank draws the same whole problem from a seed and solves it alone with ordinary autograd; what the
library gave this rank must be this rank's part of that solution. A case is plain data.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stretto import overlap
from stretto.overlap.products import WeightGradient
from tests.overlap import oracle

TOLERANCE = 1e-12


def same(name: str, mine: Tensor, whole: Tensor, tolerance: float = TOLERANCE) -> None:
    assert mine.shape == whole.shape, (name, mine.shape, whole.shape)
    error = float((mine - whole).norm())
    bound = tolerance * float(whole.norm())
    assert error <= bound, f"{name} is off by {error:.2e}, allowed {bound:.2e}"


class Draw:
    """Random float64 tensors, the same on every rank."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64)


def part_of(group: dist.ProcessGroup) -> Callable[[Tensor, Sequence[int], int], Tensor]:
    rank = dist.get_rank(group)
    return lambda whole, sizes, dim: whole.split(list(sizes), dim)[rank]


def leaf(tensor: Tensor, needed: bool = True) -> Tensor:
    return tensor.detach().clone().requires_grad_(bool(needed))


def room(case: dict[str, Any]) -> Any:
    """Where a case's operation comes from: the library, or the reference with its signatures."""
    return oracle if case["schedule"] == "reference" else overlap


def settings_of(case: dict[str, Any], *extra: str) -> dict[str, Any]:
    return {name: case[name] for name in ("schedule", "num_subslices", *extra)}


def x_shape(case: dict[str, Any], rows: int, features: int) -> list[int]:
    shape = [*case["inner"], features]
    shape.insert(case["dim"], rows)
    return shape


def column(case: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """all_gather_matmul: rows[r] rows on rank r, features[w][r] output features of weight w on rank r."""
    group, dim = group or dist.group.WORLD, case["dim"]
    part = part_of(group)
    draw, rows = Draw(case["seed"]), case["rows"]
    needs_x, needs_w, needs_b = case["needs"]
    x = leaf(draw(*x_shape(case, sum(rows), case["k"])), needs_x)
    weights = [leaf(draw(sum(sizes), case["k"]), needs_w) for sizes in case["features"]]
    biases = [leaf(draw(sum(sizes)), needs_b) if case["bias"] else None for sizes in case["features"]]
    ys = [F.linear(x, w, b) for w, b in zip(weights, biases)]
    loads = [draw(*y.shape) for y in ys]
    if x.requires_grad or needs_w or (case["bias"] and needs_b):
        sum((y * load).sum() for y, load in zip(ys, loads)).backward()

    mine = leaf(part(x, rows, dim), needs_x)
    my_ws = [leaf(part(w, sizes, 0), needs_w) for w, sizes in zip(weights, case["features"])]
    my_bs = [None if b is None else leaf(part(b, sizes, 0), needs_b) for b, sizes in zip(biases, case["features"])]
    sizes = {"exchange": "exchange", "given": rows, "equal": None}[case["sizes"]]
    options = settings_of(case, "keep_gathered")
    outs = room(case).all_gather_matmul(mine, my_ws, group, dim=dim, biases=my_bs, sizes=sizes, **options)
    my_loads = [part(load, sizes, -1) for load, sizes in zip(loads, case["features"])]
    for out, y, sizes in zip(outs, ys, case["features"]):
        same("y", out, part(y, sizes, -1))
    if outs[0].requires_grad:
        sum((out * load).sum() for out, load in zip(outs, my_loads)).backward()
    if needs_x:
        same("x.grad", mine.grad, part(x.grad, rows, dim))
    for w, my_w, b, my_b, sizes in zip(weights, my_ws, biases, my_bs, case["features"]):
        if needs_w:
            same("weight.grad", my_w.grad, part(w.grad, sizes, 0))
        if needs_b and b is not None:
            same("bias.grad", my_b.grad, part(b.grad, sizes, 0))


def row(case: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """matmul_reduce_scatter: features[0][r] input features on rank r, rows[r] of the output's rows.

    Weight w has k + w output features; every second one has no bias; outputs of one weight come alone.
    """
    group, dim = group or dist.group.WORLD, case["dim"]
    part = part_of(group)
    draw, rows, ks = Draw(case["seed"]), case["rows"], case["features"][0]
    needs_x, needs_w, needs_b = case["needs"]
    x = leaf(draw(*x_shape(case, sum(rows), sum(ks))), needs_x)
    weights, biases = row_parameters(case, draw)
    ys = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases)]
    loads = [draw(*y.shape) for y in ys]
    loss = sum((y * load).sum() for y, load in zip(ys, loads))
    if loss.requires_grad:
        loss.backward()

    mine, my_ws = leaf(part(x, ks, -1), needs_x), [leaf(part(weight, ks, -1), needs_w) for weight in weights]
    my_bs = [None if bias is None else leaf(bias, needs_b) for bias in biases]
    sizes = None if case["sizes"] == "equal" else rows
    outs = row_outputs(
        room(case).matmul_reduce_scatter, mine, my_ws, group, my_bs, dim=dim, sizes=sizes, **settings_of(case)
    )
    for out, y in zip(outs, ys):
        same("y", out, part(y, rows, dim))
    loss = sum((out * part(load, rows, dim)).sum() for out, load in zip(outs, loads))
    if loss.requires_grad:
        loss.backward()
    if needs_x:
        same("x.grad", mine.grad, part(x.grad, ks, -1))
    for weight, my_w, bias, my_b in zip(weights, my_ws, biases, my_bs):
        if needs_w:
            same("weight.grad", my_w.grad, part(weight.grad, ks, -1))
        if needs_b and bias is not None:
            same("bias.grad", my_b.grad, bias.grad)
            everyones = [torch.empty_like(my_b.grad) for _ in ks]
            dist.all_gather(everyones, my_b.grad, group=group)
            if case["schedule"] != "reference":
                assert all(torch.equal(grad, my_b.grad) for grad in everyones)


def row_parameters(case: dict[str, Any], draw: Draw) -> tuple[list[Tensor], list[Tensor | None]]:
    num_weights, num_features = len(case["features"]), sum(case["features"][0])
    _, needs_w, needs_b = case["needs"]
    weights = [leaf(draw(case["k"] + w, num_features), needs_w) for w in range(num_weights)]
    with_bias = [case["bias"] and w % 2 == 0 for w in range(num_weights)]
    return weights, [leaf(draw(len(w)), needs_b) if has else None for w, has in zip(weights, with_bias)]


def row_outputs(
    operation: Callable[..., Any],
    x: Tensor,
    weights: list[Tensor],
    group: dist.ProcessGroup,
    biases: list[Tensor | None],
    **options: Any,
) -> list[Tensor]:
    """One weight is given alone, and its output comes alone."""
    if len(weights) > 1:
        return operation(x, weights, group, biases=biases, **options)
    return [operation(x, weights[0], group, biases=biases[0], **options)]


def all_reduce(case: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """matmul_all_reduce: as `row`, with every row of the outputs on every rank."""
    group = group or dist.group.WORLD
    part = part_of(group)
    draw, ks = Draw(case["seed"]), case["features"][0]
    case = {**case, "needs": (1, 1, 1)}
    x = leaf(draw(*x_shape(case, sum(case["rows"]), sum(ks))))
    weights, biases = row_parameters(case, draw)
    ys = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases)]
    loads = [draw(*y.shape) for y in ys]
    sum((y * load).sum() for y, load in zip(ys, loads)).backward()

    mine, my_ws = leaf(part(x, ks, -1)), [leaf(part(weight, ks, -1)) for weight in weights]
    my_bs = [None if bias is None else leaf(bias) for bias in biases]
    pending = room(case).matmul_all_reduce_start(mine, my_ws, group, biases=my_bs, **settings_of(case))
    other = room(case).matmul_all_reduce_start(mine, my_ws[0], group, biases=my_bs[0], **settings_of(case))
    outs = pending.wait()
    assert pending.wait() is outs
    for out, y in zip(outs, ys):
        same("y", out, y)
    same("the call in between", other.wait(), ys[0])
    sum((out * load).sum() for out, load in zip(outs, loads)).backward()
    same("x.grad", mine.grad, part(x.grad, ks, -1))
    for weight, my_w, bias, my_b in zip(weights, my_ws, biases, my_bs):
        same("weight.grad", my_w.grad, part(weight.grad, ks, -1))
        if bias is not None:
            same("bias.grad", my_b.grad, bias.grad)


def weight_gather(case: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """weight_gather_matmul: rows[r] rows of the weight on rank r, and data of its own on every rank."""
    group = group or dist.group.WORLD
    part = part_of(group)
    draw, rows, n = Draw(case["seed"]), case["rows"], len(case["rows"])
    needs_x, needs_w, _ = case["needs"]
    weight = leaf(draw(sum(rows), case["k"]), needs_w)
    data = draw(n, *case["inner"], 2, case["k"])
    x = leaf(data, needs_x)
    y = F.linear(x, weight)
    load = draw(*y.shape)
    if y.requires_grad:
        (y * load).sum().backward()

    rank = dist.get_rank(group)
    mine, my_w = leaf(data[rank], needs_x), leaf(part(weight, rows, 0), needs_w)
    sizes = {"exchange": "exchange", "given": rows, "equal": None}[case["sizes"]]
    out = room(case).weight_gather_matmul(mine, my_w, group, sizes=sizes, **settings_of(case, "keep_gathered"))
    same("y", out, y[rank])
    if out.requires_grad:
        (out * load[rank]).sum().backward()
    if needs_x:
        same("x.grad", mine.grad, x.grad[rank])
    if needs_w:
        same("weight.grad", my_w.grad, part(weight.grad, rows, 0))


def replicate(case: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """replicate_matmul: as `column`, with every row of the input on every rank."""
    group = group or dist.group.WORLD
    part = part_of(group)
    draw, needs_w = Draw(case["seed"]), case["needs"][1]
    x = leaf(draw(*x_shape(case, sum(case["rows"]), case["k"])))
    weights = [leaf(draw(sum(sizes), case["k"]), needs_w) for sizes in case["features"]]
    ys = [F.linear(x, w) for w in weights]
    loads = [draw(*y.shape) for y in ys]
    sum((y * load).sum() for y, load in zip(ys, loads)).backward()

    mine = leaf(x)
    my_ws = [leaf(part(w, sizes, 0), needs_w) for w, sizes in zip(weights, case["features"])]
    outs = room(case).replicate_matmul(mine, my_ws, group, **settings_of(case))
    for out, y, sizes in zip(outs, ys, case["features"]):
        same("y", out, part(y, sizes, -1))
    my_loads = [part(load, sizes, -1) for load, sizes in zip(loads, case["features"])]
    sum((out * load).sum() for out, load in zip(outs, my_loads)).backward()
    same("x.grad", mine.grad, x.grad)
    for w, my_w, sizes in zip(weights, my_ws, case["features"]):
        if needs_w:
            same("weight.grad", my_w.grad, part(w.grad, sizes, 0))


def wider(operation: str, schedule: str) -> None:
    """A float32 weight beside a 16-bit one on 16-bit rows: its output and gradients are not rounded to 16 bits."""
    group, n, draw = dist.group.WORLD, dist.get_world_size(), Draw(2)
    part = part_of(group)
    x = leaf(draw(4 * n, 8).bfloat16())
    weights = [leaf(draw(3 * n, 8).bfloat16()), leaf(draw(2 * n, 8).float())]
    ys = [F.linear(x.to(w.dtype), w) for w in weights]
    loads = [draw(*y.shape).to(y.dtype) for y in ys]
    sum((y.float() * load.float()).sum() for y, load in zip(ys, loads)).backward()

    whole = operation == "replicate"
    mine = leaf(x if whole else part(x, [4] * n, 0))
    my_ws = [leaf(part(w, [len(w) // n] * n, 0)) for w in weights]
    call = overlap.replicate_matmul if whole else overlap.all_gather_matmul
    outs = call(mine, my_ws, group, schedule=schedule)
    my_loads = [part(load, [load.shape[-1] // n] * n, -1) for load in loads]
    sum((out.float() * load.float()).sum() for out, load in zip(outs, my_loads)).backward()
    assert [out.dtype for out in outs] == [torch.bfloat16, torch.float32]
    assert (mine.grad.dtype, my_ws[1].grad.dtype) == (torch.bfloat16, torch.float32)
    same("y", outs[1].double(), part(ys[1], [2] * n, -1).double(), 1e-6)
    same("weight.grad", my_ws[1].grad.double(), part(weights[1].grad, [2] * n, 0).double(), 1e-6)
    same("y of 16 bits", outs[0].double(), part(ys[0], [3] * n, -1).double(), 1e-2)
    same("x.grad", mine.grad.double(), (x.grad if whole else part(x.grad, [4] * n, 0)).double(), 1e-2)


def weight_products(schedule: str, keep_gathered: bool) -> int:
    """In how many products a column layer's backward makes its weight's gradient."""
    group, n, draw = dist.group.WORLD, dist.get_world_size(), Draw(2)
    x, weight = leaf(draw(4, 3)), leaf(draw(2, 3))
    y = overlap.all_gather_matmul(x, weight, group, schedule=schedule, keep_gathered=keep_gathered)
    with mock.patch.object(WeightGradient, "add", autospec=True, side_effect=WeightGradient.add) as add:
        y.backward(draw(4 * n, 2))
    return add.call_count


def backward_products(operation: str, needs: tuple[int, int, int]) -> int:
    """How many products a backward has: those of x's gradient and those of the weight's."""
    n, draw = dist.get_world_size(), Draw(5)
    x, weight, bias = (leaf(draw(*s), bool(needed)) for s, needed in zip([(2 * n, 3), (4, 3), (4,)], needs))
    call = {"gather": overlap.all_gather_matmul, "scatter": overlap.matmul_reduce_scatter}[operation]
    y = call(x, weight, dist.group.WORLD, biases=bias, schedule="direct").square().sum()
    counted = Products()
    with counted:
        y.backward()
    return counted.count


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "mm" in str(func)
        return func(*args, **(kwargs or {}))


def halves_backward(schedule: str) -> list[str]:
    """Two halves through one column layer with whole rows: in which order autograd asks for what."""
    group, order = dist.new_group(), []
    weight = leaf(Draw(1)(3, 4))
    xs = [leaf(Draw(2 + half)(6, 4)) for half in range(2)]

    def noted(what: str, tensor: Tensor) -> Tensor:
        tensor.register_hook(lambda grad: order.append(what))
        return tensor

    losses = []
    for half, x in enumerate(xs):
        (y,) = overlap.replicate_matmul(noted(f"input {half}", x * 2), [weight], group, schedule=schedule)
        losses.append(noted(f"output {half}", y).square().sum())
    sum(losses).backward()
    dist.destroy_process_group(group)
    return order


def histories(num_nodes: int) -> None:
    """Rank 0's autograd has made nodes before; an early part of the graph communicates in its backward too."""
    n, group, before = dist.get_world_size(), dist.new_group(), torch.ones(1, requires_grad=True)
    for _ in range(num_nodes if dist.get_rank() == 0 else 0):
        before = before + 1
    x, y, weight = leaf(torch.ones(2 * n, 3)), leaf(torch.ones(4, 3)), leaf(torch.eye(3))
    early = overlap.matmul_reduce_scatter(x, weight, group)
    for _ in range(12):
        (y,) = overlap.replicate_matmul(y, [weight], group)
    (early.sum() + y.sum()).backward()
    dist.destroy_process_group(group)


def in_a_new_thread(num_nodes: int) -> None:
    """`histories` where autograd has numbered nothing yet."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(histories, num_nodes).result()
