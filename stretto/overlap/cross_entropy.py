"""Cross-entropy of logits that are sharded over the vocabulary, which are never gathered.

Ranks exchange three numbers a row: the largest logit, the sum of exponentials and the target's logit;
backwards nothing. The hazard: rows are all rows and targets the same on every rank; that is checked. Source:
Megatron-LM's vocabulary-parallel cross-entropy.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard

from stretto.overlap.faults import Header
from stretto.overlap.inputs import outside_of_graphs
from stretto.overlap.loops import sum_dtype
from stretto.overlap.p2p import Call, peers_of
from stretto.overlap.routes import Slices, slice_sizes
from stretto.overlap.row_sizes import exchange_sizes
from stretto.overlap.vocab import check_same

__all__ = ["causal_lm_loss", "vocab_cross_entropy"]


@outside_of_graphs
def vocab_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    check: bool = True,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of logits of which every rank has part of the vocabulary.

    Args:
        logits: (..., own vocabulary), of all rows, as a column layer gives them, in the order of ranks; the
            parts may be uneven. Or a DTensor of that, (..., vocabulary).
        targets: (...), int64 or int32, the same on every rank.
        group: every rank of it makes this call.
        ignore_index: a target that counts nothing.
        reduction: "mean" over targets that count, "sum", or "none".
        check: look for targets outside of the vocabulary and for ranks whose targets differ.

    Returns:
        A scalar, or (...) for "none", the same on every rank; float32, float64 for float64.

    Gradients:
        logits: the softmax of the own vocabulary minus one at the target; nothing is sent. The loss is one
        number that all ranks hold, so that its gradient is not to be divided by their number.

    Raises:
        ValueError: for shapes, targets or a reduction that cannot be; on every rank.
        PeerError: as `all_gather_matmul`.
    """
    peers = peers_of(group)
    with peers.call("vocab_cross_entropy") as call:
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction={reduction!r} is not one of 'mean', 'sum', 'none'")
        if targets.shape != logits.shape[:-1]:
            raise ValueError(f"targets of shape {tuple(targets.shape)} for logits of shape {tuple(logits.shape)}")
        if targets.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"targets are {targets.dtype}; they must be int64 or int32")
        local, vocabulary = _vocabulary(call, logits)
        flat = targets.flatten().long()
    with peers.call("vocab_cross_entropy") as call:  # a call of its own, which a refusal leaves usable
        if check:
            check_same(call, flat, "targets")
            _check_targets(flat, vocabulary.total, ignore_index)
        losses: Tensor = _CrossEntropy.apply(
            local.flatten(0, -2), flat, vocabulary.rows(peers.rank).start, group, ignore_index
        )
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / (flat != ignore_index).sum()


def causal_lm_loss(group: dist.ProcessGroup) -> Callable[..., Tensor]:
    """A loss for transformers' causal language models: `model.loss_function = causal_lm_loss(group)`.

    Called with logits sharded over the vocabulary, (batch, rows, vocabulary), and labels (batch, rows), which
    it shifts by one unless `shift_labels` is given.
    """

    def loss_function(
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = vocab_cross_entropy(logits, shift_labels, group, ignore_index=ignore_index, reduction=reduction)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    return loss_function


def _vocabulary(call: Call, logits: Tensor) -> tuple[Tensor, Slices]:
    """The own logits and the vocabulary of every rank."""
    if isinstance(logits, DTensor):
        if tuple(logits.placements) != (Shard(logits.ndim - 1),):
            raise ValueError(f"logits are a DTensor placed {logits.placements}; they must be sharded by vocabulary")
        return logits.to_local(), Slices(tuple(slice_sizes(logits.shape[-1], call.peers.world_size)))
    if isinstance(logits, Tensor) and logits.dtype.is_floating_point:
        rows = logits.shape[:-1].numel()
        shape = (logits.shape[-1], rows)
        header = Header(call.operation, call.number, "sizes", 0, shape, logits.dtype, 1, "direct", ())
        return logits, Slices(tuple(exchange_sizes(call, header, logits.device)))
    raise ValueError(f"logits are {logits.dtype}; they must be floating-point")


def _check_targets(targets: Tensor, vocabulary: int, ignore_index: int) -> None:
    wrong = targets[((targets < 0) | (targets >= vocabulary)) & (targets != ignore_index)]
    if len(wrong):
        raise ValueError(
            f"target {int(wrong[0])} is outside of the vocabulary, 0 to {vocabulary - 1}, and is not "
            f"ignore_index={ignore_index}"
        )


class _CrossEntropy(torch.autograd.Function):
    """logits (n, own vocabulary), targets (n,) -> (n,), 0 for ignored targets."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup, ignore_index: int
    ) -> Tensor:
        kept, own = sum_dtype(logits.dtype), logits.shape[1]
        largest = logits.new_full((len(logits),), float("-inf"))
        if own:
            largest = logits.max(1).values
        largest = largest.to(kept)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        local = targets - first
        mine = (local >= 0) & (local < own) & (targets != ignore_index)
        sums = logits.new_zeros(2, len(logits), dtype=kept)
        sums[0] = (logits.to(kept) - largest[:, None]).exp_().sum(1)
        sums[1, mine] = logits[mine, local[mine]].to(kept)
        dist.all_reduce(sums, group=group)
        log_sum = largest + sums[0].log()
        ctx.save_for_backward(logits, log_sum, local, mine, targets != ignore_index)
        return (log_sum - sums[1]).masked_fill(targets == ignore_index, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        logits, log_sum, local, mine, counts = ctx.saved_tensors
        softmax = (logits.to(log_sum.dtype) - log_sum[:, None]).exp_()
        softmax[mine, local[mine]] -= 1
        grad = (softmax * grads[0][:, None]).masked_fill(~counts[:, None], 0.0)
        return grad.to(logits.dtype), None, None, None, None
