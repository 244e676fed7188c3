"""The arithmetic of late-bound reduction: what an owner makes of pieces whose worth was unknown when they came.

Every bucket has pieces (world_size, own elements), one row a sender. Weighting them is one matrix-vector product in
float32 (float64 for float64). The hazard: a weight that is not the same on every rank makes shards of different
gradients, and nothing here can see it. Source: the late-bound reduction of this library; two sums as in two-sum
reweighting.
"""

from torch import Tensor

from stretto.overlap.loops import sum_dtype

__all__ = ["LateSums", "as_rows"]


def as_rows(weights: Tensor, world_size: int) -> Tensor:
    """Weights (world_size,) or (n, world_size) as (n, world_size), or `ValueError`."""
    if weights.ndim not in (1, 2) or weights.shape[-1] != world_size:
        raise ValueError(f"weights of shape {tuple(weights.shape)} must be ({world_size},) or (n, {world_size})")
    return weights.reshape(-1, world_size)


class LateSums:
    """Of every bucket: the settled gradient of the own shard, and running sums of folded pieces."""

    def __init__(self, num_buckets: int) -> None:
        self._settled: list[Tensor | None] = [None] * num_buckets
        self._sums: list[Tensor] = []

    def settle(self, index: int, weights: Tensor, pieces: Tensor) -> None:
        """Add the weighted pieces of one bucket and one backward; weights (world_size,)."""
        kept = pieces.to(sum_dtype(pieces.dtype))
        self._add(index, weights.to(kept) @ kept)

    def expect_sums(self, num_sums: int) -> None:
        """`ValueError` if sums were begun and they are not so many."""
        if self._sums and len(self._sums[0]) != num_sums:
            raise ValueError(
                f"{num_sums} sums of something of which {len(self._sums[0])} were begun; combine them first"
            )

    def fold(self, weights: Tensor, pieces: list[Tensor]) -> None:
        """Add every bucket's pieces to its running sums; weights (num_sums, world_size)."""
        sums = [weights.to(p.device, sum_dtype(p.dtype)) @ p.to(sum_dtype(p.dtype)) for p in pieces]
        self._sums = [old + new for old, new in zip(self._sums, sums)] if self._sums else sums

    def combine(self, coefficients: Tensor) -> None:
        """Settle the combination of the running sums, coefficients (num_sums,), and start new ones."""
        if not self._sums:
            raise ValueError("nothing was folded since the last combine")
        if coefficients.shape != (len(self._sums[0]),):
            raise ValueError(f"coefficients of shape {tuple(coefficients.shape)} must be ({len(self._sums[0])},)")
        for index, total in enumerate(self._sums):
            self._add(index, coefficients.to(total) @ total)
        self._sums = []

    def take(self) -> list[Tensor]:
        """Every bucket's settled gradient, which is then forgotten."""
        taken = [gradient for gradient in self._settled if gradient is not None]
        if len(taken) < len(self._settled):
            raise ValueError("nothing was settled or combined since the last deliver")
        self._settled = [None] * len(taken)
        return taken

    def _add(self, index: int, gradient: Tensor) -> None:
        settled = self._settled[index]
        self._settled[index] = gradient if settled is None else settled + gradient
