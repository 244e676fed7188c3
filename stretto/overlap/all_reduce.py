"""Tensor parallelism without sequence sharding: every rank has every row, before and after.

An all-reduce is a reduce-scatter, which hides behind its product, and a gather, which does not: it hides
behind whatever the caller does next, or, in the backward of a column layer, behind the weights' gradients and
whatever autograd can do before it needs the sum.
The hazard is `Pending`: its tensor must not be read before `wait`. Source: the backward table of this
library's schedules.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, overload

import torch.distributed as dist
from torch import Tensor

from stretto.overlap.column import ReplicateMatmul
from stretto.overlap.inputs import (
    check_linear,
    checked_how,
    listed,
    needed,
    outside_of_graphs,
    scattered_slices,
    side_by_side,
)
from stretto.overlap.p2p import peers_of
from stretto.overlap.pending import Left, Pending
from stretto.overlap.row import MatmulAllReduce

__all__ = ["matmul_all_reduce", "matmul_all_reduce_start", "replicate_matmul"]


@overload
def matmul_all_reduce(
    x: Tensor,
    weights: Tensor,
    group: dist.ProcessGroup,
    *,
    biases: Tensor | None = ...,
    schedule: str = ...,
    num_subslices: int = ...,
    check: bool = ...,
    tuned_as: str = ...,
) -> Tensor: ...
@overload
def matmul_all_reduce(
    x: Tensor,
    weights: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    biases: Sequence[Tensor | None] | None = ...,
    schedule: str = ...,
    num_subslices: int = ...,
    check: bool = ...,
    tuned_as: str = ...,
) -> list[Tensor]: ...
@outside_of_graphs
def matmul_all_reduce(
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    biases: Tensor | Sequence[Tensor | None] | None = None,
    schedule: str = "direct",
    num_subslices: int = 1,
    check: bool = True,
    tuned_as: str = "",
) -> Tensor | list[Tensor]:
    """Multiply and sum over ranks, every rank keeping all rows: tensor parallelism without sequence sharding.

    A `matmul_reduce_scatter` over the flattened rows, then a gather of the summed slices. The gather has
    nothing to hide behind here: `matmul_all_reduce_start` leaves it in flight for the caller's next
    operation.

    Args:
        x: (..., K), this rank's input features, the same rows on every rank.
        weights: (F, K), the columns of those features; a sequence shares one input and one message, and may
            differ in F.
        group: every rank of it makes this call.
        biases: (F,) for each weight, or None, the same on every rank; added once, by the owner of a row,
            after the sum.
        schedule: as in `matmul_reduce_scatter`.
        num_subslices: pieces per slice.
        check: as in `all_gather_matmul`, and so `tuned_as`.
        tuned_as: see `check`.

    Returns:
        (..., F), or a list of them, which are views of one tensor; bitwise the same on every rank.

    Gradients:
        Nothing is sent: the outputs' gradient is the same on every rank already.

    Raises:
        As `all_gather_matmul`.
    """
    options: dict[str, Any] = {
        "schedule": schedule,
        "num_subslices": num_subslices,
        "check": check,
        "tuned_as": tuned_as,
    }
    return _started(x, weights, group, biases, options, exchanges=False).wait()


@outside_of_graphs
def matmul_all_reduce_start(
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    biases: Tensor | Sequence[Tensor | None] | None = None,
    schedule: str = "direct",
    num_subslices: int = 1,
    check: bool = True,
    tuned_as: str = "",
) -> "Pending":
    """`matmul_all_reduce` up to its second half: the summed slices are on their way when this returns.

    Whatever the caller computes before `Pending.wait` hides them. Further operations on the group may be
    called in between. Arguments, gradients and errors as `matmul_all_reduce`. Two ranks send each other their whole
    partial sums, as many bytes, so that all of it is on its way; "auto" is "direct" for them, because what hides
    it is not known. Under "plain" nothing is left in flight.
    """
    options: dict[str, Any] = {
        "schedule": schedule,
        "num_subslices": num_subslices,
        "check": check,
        "tuned_as": tuned_as,
    }
    return _started(x, weights, group, biases, options, exchanges=True)


def _started(
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    group: dist.ProcessGroup,
    biases: Tensor | Sequence[Tensor | None] | None,
    options: dict[str, Any],
    *,
    exchanges: bool,
) -> Pending:
    """With `exchanges`, two ranks that overlap send each other all of their partial sums."""
    ws, bs = listed(weights, biases)
    peers = peers_of(group)
    with peers.call("matmul_all_reduce") as call:
        check_linear(x, ws, bs, 0)
        how = checked_how(peers, gradients=needed(x, *ws, *bs), device=x.device, **options)
        rows = x.reshape(math.prod(x.shape[:-1]), 1, x.shape[-1]).contiguous()
        exchanges = exchanges and peers.world_size == 2 and how.schedule in ("direct", "auto")
        if exchanges and how.schedule == "auto":
            how = replace(how, schedule="direct", num_subslices=1)
        call.tuned_as = how.tuned_as
        slices = scattered_slices(how, len(rows), None)
    left = Left(call)
    out = MatmulAllReduce.apply(call, how, slices, left, exchanges, len(ws), rows, *ws, *bs)
    ys = [part.view(*x.shape[:-1], part.shape[-1]) for part in side_by_side(out, ws)]
    result = ys[0] if isinstance(weights, Tensor) else ys

    def complete() -> Any:
        left.wait()
        return result

    pending = Pending(complete, left.transfers)
    pending.out = result
    if how.schedule == "plain":
        pending.wait()
    return pending


@outside_of_graphs
def replicate_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    biases: Sequence[Tensor | None] | None = None,
    schedule: str = "direct",
    num_subslices: int = 1,
    check: bool = True,
    tuned_as: str = "",
) -> list[Tensor]:
    """Multiply an `x` that every rank has whole: a column layer without sequence sharding.

    Args:
        x: (..., K), the same on every rank.
        weights: each (F, K), this rank's output features, of x's dtype, or float32 where x is 16-bit.
        group: every rank of it makes this call.
        biases: (F,) for each weight, or None.
        schedule: of the backward, as in `matmul_reduce_scatter`; between two ranks "auto" is "direct", as in
            `matmul_all_reduce_start`. Nothing is sent forward.
        num_subslices: pieces per slice.
        check: as in `all_gather_matmul`; nothing can be checked before the backward.
        tuned_as: as in `all_gather_matmul`.

    Returns:
        Each (..., F).

    Gradients:
        x: summed over ranks, bitwise the same on every rank; the sums go round while the weights' gradients
            are computed, and whatever else autograd has to do then, such as the other half of a batch. weights,
            biases: local.

    Raises:
        As `all_gather_matmul`.
    """
    peers = peers_of(group)
    bs = list(biases) if biases is not None else [None] * len(weights)
    with peers.call("replicate_matmul"):
        check_linear(x, weights, bs, 0, wider=True)
        gradients, device = needed(x, *weights, *bs), x.device
        how = checked_how(peers, schedule, num_subslices, check, gradients, device=device, tuned_as=tuned_as)
    rows = x.reshape(math.prod(x.shape[:-1]), 1, x.shape[-1]).contiguous()
    outs = ReplicateMatmul.behind_sums(how, rows, weights, bs)
    return [out.view(*x.shape[:-1], out.shape[-1]) for out in outs]
