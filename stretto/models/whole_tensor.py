"""A parameter as one process would hold it, whatever ranks it is spread over."""

from typing import Any

from torch import Tensor

__all__ = ["whole_tensor"]


def whole_tensor(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor on the CPU, contiguous; of a DTensor all ranks of its mesh ask together."""
    sharded: Any = tensor.detach()
    whole: Tensor = sharded.full_tensor() if hasattr(sharded, "full_tensor") else sharded
    return whole.cpu().contiguous()
