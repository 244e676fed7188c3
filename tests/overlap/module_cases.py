"""What every rank does in the tests of modules: a parallel model beside the plain one in one process."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from stretto.overlap import (
    ColumnLinear,
    GradientReducer,
    LinearOptions,
    OverlapColwise,
    OverlapRowwise,
    RowLinear,
    parallelize,
)
from stretto.overlap.routes import slice_sizes
from tests.overlap.matmul_cases import Draw, leaf, same

WIDTH, HIDDEN = 6, 11


class Block(nn.Module):
    """A gated MLP with a norm before and a residual around it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, hidden)
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        return x + self.down(torch.sigmoid(self.gate(hidden)) * self.up(hidden))


class Model(nn.Module):
    def __init__(self, checkpointed: bool = False, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(hidden), Block(hidden)])
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


PLAN = {"layers.*.norm": "sequence", "layers.*.gate+up": "column", "layers.*.down": "row"}
WHOLE_PLAN = {"layers.*.gate": "column", "layers.*.up": "column", "layers.*.down": "row"}


def plain_model(**options: Any) -> Model:
    torch.manual_seed(3)
    return Model(**options).double()


def own_rows(x: Tensor, dim: int = 1) -> Tensor:
    sizes = slice_sizes(x.shape[dim], dist.get_world_size())
    return x.split(sizes, dim)[dist.get_rank()]


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(mine: nn.Module, whole: nn.Module) -> None:
    theirs = dict(whole.named_parameters())
    for name, parameter in mine.named_parameters():
        assert isinstance(parameter.grad, DTensor) == isinstance(parameter, DTensor), name
        same(name, full(parameter.grad), theirs[name].grad)


def trained(case: dict[str, Any]) -> None:
    """Outputs and gradients of a whole model, with and without sequence sharding."""
    options = LinearOptions(
        sequence_parallel=case["sequence"],
        uneven=True,
        schedule=case["schedule"],
        num_subslices=case["num_subslices"],
        keep_gathered=case["keep_gathered"],
    )
    whole = plain_model()
    mine = plain_model(checkpointed=case["checkpointed"])
    plan = PLAN if case["sequence"] else WHOLE_PLAN
    assert parallelize(mine, plan, dist.group.WORLD, options) is mine
    draw = Draw(case["seed"])
    x = leaf(draw(2, case["rows"], WIDTH))
    y = whole(x)
    load = draw(*y.shape)
    (y * load).sum().backward()

    if not case["sequence"]:
        own = leaf(x)
        out = mine(own)
        same("y", out, y)
        (out * load).sum().backward()
        same("x.grad", own.grad, x.grad)
    else:
        own = leaf(own_rows(x))
        out = mine(own)
        same("y", out, own_rows(y))
        (out * own_rows(load)).sum().backward()
        same("x.grad", own.grad, own_rows(x.grad))
    compare(mine, whole)


def one_gather_for_siblings() -> int:
    """How many calls of the library one forward and backward makes."""
    from stretto.overlap.p2p import peers_of

    mine = plain_model()
    parallelize(mine, PLAN, dist.group.WORLD)
    before = peers_of(dist.group.WORLD).num_calls
    mine(torch.ones(1, 2, WIDTH, dtype=torch.float64)).sum().backward()
    return peers_of(dist.group.WORLD).num_calls - before


def a_changed_input() -> None:
    """A sibling that is called after its input or its weight was changed in place computes anew."""
    layers = nn.ModuleDict({"q": nn.Linear(4, 4), "k": nn.Linear(4, 4)}).double()
    parallelize(layers, {"q+k": "column"}, dist.group.WORLD, LinearOptions(schedule="direct"))
    x = torch.ones(1, 2, 4, dtype=torch.float64)
    with torch.no_grad():
        layers["q"](x)
        x.mul_(2.0)
        assert torch.equal(layers["k"](x), layers["k"](x.clone()))
        layers["q"](x)
        layers["k"].weight.mul_(2.0)
        assert torch.equal(layers["k"](x), layers["k"](x.clone()))
    with torch.inference_mode():
        x = torch.ones(1, 2, 4, dtype=torch.float64)
        assert layers["q"](x).shape == layers["k"](x).shape


def state_dicts() -> None:
    """A checkpoint of the plain model loads in the parallel one, and back."""
    whole, mine = plain_model(), plain_model()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(1)
    names = list(whole.state_dict())
    parallelize(mine, PLAN, dist.group.WORLD)
    assert list(mine.state_dict()) == names
    mine.load_state_dict(whole.state_dict())
    for name, value in mine.state_dict().items():
        assert torch.equal(full(value), whole.state_dict()[name])
    again = plain_model()
    again.load_state_dict({name: full(value) for name, value in mine.state_dict().items()})
    again_parallel = plain_model()
    parallelize(again_parallel, PLAN, dist.group.WORLD)
    again_parallel.load_state_dict(mine.state_dict())
    for name, value in again_parallel.state_dict().items():
        assert torch.equal(full(value), again.state_dict()[name])


def meta_construction() -> None:
    """A model without storage is made parallel first and filled afterwards, shard by shard."""
    whole = plain_model()
    with torch.device("meta"):
        mine = Model().double()
    parallelize(mine, PLAN, dist.group.WORLD)
    mine.to_empty(device="cpu")
    mine.load_state_dict(whole.state_dict())
    x = Draw(1)(2, 2 * dist.get_world_size(), WIDTH)
    same("y", mine(own_rows(x)), own_rows(whole(x)))
    rank, n = dist.get_rank(), dist.get_world_size()
    local = mine.layers[0].up.weight.to_local()
    assert local.shape == (slice_sizes(HIDDEN, n)[rank], WIDTH)


def beside_torch_styles(mixed: bool) -> None:
    """OverlapColwise beside RowwiseParallel, norms as SequenceParallel: gradients and the exact clip norm."""
    n = dist.get_world_size()
    mesh = DeviceMesh("cpu", list(range(n)))
    whole, mine = plain_model(hidden=12), plain_model(hidden=12)
    row = RowwiseParallel(output_layouts=Shard(1)) if mixed else OverlapRowwise()
    for layer in mine.layers:
        plan = {"norm": SequenceParallel(), "gate": OverlapColwise(), "up": OverlapColwise(), "down": row}
        parallelize_module(layer, mesh, plan)
    draw = Draw(4)
    x = draw(2, 3 * n, WIDTH)
    y = whole(x)
    load = draw(*y.shape)
    (y * load).sum().backward()
    out = mine(own_rows(x))
    same("y", out, own_rows(y))
    (out * own_rows(load)).sum().backward()
    norms = [p.grad for name, p in mine.named_parameters() if "norm" in name]
    assert all(isinstance(grad, DTensor) for grad in norms)
    for parameter in mine.parameters():
        assert isinstance(parameter.grad, DTensor)
    compare(mine, whole)
    theirs = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    ours = nn.utils.clip_grad_norm_(mine.parameters(), 0.5)
    same("norm", full(ours), theirs)
    compare(mine, whole)


def with_data_parallel() -> None:
    """Tensor-sequence parallel over every other rank, data parallel over neighbours.

    (Not the other way round: DTensor's caches outlive a world, and would take a mesh of the first ranks for
    an equal one of an earlier, smaller world.)
    """
    n, rank = dist.get_world_size() // 2, dist.get_rank()
    inner = [dist.new_group([2 * j + i for j in range(n)]) for i in range(2)][rank % 2]
    outer = [dist.new_group([2 * j, 2 * j + 1]) for j in range(n)][rank // 2]
    whole, mine = plain_model(), plain_model()
    parallelize(mine, PLAN, inner)
    reducer = GradientReducer(mine, outer, bucket_bytes=300)
    draw = Draw(6)
    x = draw(4, 3 * n, WIDTH)
    whole(x).square().sum().div(2).backward()
    own = x[2 * (rank % 2) :][:2].split(3, 1)[rank // 2]
    mine(own).square().sum().backward()
    reducer.finish()
    reducer.close()
    theirs = dict(whole.named_parameters())
    for name, parameter in mine.named_parameters():
        same(name, full(parameter.grad), theirs[name].grad)


def built_by_hand() -> None:
    """ColumnLinear and RowLinear as constructed, with 2-D input and a frozen weight."""
    group, n = dist.group.WORLD, dist.get_world_size()
    torch.manual_seed(0)
    up = ColumnLinear(WIDTH, HIDDEN, group, dtype=torch.float64)
    down = RowLinear(HIDDEN, WIDTH, group, bias=False, dtype=torch.float64)
    up.weight.requires_grad_(False)
    assert f"ranks={n}" in repr(up)
    x = leaf(Draw(2)(2, WIDTH))
    y = down(torch.relu(up(x)))
    y.sum().backward()
    assert y.shape == x.shape
    assert up.weight.grad is None
    assert isinstance(down.weight.grad, DTensor)
    assert isinstance(up.bias.grad, DTensor)


def compiled_around() -> None:
    group = dist.group.WORLD
    up = ColumnLinear(WIDTH, HIDDEN, group, dtype=torch.float64)
    down = RowLinear(HIDDEN, WIDTH, group, dtype=torch.float64)
    x, y = leaf(Draw(2)(2, WIDTH)), leaf(Draw(2)(2, WIDTH))
    compiled = torch.compile(lambda t: down(torch.relu(up(t))) * 2, backend="eager")
    compiled(x).sum().backward()
    (2 * down(torch.relu(up(y)))).sum().backward()
    assert torch.equal(x.grad, y.grad)


def refused_plans() -> None:
    model, group = plain_model(), dist.group.WORLD
    before = copy.deepcopy(model.state_dict())
    for plan, words in [
        ({"layers.*.gats": "column"}, r"'layers.\*.gats' matches no module; near it are layers.\d.gate"),
        (
            {"layers.0.up": "column", "layers.*.up": "row"},
            "'layers.0.up' is matched by 'layers.0.up' and again",
        ),
        ({"layers.*.norm": "column"}, "'layers.0.norm' is a LayerNorm, not an nn.Linear"),
        ({"layers.*.up": "diagonal"}, "asks for 'diagonal'"),
        ({}, "the plan is empty"),
        ({5: "row"}, "5 is no name pattern"),
        ({"layers.*.up+gate": "row"}, "joins names by"),
        ({"layers.*.up+gote": "column"}, "'layers.0.gote', which is no module"),
    ]:
        with pytest.raises(ValueError, match=words):
            parallelize(model, plan, group)
    with pytest.raises(ValueError, match="sequence_parallel=False rows are whole"):
        parallelize(model, PLAN, group, LinearOptions(sequence_parallel=False))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    parallelize(model, {"layers.*.norm": "sequence"}, group)
    for style in ("sequence", "replicate"):
        with pytest.raises(ValueError, match=r"'layers.0.norm.weight' is a DTensor; parallelize a model once"):
            parallelize(model, {"layers.*.norm": style}, group)
    parallelize(model, {"layers.*.up": "column"}, group)
    with pytest.raises(ValueError, match=r"'layers.0.up' is a ColumnLinear, .*: it is parallel already"):
        parallelize(model, {"layers.*.up": "column"}, group)
    with pytest.raises(ValueError, match=r"this style is for nn.Linear, not LayerNorm"):
        parallelize_module(nn.LayerNorm(3), DeviceMesh("cpu", list(range(dist.get_world_size()))), OverlapColwise())


def under_autocast(sequence: bool) -> None:
    """Outputs in autocast's dtype and gradients near the plain model's under autocast, as 16 bits allow."""
    options = LinearOptions(sequence_parallel=sequence, schedule="direct")
    whole, mine = (plain_model().float() for _ in range(2))
    parallelize(mine, PLAN if sequence else WHOLE_PLAN, dist.group.WORLD, options)
    x = Draw(4)(2, 2 * dist.get_world_size(), WIDTH).float()
    exact = plain_model().float()
    exact(x).square().sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        inside = mine.layers[0].up(own_rows(x) if sequence else x)
        expected = whole.layers[0].up(x)
        whole(x).square().sum().backward()
        mine(own_rows(x) if sequence else x).square().sum().backward()
    assert inside.dtype == expected.dtype == torch.bfloat16
    for (name, a), b, c in zip(mine.named_parameters(), whole.parameters(), exact.parameters()):
        assert a.grad.dtype == torch.float32
        error, theirs = float((full(a.grad) - c.grad).norm()), float((b.grad - c.grad).norm())
        assert error <= 3 * theirs + 1e-6 * float(c.grad.norm()), (name, error, theirs)
