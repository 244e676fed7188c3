"""What every rank does in the tests of plans: dropout, followers, vocabulary, and plans that are refused."""

import copy
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from stretto.overlap import LinearOptions, Pending, parallelize, vocab_cross_entropy
from stretto.overlap.heads import cut_heads
from stretto.overlap.p2p import Call
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


def embedded(case: dict[str, Any]) -> None:
    """Embedding and logits over the vocabulary, with tied weights and padding, and their loss, at once."""
    sequence, vocabulary, n = case["sequence"], case["vocabulary"], dist.get_world_size()

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(vocabulary, WIDTH, padding_idx=case["padding"])
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, vocabulary, bias=case["bias"])
            if case["tied"]:
                self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            hidden: Any = self.embed(ids)
            hidden = hidden.to_local() if isinstance(hidden, DTensor) else hidden
            logits: Tensor = self.head(self.norm(hidden))
            return logits

    torch.manual_seed(1)
    whole = Words().double()
    with torch.no_grad():
        whole.embed.weight.add_(0.1)
    mine = copy.deepcopy(whole)
    plan = {"embed": "vocab", "norm": "sequence" if sequence else "replicate", "head": case["head"]}
    parallelize(mine, plan, dist.group.WORLD, LinearOptions(sequence_parallel=sequence, uneven=True))
    assert (mine.embed.weight is mine.head.weight) == case["tied"]
    generator = torch.Generator().manual_seed(case["seed"])
    ids, targets = (torch.randint(0, vocabulary, (2, case["rows"]), generator=generator) for _ in range(2))
    targets[0, 0] = -100
    reduction, load = case["reduction"], Draw(case["seed"])(2, case["rows"])
    logits, own = whole(ids), mine(ids)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
    loss = vocab_cross_entropy(own, targets, dist.group.WORLD, reduction=reduction)
    if reduction == "none":
        expected, load = expected.view_as(targets), load.abs()
        expected, loss = (expected * load).sum(), (loss * load).sum()
    same("loss", loss, expected)
    expected.backward()
    loss.backward()
    compare(mine, whole)
    assert isinstance(own, DTensor) == (case["head"] == "vocab")
    rank_part = full(own) if isinstance(own, DTensor) else own
    assert rank_part.shape[-1] == (vocabulary if isinstance(own, DTensor) or n == 1 else own.shape[-1])


def looked_up() -> tuple[int, int]:
    """Bytes of rows that this rank sends, forward and backward, where each reads as many of every rank's tokens."""
    n, group = dist.get_world_size(), dist.new_group()
    words = nn.Sequential(nn.Embedding(2 * n, WIDTH))
    parallelize(words, {"0": "vocab"}, group, LinearOptions(sequence_parallel=True))
    post, sent = Call.post, []

    def counted(call: Call, sends: Any, receives: Any) -> Any:
        sent.append(sum(tensor.nbytes for tensor, _ in sends if tensor.dtype == torch.float32))
        return post(call, sends, receives)

    with mock.patch.object(Call, "post", counted):
        out = words(torch.arange(2 * n).repeat(n))
        forward = sum(sent)
        out.to_local().sum().backward()
    dist.destroy_process_group(group)
    return forward, sum(sent) - forward


def different_tokens(how: str) -> None:
    """Refused on every rank, by all alike, and the group lives."""
    rank, n, group = dist.get_rank(), dist.get_world_size(), dist.new_group()
    words = nn.Sequential(nn.Embedding(4, WIDTH))
    parallelize(words, {"0": "vocab"}, group, LinearOptions(sequence_parallel=True))
    mine, theirs = {
        "as many of each, equally far": (torch.tensor([1, 2, 2, 1]).repeat(n), torch.tensor([2, 1, 1, 2]).repeat(n)),
        "another shape": (torch.zeros(1, 2 * n, dtype=torch.int64), torch.zeros(2, n, dtype=torch.int64)),
        "another dtype": (torch.zeros(n, dtype=torch.int64), torch.zeros(n)),
        "a row more": (torch.zeros(n, dtype=torch.int64), torch.zeros(n + 1, dtype=torch.int64)),
    }[how]
    with pytest.raises(ValueError, match="the ranks have different tokens"):
        words(mine if rank == 0 else theirs)
    words(torch.arange(4).repeat(n))
    dist.destroy_process_group(group)


def tokens_that_change(sequence: bool) -> None:
    """Between forward and backward: the gradient is that of the tokens which were looked up."""
    n = dist.get_world_size()
    words = nn.Sequential(nn.Embedding(2 * n, WIDTH))
    parallelize(words, {"0": "vocab"}, dist.group.WORLD, LinearOptions(sequence_parallel=sequence))
    tokens = torch.arange(2 * n)
    out = words(tokens)
    tokens.zero_()
    (out.to_local() if sequence else out).sum().backward()
    assert torch.equal(full(words[0].weight.grad), torch.ones(2 * n, WIDTH))


def entropies_in(dtype: torch.dtype) -> None:
    """16-bit logits: sums in float32, as torch's cross-entropy of the logits made float32."""
    rank, n = dist.get_rank(), dist.get_world_size()
    logits = (Draw(1)(7, 4 * n) * 20).to(dtype)
    targets = torch.arange(7) % (4 * n)
    whole, own = leaf(logits), leaf(logits.chunk(n, -1)[rank])
    expected = F.cross_entropy(whole.float(), targets)
    loss = vocab_cross_entropy(own, targets, dist.group.WORLD)
    assert loss.dtype == torch.float32
    same("loss", loss, expected, 1e-6)
    expected.backward()
    loss.backward()
    same("gradient", own.grad.float(), whole.grad.chunk(n, -1)[rank].float(), 1e-2)
    none = vocab_cross_entropy(own, torch.full((7,), -100), dist.group.WORLD)
    assert math.isnan(none.item())
    far = vocab_cross_entropy(own.detach().double() + 1e4, targets, dist.group.WORLD)
    assert torch.isfinite(far)


def bad_targets() -> None:
    group, rank, n = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    logits, targets = torch.zeros(3, 2), torch.tensor([0, 1, 2 * n - 1])
    vocab_cross_entropy(logits, targets, group)
    for wrong, words in [
        (torch.tensor([0, 1, 2 * n]), f"target {2 * n} is outside of the vocabulary, 0 to {2 * n - 1}"),
        (torch.tensor([0, -1, 1]), "target -1 is outside"),
        (torch.tensor([0, 1]), r"targets of shape \(2,\) for logits of shape \(3, 2\)"),
        (torch.tensor([rank % 2, 1, 1]), "the ranks have different targets"),
        (torch.tensor([0.0, 1.0, 1.0]), r"targets are torch\.float32; they must be int64 or int32"),
    ]:
        with pytest.raises(ValueError, match=words):
            vocab_cross_entropy(logits, wrong, group)
    with pytest.raises(ValueError, match="reduction='max' is not one of"):
        vocab_cross_entropy(logits, targets, group, reduction="max")
    with pytest.raises(ValueError, match=r"logits are torch\.int64"):
        vocab_cross_entropy(logits.long(), targets, group)
    rows = DTensor.from_local(logits, parallelized().layers[0].up.mesh, [Shard(0)], run_check=False)
    with pytest.raises(ValueError, match="they must be sharded by vocabulary"):
        vocab_cross_entropy(rows, torch.zeros(3 * n, dtype=torch.long), group)
    vocab_cross_entropy(logits, targets, group)


def rows_that_count_nothing() -> None:
    """int32 targets, and a row of no numbers whose target is ignored."""
    group, rank, n = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 2 * n, dtype=torch.float64, generator=draw)
    logits[1] = float("nan")
    targets = torch.tensor([0, -100, 1, 2 * n - 1], dtype=torch.int32)
    own = leaf(logits[:, 2 * rank : 2 * rank + 2])
    whole = leaf(logits)
    loss = vocab_cross_entropy(own, targets, group)
    expected = F.cross_entropy(whole, targets.long())
    loss.backward()
    expected.backward()
    same("loss", loss, expected)
    counted = [0, 2, 3]  # torch gives the ignored row no numbers again
    same("gradient", own.grad[counted], whole.grad[counted, 2 * rank : 2 * rank + 2])
    assert not own.grad[1].any()


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
