"""Parallel layers whose communication leaves no tail: it hides behind the products on either side of it."""

from stretto.overlap.faults import PeerError
from stretto.overlap.matmul import (
    Pending,
    all_gather_matmul,
    matmul_all_reduce,
    matmul_all_reduce_start,
    matmul_reduce_scatter,
    replicate_matmul,
)

__all__ = [
    "PeerError",
    "Pending",
    "all_gather_matmul",
    "matmul_all_reduce",
    "matmul_all_reduce_start",
    "matmul_reduce_scatter",
    "replicate_matmul",
]
