"""What every rank does in the tests of attention: the library's layers beside the whole by one process."""

import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stretto import overlap
from stretto.overlap import (
    PeerError,
    attention_all_to_all,
    attention_reduce_scatter,
    matmul_all_to_all,
    matmul_all_to_all_start,
    repeat_kv_heads,
    split_heads,
)
from tests.overlap.fault_cases import ends
from tests.overlap.matmul_cases import Draw, leaf, part_of, room, same

D = 2


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> Tensor:
    """An attention written out by hand, to be passed in place of torch's."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    if attn_mask is not None:
        scores = (
            scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
        )
    return scores.softmax(-1) @ value


class Layer:
    """The whole problem: x, the four weights, the layer's output and every gradient, in one process."""

    def __init__(self, case: dict[str, Any]) -> None:
        draw, self.batch, self.rows = Draw(case["seed"]), case["batch"], sum(case["rows"])
        self.heads, self.kv_heads = case["heads"], case["kv_heads"]
        width = 3
        self.x = leaf(draw(self.batch, self.rows, width))
        self.weights = [leaf(draw(h * D, width)) for h in (self.heads, self.kv_heads, self.kv_heads)]
        self.biases = [leaf(draw(len(w))) for w in self.weights]
        self.out_weight, self.out_bias = leaf(draw(4, self.heads * D)), leaf(draw(4))
        self.mask = self._mask(case, draw)
        self.causal = case["causal"]
        fused = case["fused"]
        q, k, v = (F.linear(self.x, w, b).unflatten(-1, (-1, D)) for w, b in zip(self.weights, self.biases))
        mask = self.mask
        if self.causal:
            visible = torch.ones(self.rows, self.rows, dtype=torch.bool).tril()
            if mask is None:
                mask = visible
            else:
                mask = mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, float("-inf"))
        attended = softmax_attention(*(t.transpose(1, 2) for t in (q, k, v)), mask)
        joined = attended.transpose(1, 2).flatten(2)
        self.y = F.linear(joined, self.out_weight, self.out_bias) if fused else joined
        self.load = draw(*self.y.shape)
        (self.y * self.load).sum().backward()

    def _mask(self, case: dict[str, Any], draw: Draw) -> Tensor | None:
        if case["mask"] == "added":
            return draw(self.rows, self.rows)
        if case["mask"] == "bool":
            allowed = draw(1, 1, self.rows, self.rows) > 0
            return allowed | torch.eye(self.rows, dtype=torch.bool)
        if case["mask"] == "keys":
            allowed = draw(1, self.rows) > 0
            allowed[:, 0] = True
            return allowed
        return None


def summed(grad: Tensor) -> Tensor:
    total = grad.clone()
    dist.all_reduce(total)
    return total


def together(grads: list[Tensor]) -> Tensor:
    """One vector: the gradient of a key's bias alone is zero, and has no relative error."""
    return torch.cat([grad.flatten() for grad in grads])


def options_of(case: dict[str, Any], layer: Layer) -> dict[str, Any]:
    options = {name: case[name] for name in ("schedule", "num_subslices")}
    if case["by_hand"]:
        options["attention"] = softmax_attention
    return {**options, "attn_mask": layer.mask, "is_causal": layer.causal}


def called(case: dict[str, Any], operation: str) -> Any:
    """An operation of the library or of the reference, whole or in two halves."""
    if not case["started"] or case["schedule"] == "reference":
        return getattr(room(case), operation)
    start = getattr(overlap, f"{operation}_start")
    return lambda *args, **options: start(*args, **options).wait()


def ulysses(case: dict[str, Any]) -> None:
    group, layer = dist.group.WORLD, Layer(case)
    part, rank, n = part_of(group), dist.get_rank(), dist.get_world_size()
    heads, kv_heads = split_heads(layer.heads, n, layer.kv_heads)
    features = [[h * D for h in heads]] + [[h * D for h in kv_heads]] * 2
    x, weights, biases = (
        leaf(part(layer.x, case["rows"], 1)),
        [leaf(w) for w in layer.weights],
        [leaf(b) for b in layer.biases],
    )
    out_weight, out_bias = leaf(layer.out_weight), leaf(layer.out_bias)
    options = options_of(case, layer)
    first = {name: options[name] for name in ("schedule", "num_subslices")}
    every = [
        [t if i == 0 else repeat_kv_heads(t, layer.kv_heads, n) for i, t in enumerate(ts)] for ts in (weights, biases)
    ]
    qkv = called(case, "matmul_all_to_all")(
        x, every[0], group, features=features, biases=every[1], sizes=case["rows"], **first
    )
    q, k, v = (t.unflatten(-1, (-1, D)) for t in qkv)
    assert q.shape == (layer.batch, layer.rows, heads[rank], D)
    fused = {"weight": out_weight, "bias": out_bias} if case["fused"] else {}
    if case["recompute"] and not case["started"]:
        options["recompute"] = True
    y = called(case, "attention_all_to_all")(q, k, v, group, heads=heads, sizes=case["rows"], **fused, **options)
    same("y", y, part(layer.y, case["rows"], 1))
    (y * part(layer.load, case["rows"], 1)).sum().backward()
    joined = torch.zeros_like(layer.x)  # some ranks' rows may have no gradient at all
    part(joined, case["rows"], 1).copy_(x.grad)
    same("x.grad", summed(joined), layer.x.grad)
    whole = [t.grad for t in (*layer.weights, *layer.biases)]
    same("projections", together([summed(t.grad) for t in (*weights, *biases)]), together(whole))
    if case["fused"]:
        same("out weight", summed(out_weight.grad), layer.out_weight.grad)
        same("out bias", summed(out_bias.grad), layer.out_bias.grad)


def query_split(case: dict[str, Any]) -> None:
    group, layer = dist.group.WORLD, Layer({**case, "fused": True})
    part, n = part_of(group), dist.get_world_size()
    heads, kv_heads = split_heads(layer.heads, n, layer.kv_heads)
    cuts = [[h * D for h in heads]] + [[h * D for h in kv_heads]] * 2
    x = leaf(layer.x)
    weights = [leaf(part(w, cut, 0)) for w, cut in zip(layer.weights, cuts)]
    biases = [leaf(part(b, cut, 0)) for b, cut in zip(layer.biases, cuts)]
    out_weight, out_bias = leaf(part(layer.out_weight, cuts[0], 1)), leaf(layer.out_bias)
    q, k, v = (F.linear(x, w, b).unflatten(-1, (-1, D)) for w, b in zip(weights, biases))
    y = room(case).attention_reduce_scatter(
        q, k, v, out_weight, group, bias=out_bias, sizes=case["rows"], **options_of(case, layer)
    )
    same("y", y, part(layer.y, case["rows"], 1))
    (y * part(layer.load, case["rows"], 1)).sum().backward()
    same("x.grad", summed(x.grad), layer.x.grad)
    same("out weight", out_weight.grad, part(layer.out_weight.grad, cuts[0], 1))
    same("out bias", out_bias.grad, layer.out_bias.grad)
    whole = [part(t.grad, cut, 0) for t, cut in zip([*layer.weights, *layer.biases], [*cuts, *cuts])]
    same("projections", together([t.grad for t in (*weights, *biases)]), together(whole))


def checkpointed() -> None:
    """Both layers of attention under activation checkpointing give the gradients that they give without."""
    group, n = dist.group.WORLD, dist.get_world_size()
    draw = Draw(11)
    weights = [leaf(draw(n * D, 3)) for _ in range(3)]
    out_weight, x = leaf(draw(3, n * D)), leaf(part_of(group)(draw(1, 2 * n, 3), [2] * n, 1))
    columns = slice(D * dist.get_rank(), D * (dist.get_rank() + 1))

    def layer(x: Tensor) -> Tensor:
        q, k, v = matmul_all_to_all(x, weights, group, features=[[D] * n] * 3)
        heads = [t.unflatten(-1, (1, D)) for t in (q, k, v)]
        y = attention_all_to_all(*heads, group, weight=out_weight, is_causal=True)
        every = attention_reduce_scatter(*heads, out_weight[:, columns], group)
        return y + every

    grads = []
    for wrapped in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        wrapped(x).square().sum().backward()
        inputs = (x, *weights, out_weight)
        grads.append([t.grad for t in inputs])
        for tensor in inputs:
            tensor.grad = None
    assert all(torch.equal(one, other) for one, other in zip(*grads))


class Watched(torch.autograd.Function):
    """The identity; what its graph holds tells whether the graph lives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: list[Any]) -> Tensor:
        ctx.token = threading.Event()
        tokens.append(weakref.ref(ctx.token))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return grads[0], None


def recomputed() -> None:
    """With `recompute` a checkpointed attention keeps no graph until its backward; gradients are the same."""
    group, n = dist.group.WORLD, dist.get_world_size()
    draw = Draw(11)
    weight, x = leaf(draw(n * D, 3)), leaf(part_of(group)(draw(1, 2 * n, 3), [2] * n, 1))
    tokens: list[Any] = []

    def attention(*args: Any) -> Tensor:
        return Watched.apply(overlap.scaled_dot_product_attention(*args), tokens)

    def layer(x: Tensor) -> Tensor:
        (q,) = matmul_all_to_all(x, [weight], group, features=[[D] * n])
        q = q.unflatten(-1, (1, D))
        y = attention_all_to_all(q, q.sin(), q.cos(), group, attention=attention, recompute=recompute)
        return y.square()

    grads = []
    for recompute in (False, True):
        tokens.clear()
        y = checkpoint(layer, x, use_reentrant=False)
        assert sum(token() is not None for token in tokens) == (0 if recompute else n)
        y.sum().backward()
        grads.append((x.grad, weight.grad))
        x.grad = weight.grad = None
    assert all(torch.equal(one, other) for one, other in zip(*grads))


def frozen_weights() -> None:
    """LoRA-like: only x needs a gradient, and a second backward is refused."""
    group, n = dist.group.WORLD, dist.get_world_size()
    x = torch.randn(1, 2, 3, requires_grad=True)
    (q,) = matmul_all_to_all(x, [torch.randn(2 * n, 3)], group, features=[[2] * n])
    heads = q.unflatten(-1, (1, 2))
    y = attention_all_to_all(heads, heads, heads, group)
    y.sum().backward(retain_graph=True)
    assert torch.isfinite(x.grad).all()
    with pytest.raises(PeerError, match="goes backward once"):
        y.sum().backward()


def order_of_parts() -> dict[str, Any]:
    """By operation, whose part each product made; and when the own was made and an arrival first awaited."""
    group, n, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    x, weight = torch.ones(1, 2, 3), torch.ones(2 * n, 3)
    with overlap.trace() as recorded:
        (q,) = matmul_all_to_all(x, [weight], group, features=[[2] * n])
        attention_all_to_all(*[q.unflatten(-1, (1, 2))] * 3, group)
    found: dict[str, Any] = {}
    for span in sorted(recorded.spans, key=lambda span: span.start_s):
        if span.what == "product":
            found.setdefault(span.operation, []).append(int(span.name.split(",")[0].removeprefix("slice ")))
            if span.operation == "matmul_all_to_all" and found[span.operation][-1] == rank:
                found.setdefault("own part made", span.start_s)
        elif span.what == "wait" and span.operation == "matmul_all_to_all" and "own part made" in found:
            found.setdefault("first arrival waited for", span.start_s)
    return found


def refuse(how: str) -> str:
    """What a call is refused with whose input is wrong on every rank; the group is used after it."""
    group, n = dist.group.WORLD, dist.get_world_size()
    x, w, q = torch.ones(1, 2, 3), torch.ones(2 * n, 3), torch.ones(1, 2 * n, 1, 2)
    calls: dict[str, Any] = {
        "features": lambda: matmul_all_to_all(x, [w], group, features=[[1, 2]]),
        "splits": lambda: matmul_all_to_all(x, [w], group, features=[[2] * n] * 2),
        "heads": lambda: attention_all_to_all(q, q, q, group, heads=[3] * n),
        "bias": lambda: attention_all_to_all(q, q, q, group, bias=torch.ones(2)),
        "shapes": lambda: attention_all_to_all(q, q[0], q, group),
        "ring": lambda: attention_all_to_all(q, q, q, group, schedule="ring"),
    }
    kind, text = ends(calls[how])
    assert kind == "ValueError"
    assert matmul_all_to_all(x, [w], group, features=[[2] * n])[0].shape == (1, 2 * n, 2)
    return text


def low_rank(started: bool, num_subslices: int, dtype: str) -> None:
    """An adapter beside a layer's weight gives what the merged weight gives, and its gradients."""
    group, n, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    draw, rows = Draw(13), [(2 * r) % 5 for r in range(1, n + 1)]
    kind = getattr(torch, dtype)
    whole = {
        name: leaf(draw(*shape)) for name, shape in {"x": (2, sum(rows), 3), "q": (2 * n, 3), "k": (n, 3)}.items()
    }
    down, up = leaf(draw(2, 3)), leaf(draw(2 * n, 2))
    merged = F.linear(whole["x"], whole["q"] + up @ down), F.linear(whole["x"], whole["k"])
    loads = [draw(*y.shape) for y in merged]
    sum((y * load).sum() for y, load in zip(merged, loads)).backward()
    mine = {name: leaf(value.to(kind)) for name, value in whole.items()}
    mine["x"] = leaf(part_of(group)(mine["x"], rows, 1))
    wide = torch.float32 if kind is torch.bfloat16 else kind
    a, b = leaf(down.to(wide)), leaf(up.to(wide))
    called = matmul_all_to_all_start if started else matmul_all_to_all
    low = F.linear(mine["x"].to(wide), a)
    features, options = [[2] * n, [1] * n], {"sizes": rows, "num_subslices": num_subslices}
    out = called(mine["x"], [mine["q"], mine["k"]], group, features=features, low_rank=[(low, b), None], **options)
    outs, tolerance = (out.wait() if started else out), {"float64": 1e-12, "bfloat16": 2e-2}[dtype]
    for y, width, expected in zip(outs, (2, 1), merged):
        same("y", y.double(), expected[..., width * rank : width * (rank + 1)], tolerance)
    parts = [load[..., w * rank : w * (rank + 1)] for w, load in zip((2, 1), loads)]
    sum((y * part).sum() for y, part in zip(outs, parts)).backward()
    joined = torch.zeros_like(whole["x"])
    part_of(group)(joined, rows, 1).copy_(mine["x"].grad)
    same("x.grad", summed(joined), whole["x"].grad, tolerance)
    for name, found, expected in [("q", mine["q"], whole["q"]), ("down", a, down), ("up", b, up)]:
        assert found.grad.dtype == found.dtype
        same(name, summed(found.grad.double()), expected.grad, tolerance)


def low_rank_that_fits_not() -> None:
    group, x, weight = dist.group.WORLD, torch.ones(1, 2, 3), torch.ones(2, 3)
    n = dist.get_world_size()
    features = [[2] + [0] * (n - 1)]
    for pair, message in [
        ((torch.ones(1, 2, 4), torch.ones(3, 4)), r"\(1, 2, 4\) and \(3, 4\) must be \(1, 2, r\) and \(2, r\)"),
        ((torch.ones(1, 2, 4), torch.ones(2, 4).double()), "float32 and torch.float64, and x is torch.float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            matmul_all_to_all(x, [weight], group, features=features, low_rank=[pair])
    with pytest.raises(ValueError, match="2 low_rank pairs for 1 weights"):
        matmul_all_to_all(x, [weight], group, features=features, low_rank=[None, None])
