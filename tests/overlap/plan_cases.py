"""What every rank does in the tests of plans: dropout, followers, attention, and plans that are refused."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from stretto.overlap import LinearOptions, Pending, parallelize
from stretto.overlap.heads import cut_heads
from tests.overlap.matmul_cases import Draw, leaf, same
from tests.overlap.module_cases import compare, full, own_rows

WIDTH, HIDDEN = 6, 10


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.inner, self.outer = nn.Dropout(0.4), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.down(self.inner(torch.relu(self.up(x)))))


class Dropping(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Feed(), Feed()])
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


DROPPING = {
    "layers.*.up": "column",
    "layers.*.down": "row",
    "layers.*.inner": "dropout features",
    "layers.*.outer": "dropout rows",
}


def dropped(sequence: bool, checkpointed: bool, rows: int) -> None:
    """In training, from one seed, as the one-process model; and all generators are left in step with its."""
    torch.manual_seed(2)
    whole = Dropping().double()
    mine = copy.deepcopy(whole)
    mine.checkpointed = checkpointed
    plan = DROPPING if sequence else {k: v for k, v in DROPPING.items() if v != "dropout rows"}
    parallelize(mine, plan, dist.group.WORLD, LinearOptions(sequence_parallel=sequence, uneven=True))
    draw = Draw(rows)
    x, load = leaf(draw(2, rows, WIDTH)), draw(2, rows, WIDTH)
    for _ in range(2):
        torch.manual_seed(9)
        y = whole(x)
        (y * load).sum().backward()
        drawn = torch.rand(3)
        torch.manual_seed(9)
        part = own_rows if sequence else (lambda tensor: tensor)
        own = leaf(part(x))
        out = mine(own)
        assert torch.equal(torch.rand(3), drawn)
        same("y", out, part(y))
        (out * part(load)).sum().backward()
        same("x.grad", own.grad, part(torch.autograd.grad((_again(whole, x) * load).sum(), x)[0]))
    compare(mine, whole)
    mine.eval()
    whole.eval()
    same("in evaluation", mine(part(x)), part(whole(x)))


def _again(whole: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(9)
    result: Tensor = whole(x)
    return result


class Side(nn.Module):
    """A block whose attention (a stand-in of two linears) and MLP run side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        one = self.out(torch.relu(self.into(x)))
        return x + self.mlp(x) + one


SIDE = {
    "layers.*.into": "column",
    "layers.*.out": "row > layers.*.mlp",
    "layers.*.mlp.0": "column",
    "layers.*.mlp.2": "row",
}


class Sides(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Side(), Side()])
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def followed(checkpointed: bool) -> list[str]:
    """Exact results; the order in which row layers return, followers run and transfers are awaited."""
    torch.manual_seed(2)
    whole = Sides().double()
    mine = copy.deepcopy(whole)
    mine.checkpointed = checkpointed
    options = LinearOptions(sequence_parallel=False)
    parallelize(mine, SIDE, dist.group.WORLD, options)
    draw = Draw(1)
    x, load = leaf(draw(2, 5, WIDTH)), draw(2, 5, WIDTH)
    (whole(x) * load).sum().backward()
    own = leaf(x)
    events: list[str] = []
    layer = mine.layers[0]
    behind = layer.out.follower.behind

    def noted(pending: Pending) -> Tensor:
        events.append(f"sent, {len(pending.transfers)} in flight")
        waited = pending.wait
        held.append(pending)
        pending.wait = lambda: (events.append("awaited"), waited())[1]
        return behind(pending)

    held: list[Pending] = []
    layer.out.follower.behind = noted
    layer.mlp[1].register_forward_hook(
        lambda *_: events.append(f"inside the follower, {len(held[-1].transfers)} in flight")
    )
    out = mine(own)
    seen = list(events)
    same("y", out, whole(x))
    (out * load).sum().backward()
    same("x.grad", own.grad, x.grad)
    compare(mine, whole)
    return seen


class Attend(nn.Module):
    """Attention that reads `heads` and `kv_heads`, and the shape of its input, by position or by keyword."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.query = nn.Linear(WIDTH, heads * head_dim, bias)
        self.key, self.value = (nn.Linear(WIDTH, kv_heads * head_dim, bias) for _ in range(2))
        self.out = nn.Linear(heads * head_dim, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, _ = x.shape
        q, k, v = (
            layer(x).view(batch, rows, heads, -1).transpose(1, 2)
            for layer, heads in ((self.query, self.heads), (self.key, self.kv_heads), (self.value, self.kv_heads))
        )
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.heads != self.kv_heads)
        result: Tensor = self.out(y.transpose(1, 2).reshape(batch, rows, -1))
        return result


def attended(case: dict[str, Any]) -> None:
    """Any number of key-value heads for any number of ranks that divide the query heads."""
    sequence, rows = case["sequence"], case["rows"]
    torch.manual_seed(case["seed"])
    whole = Attend(case["heads"], case["kv_heads"], case["head_dim"], case["bias"]).double()
    mine = copy.deepcopy(whole)
    plan = {"": "attention", "query+key+value" if case["shared"] else "query": "column", "out": "row"}
    if not case["shared"]:
        plan |= {"key": "column", "value": "column"}
    options = LinearOptions(sequence_parallel=sequence, uneven=True, schedule=case["schedule"])
    parallelize(mine, plan, dist.group.WORLD, options)
    mine.load_state_dict(whole.state_dict())
    part = own_rows if sequence else (lambda tensor: tensor)
    draw = Draw(case["seed"])
    x, load = leaf(draw(2, rows, WIDTH)), draw(2, rows, WIDTH)
    y = whole(x)
    (y * load).sum().backward()
    own = leaf(part(x))
    out = mine(x=own) if case["keyword"] else mine(own)
    same("y", out, part(y))
    (out * part(load)).sum().backward()
    joined = torch.zeros_like(x)
    part(joined).copy_(own.grad)
    if sequence:
        dist.all_reduce(joined)
    same("x.grad", joined, x.grad)
    every, theirs = ([full(p.grad).flatten() for p in model.parameters()] for model in (mine, whole))
    same("weights", torch.cat(every), torch.cat(theirs))  # a key's bias alone has no gradient


def compiled_around() -> None:
    """Under torch.compile a plan's modules run eagerly between graphs, with the same numbers."""
    torch.manual_seed(4)
    feed = Feed()
    mine = nn.Sequential(nn.LayerNorm(WIDTH), Attend(4, 2, 2, True), feed).double()
    plan = {"0": "sequence", "1": "attention", "1.query+key+value": "column", "1.out": "row"}
    plan |= {f"2.{name.rpartition('.')[2]}": style for name, style in DROPPING.items()}
    parallelize(mine, plan, dist.group.WORLD)
    x, y = leaf(Draw(2)(2, 3, WIDTH)), leaf(Draw(2)(2, 3, WIDTH))
    torch.manual_seed(1)
    torch.compile(mine, backend="eager")(x).square().sum().backward()
    grads = [full(parameter.grad) for parameter in mine.parameters()]
    mine.zero_grad()
    torch.manual_seed(1)
    mine(y).square().sum().backward()
    same("x", x.grad, y.grad)
    for (name, parameter), grad in zip(mine.named_parameters(), grads):
        same(name, grad, full(parameter.grad), 1e-9)


def parallelized() -> Any:
    return parallelize(Dropping(), DROPPING, dist.group.WORLD)


def accumulated(reentrant: bool | None) -> None:
    """Norms on own rows, checkpointed in both ways of torch, over several backwards."""
    torch.manual_seed(2)
    whole = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)).double()
    mine = copy.deepcopy(whole)
    parallelize(mine, {"0": "sequence", "1": "column", "3": "row"}, dist.group.WORLD, LinearOptions(uneven=True))
    for rows in (3, 8, 5):
        x = leaf(Draw(rows)(2, rows, WIDTH))
        whole(x).square().sum().backward()
        own = leaf(own_rows(x))
        out = mine(own) if reentrant is None else checkpoint(mine, own, use_reentrant=reentrant)
        out.square().sum().backward()
        same("x.grad", own.grad, own_rows(x.grad))
    compare(mine, whole)
    same(
        "norm",
        full(nn.utils.get_total_norm([p.grad for p in mine.parameters()])),
        nn.utils.get_total_norm([p.grad for p in whole.parameters()]),
    )


def an_error_inside_leaves_parameters_in_place() -> None:
    mine = parallelize(nn.Sequential(nn.LayerNorm(WIDTH)), {"0": "sequence"}, dist.group.WORLD)
    with pytest.raises(RuntimeError):
        mine(torch.zeros(2, WIDTH + 1))
    assert all(isinstance(parameter, DTensor) for parameter in mine.parameters())
    mine(torch.zeros(2, WIDTH)).sum().backward()


def refused() -> None:
    """Every bad plan is one error, and changes nothing."""
    n = dist.get_world_size()
    whole = LinearOptions(sequence_parallel=False)
    sides, dropping = Sides(), Dropping()
    miscounted = Attend(2 * n, 2 * n, 3, False)
    miscounted.kv_heads = 7
    for model, plan, options, words in [
        (
            sides,
            {**SIDE, "layers.*.out": "row > layers.*.mpl"},
            whole,
            r"'layers.0.mpl', which is no module; near it are",
        ),
        (sides, {**SIDE, "layers.*.out": "row > *.*.mlp"}, whole, r"follower '\*.\*.mlp' has more \* than"),
        (sides, {**SIDE, "layers.*.out": "row >"}, whole, "a follower is written 'row > its name'"),
        (sides, {**SIDE, "layers.*.into": "column > layers.*.mlp"}, whole, "a follower is written"),
        (sides, SIDE, LinearOptions(), "leaves nothing in flight with sequence_parallel=True"),
        (dropping, DROPPING, whole, "'dropout rows', which is for sharded rows"),
        (dropping, {"layers.*.up": "dropout rows"}, None, "'layers.0.up' is a Linear, not an nn.Dropout"),
        (dropping, {"layers.*.up": 3}, None, "a style is a string"),
        (
            dropping,
            {"layers.*.up": "vocab", "layers.*": "sequence"},
            None,
            "belongs to a 'vocab' and to a 'sequence'",
        ),
        (dropping, {"layers.*": "attention"}, None, "no 'column' layer inside of it is"),
        (dropping, {"layers.*": "attention", "layers.*.up": "column"}, None, "tells neither its head_dim nor"),
        (dropping, {"layers.*.inner+outer": "dropout rows"}, None, "joins names by"),
        (
            miscounted,
            {"": "attention", "query+key": "column", "out": "row"},
            None,
            "'' has kv_heads=7, but its column layers make",
        ),
        (nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), {"0": "vocab"}, None, "'0' has max_norm=1.0"),
    ]:
        before = {name: id(parameter) for name, parameter in model.named_parameters()}
        with pytest.raises(ValueError, match=words):
            parallelize(model, plan, dist.group.WORLD, options)
        assert before == {name: id(parameter) for name, parameter in model.named_parameters()}
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    fits = [m for m in range(1, n) if 30 % m == 0]
    if 30 % n:
        with pytest.raises(ValueError, match=f"num_heads=30 cannot be split over {n} ranks; use {fits[0]}, "):
            cut_heads(30, n)
