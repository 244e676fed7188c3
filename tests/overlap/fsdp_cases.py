"""What every rank does in tests of sharded gradients: a model under FSDP2 beside the whole model in one process."""

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from stretto.overlap import FsdpReducer, fsdp
from tests.overlap.matmul_cases import Draw, same


class Block(nn.Module):
    """Odd sizes, and a parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.unused = nn.Linear(5, 7), nn.Linear(7, 5), nn.Parameter(torch.ones(3))
        self.shift = nn.Parameter(torch.zeros(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x + self.shift)))


class Model(nn.Module):
    """A first layer, blocks of which the last is never run, and one that has nothing to train; a last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 1)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks[:3]:
            x = block(x)
        return self.last(x)


def make(tuning: str, dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(0)
    model = Model().to(dtype)
    if tuning == "part":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("up" in name and "blocks.1" not in name)
    return model


def wrap(model: Model, mesh: Any, policy: MixedPrecisionPolicy | None = None, **options: Any) -> list[Any]:
    """FSDP2 around each block and the whole, gradients summed."""
    modules = [*model.blocks, model]
    for module in modules:
        fully_shard(module, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy(), **options)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return modules


def one_loss(model: nn.Module, inputs: Tensor) -> Tensor:
    """The loss of inputs (4, 3)."""
    return model(inputs).square().mean()


def compare(mine: nn.Module, whole: nn.Module, name: str, tolerance: float = 1e-10) -> None:
    theirs = dict(whole.named_parameters())
    for key, parameter in mine.named_parameters():
        if parameter.requires_grad:
            expected = theirs[key].grad
            assert parameter.grad is not None, key
            expected = torch.zeros_like(theirs[key]) if expected is None else expected
            same(f"{name} {key}", parameter.grad.full_tensor(), expected, tolerance)
        else:
            assert parameter.grad is None, key


def weighted(case: dict[str, Any]) -> dict[str, int]:
    """Two rounds of three steps each, weights known afterwards, two iterations; what was sent in one of them."""
    dtype = getattr(torch, case["dtype"])
    n, copies = dist.get_world_size(), case.get("copies", 1)
    mesh = init_device_mesh("cpu", (copies, n // copies), mesh_dim_names=("replicate", "shard"))
    mine, whole = make(case["tuning"], dtype), make(case["tuning"], dtype)
    modules = wrap(mine, mesh["shard"], reshard_after_forward=case["reshard"])
    group, replicate = own_groups(mesh)
    reducer = FsdpReducer(
        modules, group, hold=case["hold"], send=case["send"], replicate_group=replicate if copies > 1 else None
    )
    assert reducer.world_size == n
    draw = Draw(case["seed"])
    for _ in range(2):
        counts = Counts()
        before = reducer.num_sent
        with counts:
            iteration(case, mine, whole, reducer, draw)
        compare(mine, whole, str(case), 1e-10 if dtype is torch.float64 else 2e-5)
        for model in (mine, whole):
            model.zero_grad()
    reducer.close()
    return {"sent": reducer.num_sent - before, "modules": len(reducer._doors), **counts.of}


def own_groups(mesh: Any) -> tuple[Any, Any]:
    """Groups of the reducer's own beside the mesh's."""
    mine: dict[str, Any] = {}
    for name in ("shard", "replicate"):
        ranks = dist.get_process_group_ranks(mesh[name].get_group())
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, ranks)
        for each in sorted({tuple(r) for r in every}):
            group = dist.new_group(list(each))
            if dist.get_rank() in each:
                mine[name] = group
    return mine["shard"], mine["replicate"]


def iteration(case: dict[str, Any], mine: Any, whole: Any, reducer: FsdpReducer, draw: Draw) -> None:
    """A sample that is given up, then two rounds with a term aside; settled, or folded and combined."""
    rank, n, dtype = dist.get_rank(), dist.get_world_size(), getattr(torch, case["dtype"])
    inputs, weights, other = draw(2, 3, n, 4, 3).to(dtype), draw(2, n), draw(n)
    if case["given_up"]:
        one_loss(mine, inputs[0, 0, rank]).backward()
        reducer.finish()
        reducer.reset()
    for q in range(2):
        for step in range(3):
            loss = one_loss(mine, inputs[q, step, rank])
            if step < 2:
                with reducer.accumulate():
                    loss.backward(retain_graph=True)
            else:
                loss.backward(retain_graph=True)
                reducer.finish()
            with reducer.aside("other"):
                (loss * loss).backward()
            for r in range(n):
                theirs = one_loss(whole, inputs[q, step, r])
                (weights[q, r] * theirs + other[r] * theirs * theirs).to(dtype).backward()
        assert not any(p.grad.to_local().any() for p in mine.parameters() if p.grad is not None)
    reducer.finish(aside="other")
    if case["folded"]:
        for q in range(2):
            reducer.fold(torch.stack([torch.ones(n, dtype=torch.float64), weights[q] - 3]))
        reducer.combine(torch.tensor([3.0, 1.0], dtype=torch.float64))
        reducer.settle(other)
    else:
        reducer.settle(torch.cat([weights, other.unsqueeze(0)]))
    reducer.deliver()


class Counts:
    """FSDP2's own collectives while it is open."""

    def __init__(self) -> None:
        self.of = {"all_gather_single": 0, "reduce_scatter_single": 0, "all_reduce": 0}
        self._patches = [mock.patch.object(dist, name, self._counting(name)) for name in self.of]

    def _counting(self, name: str) -> Any:
        function = getattr(dist, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.of[name] += 1
            return function(*args, **kwargs)

        return counted

    def __enter__(self) -> None:
        for patch in self._patches:
            patch.start()

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


def known_before(tuning: str) -> dict[str, int]:
    """Weights inside the losses, kept graphs, one reduction in all: as native and retain do."""
    rank, n = dist.get_rank(), dist.get_world_size()
    mine, whole = make(tuning), make(tuning)
    reducer = FsdpReducer(wrap(mine, init_device_mesh("cpu", (n,))), dist.new_group(), hold="coalesced")
    inputs = Draw(3)(3, n, 4, 3)
    counts = Counts()
    with counts:
        losses = [one_loss(mine, inputs[q, rank]) for q in range(3)]
        for q, loss in enumerate(losses):
            (loss * (q + rank - 1)).backward()
        reducer.finish()
        reducer.settle(torch.ones(1, n))
        reducer.deliver()
    for q in range(3):
        for r in range(n):
            ((q + r - 1) * one_loss(whole, inputs[q, r])).backward()
    compare(mine, whole, "known before")
    reducer.close()
    for module in mine.blocks:
        module.set_reduce_scatter_unused_params(False)
    counts_after = Counts()
    mine.zero_grad()
    with counts_after:
        one_loss(mine, inputs[0, rank]).backward()
    whole.zero_grad()
    sum(one_loss(whole, inputs[0, r]) for r in range(n)).backward()
    for key, parameter in mine.named_parameters():
        expected = dict(whole.named_parameters())[key].grad
        if expected is not None:
            same(f"FSDP2's own {key}", parameter.grad.full_tensor(), expected)
    return {"sent": reducer.num_sent, "own": counts_after.of["reduce_scatter_single"], **counts.of}


def idle() -> None:
    """A reduction in which no rank has run anything, before the first forward."""
    n = dist.get_world_size()
    for hold in ("late", "coalesced"):
        mine = make("full")
        reducer = FsdpReducer(wrap(mine, init_device_mesh("cpu", (n,))), dist.new_group(), hold=hold)
        reducer.finish()
        reducer.settle(torch.ones(1, n))
        reducer.deliver()
        grads = [p.grad for name, p in mine.named_parameters() if "blocks.1" not in name]
        assert all(g is not None and not g.full_tensor().any() for g in grads)
        reducer.close()


def blocked_before_settle() -> tuple[float, float]:
    """Seconds until every backward was ended, and those exposed in all, where messages take a second."""
    rank, n = dist.get_rank(), dist.get_world_size()
    mine = make("full")
    reducer = FsdpReducer(wrap(mine, init_device_mesh("cpu", (n,))), dist.new_group(), hold="late")
    trade = fsdp.trade_pieces

    def late(*args: Any, **kwargs: Any) -> Tensor:
        time.sleep(1.0 / len(reducer._doors))
        return trade(*args, **kwargs)

    inputs = Draw(3)(n, 4, 3)
    with mock.patch.object(fsdp, "trade_pieces", late):
        loss = one_loss(mine, inputs[rank])
        start = time.perf_counter()
        loss.backward()
        reducer.finish()
        ended = time.perf_counter() - start
        reducer.settle(torch.ones(1, n))
    reducer.deliver()
    reducer.close()
    return ended, reducer.exposed_s


def misuse() -> None:
    """What would be lost in silence is refused."""
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh, group = init_device_mesh("cpu", (n,)), dist.new_group()
    inputs = Draw(3)(n, 4, 3)[rank]
    with pytest.raises(ValueError, match="wrapped by fully_shard, not Block"):
        FsdpReducer([Block()], group, hold="late")
    with pytest.raises(ValueError, match="hold='now'"):
        FsdpReducer([], group, hold="now")
    with pytest.raises(ValueError, match="no module has a parameter"):
        FsdpReducer(wrap(make("full").requires_grad_(False), mesh), group, hold="late")
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    with pytest.raises(
        ValueError, match=r"group has the ranks \[\d, \d\], but the modules are sharded over \[0, 1, 2\]"
    ):
        FsdpReducer(wrap(make("full"), mesh), pairs[rank // 2], hold="late")
    both = init_device_mesh("cpu", (1, n), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match="too early"):
        FsdpReducer(wrap(make("full"), both), group, hold="late")
    half = wrap(make("full", torch.bfloat16), mesh, MixedPrecisionPolicy(reduce_dtype=torch.float32))
    reducer = FsdpReducer(half, group, hold="late")
    one_loss(half[-1], inputs.bfloat16()).backward()
    with pytest.raises(ValueError, match=r"is not the reduced one: it trains in torch.bfloat16 and is reduced in"):
        reducer.finish()
    reducer.close()
    mine = wrap(make("full"), mesh)
    reducer = FsdpReducer(mine, dist.new_group(), hold="coalesced")
    one_loss(mine[-1], inputs).backward()
    mine[-1].last.weight.grad = None
    with pytest.raises(
        ValueError, match=r"last.weight is not the reduced one: its .grad was exchanged or set to None"
    ):
        reducer.finish()
    reducer.close()
    mine = wrap(make("full"), mesh)
    reducer = FsdpReducer(mine, dist.new_group(), hold="coalesced")
    with pytest.raises(ValueError, match="nothing was settled"):
        reducer.deliver()
    with pytest.raises(ValueError, match=rf"weights of shape \({n + 1},\)"):
        reducer.settle(torch.ones(n + 1))
    reducer.close()


def alone() -> None:
    mine = wrap(make("full"), init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match="leave the model unsharded"):
        FsdpReducer(mine, dist.group.WORLD, hold="late")
