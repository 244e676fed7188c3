"""What every rank does in the tests of a vocabulary in parts: embedding, logits and their loss."""

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

from stretto.overlap import LinearOptions, parallelize, vocab_cross_entropy
from stretto.overlap.p2p import Call
from tests.overlap.matmul_cases import Draw, leaf, same
from tests.overlap.module_cases import compare, full
from tests.overlap.plan_cases import parallelized

WIDTH = 6


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
