"""Tensor parallelism without sequence sharding: every rank has every row, before and after.

An all-reduce is a reduce-scatter, which hides behind its product, and a gather, which does not: it hides
behind whatever the caller does next, or, in the backward of a column layer, behind the weights' gradients.
The hazard is `Pending`: its tensor must not be read before `wait`. Source: the backward table of this
library's schedules.
"""

import math
from collections.abc import Sequence
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
from stretto.overlap.p2p import Call, peers_of
from stretto.overlap.row import MatmulAllReduce
from stretto.overlap.transfers import Transfer

__all__ = ["Pending", "matmul_all_reduce", "matmul_all_reduce_start", "replicate_matmul"]


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
    return matmul_all_reduce_start(x, weights, group, biases=biases, **options).wait()


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
    called in between. Arguments, gradients and errors as `matmul_all_reduce`.
    """
    ws, bs = listed(weights, biases)
    peers = peers_of(group)
    with peers.call("matmul_all_reduce") as call:
        check_linear(x, ws, bs, 0)
        gradients, device = needed(x, *ws, *bs), x.device
        how = checked_how(peers, schedule, num_subslices, check, gradients, device=device, tuned_as=tuned_as)
        rows = x.reshape(math.prod(x.shape[:-1]), 1, x.shape[-1]).contiguous()
        slices = scattered_slices(how, len(rows), None)
    pending = Pending(call)
    try:
        out = MatmulAllReduce.apply(call, how, slices, pending.transfers, len(ws), rows, *ws, *bs)
    except BaseException:  # such as the early end of a recomputation: buffers must outlive their transfers
        pending.wait_for_transfers()
        raise
    ys = [part.view(*x.shape[:-1], part.shape[-1]) for part in side_by_side(out, ws)]
    pending.out = ys[0] if isinstance(weights, Tensor) else ys
    return pending


class Pending:
    """A tensor, or a list of them, whose last slices are still arriving."""

    out: Any
    """What is arriving; not to be read before `wait`."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.transfers: list[Transfer] = []

    def wait(self) -> Any:
        """The tensor or tensors, complete. `PeerError` if a peer was lost on the way. May be called again."""
        self.wait_for_transfers()
        return self.out

    def wait_for_transfers(self) -> None:
        """Until nothing of it is in flight."""
        if self.transfers:
            with self._call.peers.guard(self._call):
                while self.transfers:
                    self._call.wait(self.transfers.pop(0))


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
        schedule: of the backward, as in `matmul_reduce_scatter`. Nothing is sent forward.
        num_subslices: pieces per slice.
        check: as in `all_gather_matmul`; nothing can be checked before the backward.
        tuned_as: as in `all_gather_matmul`.

    Returns:
        Each (..., F).

    Gradients:
        x: summed over ranks, bitwise the same on every rank; the sums go round while the weights' gradients
            are computed. weights, biases: local.

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
    outs = ReplicateMatmul.apply(how, len(weights), rows, *weights, *bs)
    return [out.view(*x.shape[:-1], out.shape[-1]) for out in outs]
