"""The arithmetic of late-bound reduction: what an owner makes of pieces whose worth was unknown when they came.

Every bucket has pieces (num_columns, elements), one row a sender, for each backward that waits. Weighting them is
one matrix-vector product in float32 (float64 for float64). The hazard: a weight that is not the same on every rank
makes shards of different gradients, and nothing here can see it. Source: the late-bound reduction of this library;
two sums as in two-sum reweighting.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future

from torch import Tensor

from stretto.overlap.loops import sum_dtype
from stretto.overlap.streams import Made

__all__ = ["LateBound", "LateSums", "as_rows"]


def as_rows(weights: Tensor, world_size: int) -> Tensor:
    """Weights (world_size,) or (n, world_size) as (n, world_size), or `ValueError`."""
    if weights.ndim not in (1, 2) or weights.shape[-1] != world_size:
        raise ValueError(f"weights of shape {tuple(weights.shape)} must be ({world_size},) or (n, {world_size})")
    return weights.reshape(-1, world_size)


class LateSums:
    """Of every bucket: pieces that wait, running sums of folded ones, and the settled gradient.

    `awaited(future)` gives what a future holds once it is there.
    """

    def __init__(self, num_buckets: int, awaited: Callable[["Future[Made]"], Tensor]) -> None:
        self._awaited = awaited
        self._waiting: list[list[Future[Made]]] = [[] for _ in range(num_buckets)]
        self._settled: list[Tensor | None] = [None] * num_buckets
        self._sums: list[Tensor] = []

    def add(self, index: int, pieces: "Future[Made]") -> None:
        """One bucket's pieces of one more backward wait for their weights; oldest first."""
        self._waiting[index].append(pieces)

    def settle(self, weights: Tensor) -> None:
        """Add the weighted pieces of the oldest backwards that wait; weights (num_backwards, num_columns)."""
        waiting = min(len(pieces) for pieces in self._waiting)
        if waiting < len(weights):
            raise ValueError(f"weights for {len(weights)} backwards, but the pieces of {waiting} are waiting")
        for index, pieces in enumerate(self._waiting):
            for row, future in zip(weights, pieces):
                piece = self._awaited(future)
                kept = piece.to(sum_dtype(piece.dtype))
                self._settle(index, row.to(kept) @ kept)
            del pieces[: len(weights)]

    def fold(self, weights: Tensor) -> None:
        """Add the pieces of the oldest backward that waits to its running sums; weights (num_sums, num_columns)."""
        if not all(self._waiting):
            raise ValueError("nothing is waiting to be folded; end a backward with finish() first")
        if self._sums and len(self._sums[0]) != len(weights):
            raise ValueError(
                f"{len(weights)} sums of something of which {len(self._sums[0])} were begun; combine them first"
            )
        pieces = [self._awaited(waiting.pop(0)) for waiting in self._waiting]
        sums = [weights.to(p.device, sum_dtype(p.dtype)) @ p.to(sum_dtype(p.dtype)) for p in pieces]
        self._sums = [old.add_(new) for old, new in zip(self._sums, sums)] if self._sums else sums

    def combine(self, coefficients: Tensor) -> None:
        """Settle the combination of the running sums, coefficients (num_sums,), and start new ones."""
        if not self._sums:
            raise ValueError("nothing was folded since the last combine")
        if coefficients.shape != (len(self._sums[0]),):
            raise ValueError(f"coefficients of shape {tuple(coefficients.shape)} must be ({len(self._sums[0])},)")
        for index, total in enumerate(self._sums):
            self._settle(index, coefficients.to(total) @ total)
        self._sums = []

    def take(self) -> list[Tensor]:
        """Every bucket's settled gradient, which is then forgotten."""
        taken = [gradient for gradient in self._settled if gradient is not None]
        if len(taken) < len(self._settled):
            raise ValueError("nothing was settled or combined since the last deliver")
        self._settled = [None] * len(taken)
        return taken

    def forget(self) -> None:
        """Drop what waits and what was folded; what was settled stays."""
        self._waiting = [[] for _ in self._waiting]
        self._sums = []

    def _settle(self, index: int, gradient: Tensor) -> None:
        settled = self._settled[index]
        self._settled[index] = gradient if settled is None else settled.add_(gradient)


class LateBound(ABC):
    """A reducer of gradients whose weights are known after they were sent."""

    _late: LateSums

    def settle(self, weight: Tensor) -> None:
        """Give the pieces their weights and add them to the own shards' gradients; nothing is sent.

        Args:
            weight: (world_size,) for one backward, or (num_backwards, world_size) for the oldest that wait: what
                each rank's piece is worth. The same on every rank.

        Waits for pieces that are still on their way. Each own shard is one float32 (float64 for float64)
        matrix-vector product over pieces.
        """
        self._late.settle(self._columns(weight))

    def fold(self, weights: Tensor) -> None:
        """Fold the oldest waiting backward's pieces into running sums, one a row of `weights`, and drop them.

        Args:
            weights: (num_sums, world_size), as many until `combine`. With rows 1 and reward - c the two sums are
                those from which a normalised advantage is formed at the end.
        """
        self._late.fold(self._columns(weights))

    def combine(self, coefficients: Tensor) -> None:
        """Add the combination of the running sums to the own shards' gradients, and start new sums.

        Args:
            coefficients: (num_sums,), for instance (-mean / std, 1 / std).
        """
        self._late.combine(coefficients)

    @abstractmethod
    def _columns(self, weights: Tensor) -> Tensor:
        """The columns (n, num_columns) of weights, (world_size,) or (n, world_size), whose pieces are here."""
