"""Linear layers of one input, some output features at a time: what `matmul_all_to_all` computes for every rank.

A layer may carry a product of low rank beside its own, as LoRA does: x W^T + bias + low up^T, where low is narrow and
made by the caller. The sum of both is what travels, so an adapter costs no message. The hazard: the weights are whole
on every rank, so their gradients here are this rank's rows' part of the sum. Source: DeepSpeed-Ulysses (arXiv
2309.14509) for who needs which features; LoRA (arXiv 2106.09685) for the second product.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stretto.overlap.exchange import Trade
from stretto.overlap.inputs import rows_first
from stretto.overlap.loops import sum_dtype
from stretto.overlap.products import output
from stretto.overlap.routes import Slices

__all__ = ["Gradients", "Layout", "Linears", "projection", "projection_gradient"]


@dataclass(frozen=True)
class Layout:
    """Which rows and which features of every rank."""

    rows: Slices
    features: tuple[Slices, ...]
    """For each weight, the features of every rank."""

    def cut(self, num_subslices: int) -> "Layout":
        """The same with rows in another number of sub-slices."""
        return replace(self, rows=self.rows.cut(num_subslices))

    def width(self, rank: int) -> int:
        """Features of a rank, over all weights."""
        return sum(f.sizes[rank] for f in self.features)

    def parts(self, rank: int) -> list[tuple[slice, slice]]:
        """For each weight, the rank's features in the weight and their columns in its message."""
        start, found = 0, []
        for f in self.features:
            found.append((f.rows(rank), slice(start, start + f.sizes[rank])))
            start += f.sizes[rank]
        return found


@dataclass(frozen=True)
class Linears:
    """Several layers of one input; of a layer without a bias or without a low-rank product these are None."""

    weights: list[Tensor]
    """Each (F, K)."""
    biases: list[Tensor | None]
    """Each (F,)."""
    lows: list[Tensor | None]
    """Each (own rows, inner, low rank)."""
    ups: list[Tensor | None]
    """Each (F, low rank), of its low's dtype."""

    def flat(self) -> list[Tensor | None]:
        """All of them, as an autograd function takes them."""
        return [*self.weights, *self.biases, *self.lows, *self.ups]

    @classmethod
    def of(cls, flat: Sequence[Tensor | None]) -> "Linears":
        """The inverse of `flat`."""
        n = len(flat) // 4
        weights = [weight for weight in flat[:n] if weight is not None]
        return cls(weights, list(flat[n : 2 * n]), list(flat[2 * n : 3 * n]), list(flat[3 * n :]))

    def looked_over(self, x: Tensor) -> "Linears":
        """The same with each low, (batch, own rows, low rank) beside x (batch, own rows, K), rows first."""
        lows: list[Tensor | None] = []
        for low, up, weight in zip(self.lows, self.ups, self.weights):
            if low is None or up is None:
                lows.append(None)
                continue
            if low.shape[:-1] != x.shape[:-1] or up.shape != (len(weight), low.shape[-1]):
                raise ValueError(
                    f"a low_rank pair of shapes {tuple(low.shape)} and {tuple(up.shape)} must be "
                    f"({', '.join(map(str, x.shape[:-1]))}, r) and ({len(weight)}, r)"
                )
            if low.dtype != up.dtype or low.dtype not in (x.dtype, sum_dtype(x.dtype)):
                raise ValueError(f"a low_rank pair is {low.dtype} and {up.dtype}, and x is {x.dtype}; cast it")
            lows.append(rows_first(low, 1))
        return replace(self, lows=lows)

    def saved(self) -> list[Tensor | None]:
        """What the backward needs: `flat` without the biases."""
        return [*self.weights, *[None for _ in self.biases], *self.lows, *self.ups]

    def write(self, index: int, x: Tensor, rows: slice, features: slice, into: Tensor) -> None:
        """The features of one layer at some of the own rows, into (rows, inner, features)."""
        bias, low, up = self.biases[index], self.lows[index], self.ups[index]
        output(x[rows], self.weights[index][features], None if bias is None else bias[features], into)
        if low is not None and up is not None:
            into += (low[rows].flatten(0, 1) @ up[features].t()).view_as(into)


@dataclass
class Gradients:
    """The sums that the backward of a projection makes, in `sum_dtype`; None where none is needed."""

    x: Tensor | None
    linears: list[list[Tensor | None]]
    """Of weights, biases, lows and ups."""

    @classmethod
    def zero(cls, x: Tensor, linears: Linears, needs: tuple[bool, ...]) -> "Gradients":
        """Nothing added yet; `needs` is said for x and for `linears.flat()`."""
        n, weights = len(linears.weights), linears.weights
        shapes = [*weights, *(weight[:, 0] for weight in weights), *linears.lows, *linears.ups]
        zeros = [
            torch.zeros(like.shape, dtype=sum_dtype(like.dtype), device=like.device)
            if need and like is not None
            else None
            for like, need in zip([x, *shapes], needs)
        ]
        return cls(zeros[0], [zeros[1 + i * n : 1 + (i + 1) * n] for i in range(4)])

    def add(self, layout: Layout, peer: int, place: slice, piece: Tensor, x: Tensor, linears: Linears) -> None:
        """Add what the gradient of a peer's head group, at some of the own rows, gives."""
        mine = x[place].flatten(0, 1)
        weights, biases, lows, ups = self.linears
        for i, (features, columns) in enumerate(layout.parts(peer)):
            part = piece[..., columns].flatten(0, 1)
            if self.x is not None:
                self.x[place] += (part @ linears.weights[i][features]).view(len(piece), *x.shape[1:])
            dw, db, dlow, dup = weights[i], biases[i], lows[i], ups[i]
            if dw is not None:
                dw[features] += part.t() @ mine
            if db is not None:
                db[features] += part.sum(0, dtype=db.dtype)
            low, up = linears.lows[i], linears.ups[i]
            if low is None or up is None:
                continue
            if dlow is not None:
                dlow[place] += (part.to(up.dtype) @ up[features]).view_as(low[place])
            if dup is not None:
                dup[features] += part.to(low.dtype).t() @ low[place].flatten(0, 1)

    def rounded(self, x: Tensor, linears: Linears) -> tuple[Tensor | None, ...]:
        """Of x and of `linears.flat()`, in the dtypes of those."""
        likes = [x, *linears.weights, *linears.weights, *linears.lows, *linears.ups]
        totals = [self.x, *(total for kind in self.linears for total in kind)]
        return tuple(
            None if total is None or like is None else total.to(like.dtype) for total, like in zip(totals, likes)
        )


def projection(layout: Layout, rank: int, x: Tensor, linears: Linears, out: Tensor) -> Trade:
    """Own rows' features for every rank against its rows' own features, whose place is `out`.

    Pieces that are made later are of the precision that holds now.
    """
    rows, inner, device = layout.rows, x.shape[1], x.device.type
    precision = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

    def make(peer: int, s: int) -> Tensor:
        mine = rows.local(rank, s)
        made = x.new_empty(rows.size(rank, s), inner, layout.width(peer))
        with torch.autocast(device, *precision, cache_enabled=False):
            for index, (features, columns) in enumerate(layout.parts(peer)):
                linears.write(index, x, mine, features, made[..., columns])
        return made

    return Trade(
        make=make,
        room=lambda peer, s: out[rows.rows(peer, s)],
        sent=lambda peer: (rows.sizes[rank], inner, layout.width(peer)),
        received=lambda peer: (rows.sizes[peer], inner, layout.width(rank)),
        num_subslices=rows.num_subslices,
        device=x.device,
    )


def projection_gradient(layout: Layout, rank: int, grad: Tensor) -> Trade:
    """The gradient of every rank's rows at own features against that of own rows at its features."""
    rows, inner = layout.rows, grad.shape[1]
    return Trade(
        make=lambda peer, s: grad[rows.rows(peer, s)],
        room=lambda peer, s: grad.new_empty(rows.size(rank, s), inner, layout.width(peer)),
        sent=lambda peer: (rows.sizes[peer], inner, layout.width(rank)),
        received=lambda peer: (rows.sizes[rank], inner, layout.width(peer)),
        num_subslices=rows.num_subslices,
        device=grad.device,
        is_scratch=True,
    )
