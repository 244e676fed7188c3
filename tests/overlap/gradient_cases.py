"""What every rank does in tests of data parallelism: reduced gradients beside one process with all data."""

import copy
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stretto.overlap import GradientReducer, ReductionThread, buckets, published, reduce_bucket
from tests.overlap.matmul_cases import Draw, same


class Model(nn.Module):
    """A net with odd sizes, a norm, a weight that is used twice and parameters that are never used."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.norm = nn.LayerNorm(width)
        self.shared = nn.Linear(width, width)
        self.unused = nn.Linear(2, 2)
        self.out = nn.Linear(width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.first(x)))
        return self.out(self.shared(torch.tanh(self.shared(hidden))))


def models(width: int = 5) -> tuple[Model, Model]:
    torch.manual_seed(0)
    whole = Model(width).double()
    return copy.deepcopy(whole), whole


def losses(model: nn.Module, inputs: Tensor) -> Tensor:
    """One loss for each of the inputs (ranks, 4, 3)."""
    return model(inputs).square().mean((1, 2))


def compare(mine: nn.Module, whole: nn.Module, name: str = "") -> None:
    theirs = dict(whole.named_parameters())
    for key, parameter in mine.named_parameters():
        expected = theirs[key].grad
        assert parameter.grad is not None, key
        same(f"{name} {key}", parameter.grad, torch.zeros_like(parameter) if expected is None else expected)


def options_of(case: dict[str, Any], mine: Model) -> dict[str, Any]:
    return {"bucket_bytes": case["bucket_bytes"], "last": [getattr(mine, name) for name in case["last"]]}


def summed(case: dict[str, Any]) -> None:
    """Replicated gradients, two steps, the second with an accumulation in front of it."""
    rank, n = dist.get_rank(), dist.get_world_size()
    mine, whole = models()
    reducer = GradientReducer(mine, dist.group.WORLD, average=case["average"], **options_of(case, mine))
    draw = Draw(case["seed"])
    for step in range(2):
        mine.zero_grad()
        whole.zero_grad()
        for _ in range(step):
            extra = draw(n, 4, 3)
            losses(whole, extra).sum().backward()
            with reducer.accumulate():
                losses(mine, extra[rank : rank + 1]).sum().backward()
        inputs = draw(n, 4, 3)
        losses(whole, inputs).sum().backward()
        losses(mine, inputs[rank : rank + 1]).sum().backward()
        reducer.finish()
        if case["average"]:
            for parameter in whole.parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad / n
        compare(mine, whole)
    reducer.close()
    assert torch.equal(mine.first(inputs), nn.functional.linear(inputs, mine.first.weight, mine.first.bias))


def sharded(case: dict[str, Any]) -> None:
    """ZeRO-1: an optimizer on the own shards, parameters gathered behind the next forward, three steps."""
    rank, n = dist.get_rank(), dist.get_world_size()
    mine, whole = models()
    whole.unused.requires_grad_(False)
    mine.unused.requires_grad_(False)
    reducer = GradientReducer(mine, dist.group.WORLD, sharded=True, **options_of(case, mine))
    ours = torch.optim.AdamW(reducer.owned, lr=0.1)
    theirs = torch.optim.AdamW([p for p in whole.parameters() if p.requires_grad], lr=0.1)
    draw = Draw(case["seed"])
    for _ in range(3):
        inputs = draw(n, 4, 3)
        theirs.zero_grad()
        losses(whole, inputs).mean().backward()
        theirs.step()
        ours.zero_grad()
        losses(mine, inputs[rank : rank + 1]).sum().backward()
        reducer.finish()
        assert all(parameter.grad is None for parameter in mine.parameters())
        ours.step()
        reducer.publish()
    reducer.close()
    for (name, parameter), other in zip(mine.named_parameters(), whole.parameters()):
        same(name, parameter.detach(), other.detach(), 1e-9 if "shared" in name else 1e-10)


def units() -> None:
    """A module that reads its submodule's weight without calling it sees the published one."""
    mine = Reads().double()
    reducer = GradientReducer(mine, dist.group.WORLD, bucket_bytes=1, sharded=True, units=[mine.inside])
    assert not mine.inside.layer._forward_pre_hooks  # or the layer would no more be taken for a plain one
    optimizer = torch.optim.SGD(reducer.owned, lr=1.0)
    mine(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    reducer.finish()
    expected = mine.inside.layer.weight.detach() - 2
    optimizer.step()
    spread = buckets.spread

    def late(*args: Any, **kwargs: Any) -> Tensor:
        time.sleep(0.1)
        return spread(*args, **kwargs)

    with mock.patch.object(published, "spread", late):
        reducer.publish()
    seen = mine(torch.eye(3, dtype=torch.float64))
    reducer.close()
    same("what the next forward saw", seen, (expected.t() + mine.bias).detach())


class Reads(nn.Module):
    """Reads the weight of a layer inside of `inside` without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = Inside()
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) + self.bias


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.layer.weight.t()


def late_bound(case: dict[str, Any]) -> None:
    """Weights that are known only after every piece was sent, for two backwards at once."""
    rank, n = dist.get_rank(), dist.get_world_size()
    mine, whole = models()
    reducer = GradientReducer(mine, dist.group.WORLD, late_bound=True, **options_of(case, mine))
    draw = Draw(case["seed"])
    inputs, weights = draw(2, n, 4, 3), draw(2, n)
    for q in range(2):
        losses(mine, inputs[q, rank : rank + 1]).sum().backward()
        reducer.finish()
        assert all(parameter.grad is None for parameter in mine.parameters())
    reducer.settle(weights)
    reducer.deliver()
    for q in range(2):
        (weights[q] * losses(whole, inputs[q])).sum().backward()
    compare(mine, whole)
    assert reducer.num_sent == 2 * len(reducer._buckets)
    for model in (mine, whole):
        model.zero_grad()
    for q in range(2):
        losses(mine, inputs[q, rank : rank + 1]).sum().backward()
        reducer.finish()
        reducer.settle(weights[q])
        (weights[q] * losses(whole, inputs[q])).sum().backward()
    reducer.deliver()
    compare(mine, whole, "settled one by one")
    for model in (mine, whole):
        model.zero_grad()
    aside_and_idle(case, mine, whole, reducer, draw)
    reducer.close()


def aside_and_idle(case: dict[str, Any], mine: Model, whole: Model, reducer: GradientReducer, draw: Draw) -> None:
    """A term of the loss leaves apart, behind folds; without `last`, odd ranks have no backward in one round."""
    rank, n = dist.get_rank(), dist.get_world_size()
    inputs, weights, other = draw(2, n, 4, 3), draw(3, 2, n), draw(n)
    ran = torch.ones(2, n, dtype=torch.float64)
    if not case["last"]:
        ran[1, 1::2] = 0
    dropped = losses(mine, inputs[0, rank : rank + 1]).sum()
    dropped.backward()
    reducer.finish()
    reducer.reset()
    for q in range(2):
        if ran[q, rank]:
            with reducer.accumulate():
                (0.25 * losses(mine, inputs[q, rank : rank + 1]).sum()).backward()
            loss = losses(mine, inputs[q, rank : rank + 1]).sum()
            (0.75 * loss).backward(retain_graph=True)
            with reducer.aside("other"):
                (loss * loss).backward()
        reducer.finish()
        assert all(parameter.grad is None for parameter in mine.parameters())
    reducer.finish(aside="other")
    assert all(parameter.grad is None for parameter in mine.parameters())
    for q in range(2):
        reducer.fold(weights[:2, q])
    reducer.combine(torch.tensor([0.5, -2.0]))
    reducer.settle(other)
    reducer.deliver()
    for q in range(2):
        loss = losses(whole, inputs[q])
        (ran[q] * ((0.5 * weights[0, q] - 2 * weights[1, q]) * loss + other * loss * loss)).sum().backward()
    compare(mine, whole, "folded, and a term aside")


def two_sums(case: dict[str, Any]) -> None:
    """Group-normalised advantages from two running sums, over rounds of one sample a rank."""
    rank, n, rounds = dist.get_rank(), dist.get_world_size(), 3
    mine, whole = models()
    reducer = GradientReducer(mine, dist.group.WORLD, late_bound=True, **options_of(case, mine))
    draw = Draw(case["seed"])
    inputs, rewards = draw(rounds, n, 4, 3), draw(rounds, n) + 7
    offset = rewards[0, 0]
    for q in range(rounds):
        losses(mine, inputs[q, rank : rank + 1]).sum().backward()
        reducer.finish()
        reducer.fold(torch.stack([torch.ones(n, dtype=torch.float64), rewards[q] - offset]))
    mean, std = rewards.mean(), rewards.std(correction=0) + 1e-4
    reducer.combine(torch.stack([-(mean - offset) / std, 1 / std]))
    reducer.deliver()
    reducer.close()
    advantages = (rewards - mean) / std
    sum((advantages[q] * losses(whole, inputs[q])).sum() for q in range(rounds)).backward()
    compare(mine, whole)


def hook(case: dict[str, Any]) -> None:
    """DistributedDataParallel with the reduction as its hook, two steps, several buckets."""
    rank, n = dist.get_rank(), dist.get_world_size()
    mine, whole = models(width=200)
    group = dist.new_group()
    mine.unused.requires_grad_(False)
    parallel = DistributedDataParallel(mine, bucket_cap_mb=0.1)
    thread = ReductionThread(group)
    parallel.register_comm_hook(thread, reduce_bucket)
    draw = Draw(case["seed"])
    for _ in range(2):
        inputs = draw(n, 4, 3)
        parallel.zero_grad()
        whole.zero_grad()
        losses(parallel, inputs[rank : rank + 1]).sum().backward()
        losses(whole, inputs).mean().backward()
        for name, parameter in mine.named_parameters():
            if parameter.requires_grad:
                same(name, parameter.grad, dict(whole.named_parameters())[name].grad)
    thread.close()
    dist.destroy_process_group(group)


def saved_while_published() -> None:
    """A state dict holds what was published, whether or not a forward came in between."""
    group = dist.new_group()
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    reducer = GradientReducer(model, group, sharded=True, bucket_bytes=1)
    for owned in reducer.owned:
        owned.data.fill_(7.0)
    reducer.publish()
    assert all(bool((saved == 7.0).all()) for saved in model.state_dict().values())
    reducer.close()
    dist.destroy_process_group(group)


def stale_once_published() -> None:
    """Parameters change when they are published; their arrival, in a forward, is no other change."""
    group = dist.new_group()
    layer = nn.Linear(3, 2)
    reducer = GradientReducer(layer, group, sharded=True)
    before, old = layer.weight._version, layer(torch.ones(1, 3, requires_grad=True)).square().sum()
    reducer.owned[0].data.fill_(7.0)
    reducer.publish()
    published = layer.weight._version
    assert published > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()
    new = layer(torch.ones(1, 3, requires_grad=True)).square().sum()
    assert layer.weight._version == published
    assert bool((layer.weight == 7.0).all())
    new.backward()
    reducer.finish()
    reducer.close()
    dist.destroy_process_group(group)


def in_autocast() -> None:
    """A layer given as `last` has the gradient that it has without a reducer."""
    group = dist.new_group()
    mine = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for parameter in mine.parameters():
        dist.broadcast(parameter.data, 0, group=group)
    whole = copy.deepcopy(mine)
    reducer = GradientReducer(mine, group, last=mine[0])
    for model in (mine, whole):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.full((2, 3), 0.3)).sum()
        loss.backward()
    reducer.finish()
    for own, one in zip(mine.parameters(), whole.parameters()):
        torch.testing.assert_close(own.grad, one.grad, rtol=1e-2, atol=1e-3)
    reducer.close()
    dist.destroy_process_group(group)
