"""The products of a linear layer, piece by piece: output, input gradient, weight gradient.

All tensors are (rows, inner, features), contiguous; weights are (out_features, in_features), of the input's
dtype or wider (float32 with a 16-bit input, as adapters are), and outputs are of the weight's. The hazard is
rounding: whatever is summed over pieces or over weights is kept in float32 (float64 for float64) and rounded
once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.overlap.loops import Piece, sum_dtype
from stretto.overlap.routes import Slices

__all__ = ["BiasGradient", "WeightGradient", "input_gradient", "input_partial", "output"]


def output(x: Tensor, weight: Tensor, bias: Tensor | None, into: Tensor) -> Tensor:
    """Write x (n, inner, K) times weight (F, K), plus bias (F,), into `into` (n, inner, F)."""
    flat, target = x.flatten(0, 1).to(weight.dtype), into.flatten(0, 1)
    if bias is None:
        torch.mm(flat, weight.t(), out=target)
    else:
        torch.addmm(bias, flat, weight.t(), out=target)
    return into


def input_partial(grads: Sequence[Tensor], weights: Sequence[Tensor], rows: slice, dtype: torch.dtype) -> Tensor:
    """The rows' gradient of the common input of several products, (n, inner, K) of `dtype`, on this rank."""
    n, inner = grads[0][rows].shape[:2]
    partials = (grad[rows].flatten(0, 1) @ weight for grad, weight in zip(grads, weights))
    total = next(partials)
    if len(weights) > 1:
        total = total.to(sum_dtype(total.dtype))
        for partial in partials:
            total += partial
    return total.to(dtype).view(n, inner, weights[0].shape[1])


def input_gradient(grads: Sequence[Tensor], weights: Sequence[Tensor], into: Tensor) -> None:
    """Write the gradient of the common input of several products into `into` (n, inner, K)."""
    if len(weights) == 1:
        torch.mm(grads[0].flatten(0, 1), weights[0], out=into.flatten(0, 1))
    else:
        into.copy_(input_partial(grads, weights, slice(None), into.dtype))


class WeightGradient:
    """The gradient of a weight (F, K), summed over pieces of rows."""

    def __init__(self, weight: Tensor) -> None:
        self._dtype = weight.dtype
        self._sum = torch.zeros_like(weight, dtype=sum_dtype(weight.dtype), memory_format=torch.contiguous_format)

    def add(self, grad: Tensor, x: Tensor) -> None:
        """Add a piece: the output's gradient (n, inner, F) against the input (n, inner, K)."""
        left, right = grad.flatten(0, 1).t(), x.flatten(0, 1).to(grad.dtype)
        if self._sum.dtype == self._dtype:
            self._sum.addmm_(left, right)
        else:
            self._sum += left @ right

    def result(self) -> Tensor:
        """The sum, in the weight's dtype."""
        return self._sum.to(self._dtype)


class BiasGradient:
    """The gradient of a bias (F,) that every rank holds, over all ranks' rows, bitwise the same on each.

    Every rank sees the rows in its own order: the pieces' sums are kept apart and added in the slices' order.
    """

    def __init__(self, bias: Tensor, slices: Slices) -> None:
        self._dtype, self._slices = bias.dtype, slices
        shape = (len(slices.sizes), slices.num_subslices, *bias.shape)
        self._sums = bias.new_zeros(shape, dtype=sum_dtype(bias.dtype))

    def add(self, piece: Piece, grad: Tensor) -> None:
        """Add a piece of the output's gradient, (n, inner, F); a whole slice is summed as others sum it."""
        slices, owner = self._slices, piece.owner
        parts = [grad]
        if piece.subslice == 0 and len(grad) == slices.sizes[owner]:
            parts = [grad[slices.local(owner, s)] for s in range(slices.num_subslices)]
        for s, part in enumerate(parts, piece.subslice):
            self._sums[owner, s] = part.sum((0, 1), dtype=self._sums.dtype)

    def result(self) -> Tensor:
        """The sum, in the bias's dtype."""
        return self._sums.sum((0, 1)).to(self._dtype)
