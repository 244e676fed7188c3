"""The norm of all gradients, as one process has it, of parameters that are spread over ranks in different ways.

DTensors on several meshes and plain tensors may be mixed, which PyTorch's own clipping refuses. The hazard: a plain
gradient counts as whole, so what the data ranks have not yet reduced is the norm of a part. Source: the definition.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["clip_gradients", "gradient_norm"]


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """The Euclidean norm of all gradients together: a float64 scalar, the same on every rank.

    Parameters without a gradient count as zeros. Communicates one number for each way in which parameters are
    spread, over the axes along which they are sharded: every rank of their meshes makes this call, with the
    parameters in one order. Raises ValueError for a gradient whose parts are still to be summed.
    """
    sums: dict[tuple[Any, ...], Tensor] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        local: Tensor = grad
        axes: tuple[Any, ...] = ()
        if isinstance(grad, DTensor):
            if any(placement.is_partial() for placement in grad.placements):
                raise ValueError(f"a gradient is placed {grad.placements}; sum its parts first")
            sharded = [axis for axis, placement in enumerate(grad.placements) if not placement.is_replicate()]
            local, axes = grad.to_local(), tuple(grad.device_mesh.get_group(axis) for axis in sharded)
        square = torch.linalg.vector_norm(local, dtype=torch.float64).square()
        sums[axes] = sums[axes] + square if axes in sums else square
    for axes, total in sums.items():
        for group in axes:
            dist.all_reduce(total, group=group)
    return torch.stack(list(sums.values())).sum().sqrt() if sums else torch.zeros((), dtype=torch.float64)


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients down so that their norm is `max_norm` at most, as `clip_grad_norm_`; the norm before."""
    chosen = list(parameters)
    norm = gradient_norm(chosen)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in chosen:
        if parameter.grad is not None:
            grad: Any = parameter.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            local.mul_(scale.to(local.dtype))
    return norm
