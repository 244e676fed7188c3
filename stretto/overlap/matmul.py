"""Products with a communication on one side of them, hidden behind the product itself, forward and backward.

A gather before a product (column-parallel, rows sharded) computes the own rows first; a reduce-scatter after
one (row-parallel) the own rows last. Their backwards are each other's loops. The hazard: every rank must call
the same operations in the same order and need the same gradients; a header before every payload says so when
one does not. Source: CommFuse (arXiv 2604.24013) for the forwards; the backwards are this library's.
"""

from collections.abc import Sequence
from typing import overload

import torch.distributed as dist
from torch import Tensor

from stretto.overlap.column import AllGatherMatmul
from stretto.overlap.inputs import (
    Sizes,
    check_linear,
    checked_how,
    gathered_slices,
    listed,
    needed,
    outside_of_graphs,
    rows_first,
    rows_last,
    scattered_slices,
    side_by_side,
)
from stretto.overlap.p2p import peers_of
from stretto.overlap.row import MatmulReduceScatter

__all__ = ["all_gather_matmul", "matmul_reduce_scatter"]


@overload
def all_gather_matmul(
    x: Tensor,
    weights: Tensor,
    group: dist.ProcessGroup,
    *,
    dim: int = ...,
    biases: Tensor | None = ...,
    sizes: Sizes = ...,
    schedule: str = ...,
    num_subslices: int = ...,
    keep_gathered: bool = ...,
    check: bool = ...,
    tuned_as: str = ...,
) -> Tensor: ...
@overload
def all_gather_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    dim: int = ...,
    biases: Sequence[Tensor | None] | None = ...,
    sizes: Sizes = ...,
    schedule: str = ...,
    num_subslices: int = ...,
    keep_gathered: bool = ...,
    check: bool = ...,
    tuned_as: str = ...,
) -> list[Tensor]: ...
@outside_of_graphs
def all_gather_matmul(
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    dim: int = 0,
    biases: Tensor | Sequence[Tensor | None] | None = None,
    sizes: Sizes = None,
    schedule: str = "direct",
    num_subslices: int = 1,
    keep_gathered: bool = False,
    check: bool = True,
    tuned_as: str = "",
) -> Tensor | list[Tensor]:
    """Gather `x` along `dim` and multiply by one or several weights, each slice as it arrives.

    Args:
        x: (..., rows of this rank at dim, ..., K), 2-D or more.
        weights: (F, K), this rank's output features; a sequence shares one gather and may differ in F. Each is
            of x's dtype, or float32 where x is 16-bit: x travels in its own dtype and is cast where it is.
        group: every rank of it makes this call.
        dim: the dimension that is sharded by rows, any but the last.
        biases: (F,) for each weight, or None.
        sizes: rows of every rank along `dim`. None: as many as here on each. "exchange": ask, one small
            message to every rank. Slices may be uneven and empty.
        schedule: "direct" sends the own slice to every rank, one a step; "ring" passes slices on; "plain"
            sends all at once before the product and hides nothing; "auto" measures each shape once, forward
            and backward, and takes what the law predicts to be fastest.
        num_subslices: pieces per slice; the first product starts when the first piece is there.
        keep_gathered: keep the gathered x, (..., sum(sizes), ..., K), for the backward; else it is gathered
            again.
        check: precede payloads by headers. Without them ranks that disagree hang, abort or compute wrong
            numbers.
        tuned_as: with "auto", calls of one `tuned_as` and one whole shape of `x` share a measurement; the same
            on every rank. Name it by the layer's whole size where several layers take inputs of one shape.

    Returns:
        (..., sum(sizes) at dim, ..., F) in the weight's dtype, or a list of them; laid out rows first.

    Gradients:
        x: reduce-scattered, own rows last. weights: against the gathered x, in the same loop, summed over
            slices in float32 (float64 for float64). biases: over all rows, nothing sent.

    Raises:
        ValueError: for an input that this rank can see to be wrong; nothing was sent.
        PeerError: a rank disagrees, died or never came; the group is dead.
    """
    single = isinstance(weights, Tensor)
    ws, bs = listed(weights, biases)
    peers = peers_of(group)
    with peers.call("all_gather_matmul") as call:
        dim = check_linear(x, ws, bs, dim, wider=True)
        gradients, device = needed(x, *ws, *bs), x.device
        how = checked_how(
            peers, schedule, num_subslices, check, gradients, keep_gathered, device=device, tuned_as=tuned_as
        )
        rows = rows_first(x, dim)
        slices = gathered_slices(call, how, rows, sizes)
    outs = list(AllGatherMatmul.apply(call, how, slices, len(ws), rows, *ws, *bs))
    ys = [rows_last(out, x, dim) for out in outs]
    return ys[0] if single else ys


@overload
def matmul_reduce_scatter(
    x: Tensor,
    weights: Tensor,
    group: dist.ProcessGroup,
    *,
    dim: int = ...,
    biases: Tensor | None = ...,
    sizes: Sizes = ...,
    schedule: str = ...,
    num_subslices: int = ...,
    check: bool = ...,
    tuned_as: str = ...,
) -> Tensor: ...
@overload
def matmul_reduce_scatter(
    x: Tensor,
    weights: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    dim: int = ...,
    biases: Sequence[Tensor | None] | None = ...,
    sizes: Sizes = ...,
    schedule: str = ...,
    num_subslices: int = ...,
    check: bool = ...,
    tuned_as: str = ...,
) -> list[Tensor]: ...
@outside_of_graphs
def matmul_reduce_scatter(
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    dim: int = 0,
    biases: Tensor | Sequence[Tensor | None] | None = None,
    sizes: Sizes = None,
    schedule: str = "direct",
    num_subslices: int = 1,
    check: bool = True,
    tuned_as: str = "",
) -> Tensor | list[Tensor]:
    """Multiply and sum over ranks, each rank keeping its own rows: others' rows are computed and sent first.

    Args:
        x: (..., all rows at dim, ..., K), this rank's input features.
        weights: (F, K), the columns of those features; a sequence shares one input and one message, and may
            differ in F.
        group: every rank of it makes this call.
        dim: the dimension that is sharded by rows afterwards, any but the last.
        biases: (F,) for each weight, or None, the same on every rank; added once, by the owner of a row,
            after the sum.
        sizes: rows that every rank is to own along `dim`. None: as `torch.chunk` and DTensor cut them.
        schedule: "direct" sends each partial to its owner, who adds in the fixed order r-1, r-2, ..., r+1,
            own last, in float32 (float64 for float64): bitwise repeatable. "ring" passes running sums on,
            rounded to x's dtype at every hop. "plain" sends all at once after the product and hides nothing.
            "auto" as in `all_gather_matmul`.
        num_subslices: pieces per slice.
        check: as in `all_gather_matmul`, and so `tuned_as`.
        tuned_as: see `check`.

    Returns:
        (..., sizes[rank] at dim, ..., F), or a list of them, which are views of one tensor; laid out rows
        first.

    Gradients:
        x and weights: one gather of the outputs' gradient feeds all products. biases: summed over the
        gathered rows, in the order of the slices, so that they are bitwise the same on every rank.

    Raises:
        As `all_gather_matmul`.
    """
    single = isinstance(weights, Tensor)
    ws, bs = listed(weights, biases)
    peers = peers_of(group)
    with peers.call("matmul_reduce_scatter") as call:
        dim = check_linear(x, ws, bs, dim)
        gradients, device = needed(x, *ws, *bs), x.device
        how = checked_how(peers, schedule, num_subslices, check, gradients, device=device, tuned_as=tuned_as)
        rows = rows_first(x, dim)
        slices = scattered_slices(how, len(rows), sizes)
    out = MatmulReduceScatter.apply(call, how, slices, len(ws), rows, *ws, *bs)
    ys = [rows_last(part, x, dim) for part in side_by_side(out, ws)]
    return ys[0] if single else ys
