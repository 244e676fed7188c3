"""What every rank does in the tests of attention whose exchanges are started, and awaited later."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stretto.overlap import (
    attention_all_to_all,
    attention_all_to_all_start,
    matmul_all_to_all,
    matmul_all_to_all_start,
    split_heads,
)
from stretto.overlap.p2p import peers_of
from stretto.overlap.projections import Linears
from tests.overlap.attention_cases import D
from tests.overlap.matmul_cases import Draw, leaf, part_of


def in_halves(schedule: str, num_subslices: int, checkpointing: bool = False) -> None:
    """Two exchanges under way at once give, bit for bit, what two whole operations give one after another.

    Forward and backward, with uneven and empty slices; the messages of one leave before the other's are awaited.
    """
    group, n = dist.group.WORLD, dist.get_world_size()
    draw, rows = Draw(5), [(3 * r) % 4 for r in range(1, n + 1)]
    heads, kv_heads = split_heads(n + 2, n, n + 2)
    features = [[h * D for h in cut] for cut in (heads, kv_heads, kv_heads)]
    weights = [leaf(draw(sum(cut), 3)) for cut in features]
    biases = [leaf(draw(len(weight))) for weight in weights]
    out_weight, out_bias = leaf(draw(3, sum(features[0]))), leaf(draw(3))
    halves = [leaf(part_of(group)(draw(2, sum(rows), 3), rows, 1)) for _ in range(2)]
    options = {"schedule": schedule, "num_subslices": num_subslices, "sizes": rows}
    attends = {"heads": heads, "weight": out_weight, "bias": out_bias, "is_causal": True, **options}
    projects = {"features": features, "biases": biases, **options}

    def turned(parts: list[Tensor]) -> list[Tensor]:
        return [part.unflatten(-1, (-1, D)).sin() for part in parts]

    def one_by_one(*xs: Tensor) -> list[Tensor]:
        found = []
        for x in xs:
            q, k, v = turned(matmul_all_to_all(x, weights, group, **projects))
            found.append(attention_all_to_all(q, k, v, group, **attends).cos())
        return found

    def interleaved(*xs: Tensor) -> list[Tensor]:
        projected = [matmul_all_to_all_start(x, weights, group, **projects) for x in xs]
        attended = [attention_all_to_all_start(*turned(pending.wait()), group, **attends) for pending in projected]
        assert attended[0].wait() is attended[0].wait()
        return [pending.wait().cos() for pending in attended]

    def kept(*xs: Tensor) -> list[Tensor]:
        return list(checkpoint(interleaved, *xs, use_reentrant=False))

    found = []
    for layer in (one_by_one, kept if checkpointing else interleaved):
        ys = [x.detach() * 0 + x for x in halves]
        for _ in range(2):
            ys = layer(*ys)
        sum((scale * y).square().sum() for scale, y in zip((1, 3), ys)).backward()
        inputs = (*halves, *weights, *biases, out_weight, out_bias)
        found.append([*(y.detach() for y in ys), *(t.grad for t in inputs)])
        for tensor in inputs:
            tensor.grad = None
    for one, other in zip(*found):
        assert torch.equal(one, other)


def dropped() -> None:
    """A start that nobody waits for leaves the group usable, and its buffers until the next call."""
    group, n = dist.group.WORLD, dist.get_world_size()
    x, weight = torch.ones(1, 2, 3), torch.ones(2 * n, 3)
    for _ in range(2):
        matmul_all_to_all_start(x, [weight], group, features=[[2] * n])
        assert bool(peers_of(group).unfinished) == (n > 1)
    (y,) = matmul_all_to_all(x, [weight], group, features=[[2] * n])
    assert torch.equal(y, torch.full((1, 2 * n, 2), 3.0))
    assert not peers_of(group).unfinished


def ended_early() -> None:
    """A recomputation that ends inside a start leaves the group usable and the gradients right."""
    group, n = dist.group.WORLD, dist.get_world_size()
    draw = Draw(7 + dist.get_rank())
    x, weight = leaf(draw(1, 2, 3)), leaf(Draw(3)(2 * n, 3))

    def project(x: Tensor) -> Tensor:
        return matmul_all_to_all_start(x, [weight], group, features=[[2] * n]).wait()[0]

    grads = []
    for wrapped in (project, lambda x: checkpoint(project, x, use_reentrant=False)):
        for _ in range(2):
            wrapped(x).square().sum().backward()
        grads.append((x.grad, weight.grad))
        x.grad = weight.grad = None
    assert all(torch.equal(one, other) for one, other in zip(*grads))
    assert not peers_of(group).unfinished


def started_under_autocast() -> None:
    """What is made at the wait, outside, is of the precision of the start."""
    group, n = dist.group.WORLD, dist.get_world_size()
    x, weight, low, up = (torch.randn(*shape) for shape in ((1, 4, 64), (2 * n, 64), (1, 4, 16), (2 * n, 16)))
    options = {"features": [[2] * n], "low_rank": [(low, up)]}
    with torch.autocast("cpu", torch.bfloat16):
        (whole,) = matmul_all_to_all(x, [weight], group, **options)
        pending = matmul_all_to_all_start(x, [weight], group, **options)
    assert torch.equal(pending.wait()[0], whole)


def own_product_that_fails() -> None:
    """Of a start that nothing was wrong with; the group lives."""
    group, n = dist.group.WORLD, dist.get_world_size()
    x, weight = torch.ones(1, 2, 3), torch.ones(2 * n, 3)
    pending = matmul_all_to_all_start(x, [weight], group, features=[[2] * n])
    with mock.patch.object(Linears, "write", side_effect=MemoryError("no room")), pytest.raises(MemoryError):
        pending.wait()
    del pending
    (y,) = matmul_all_to_all(x, [weight], group, features=[[2] * n])
    assert torch.equal(y, torch.full((1, 2 * n, 2), 3.0))
