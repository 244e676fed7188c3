"""Column and row layers beside PyTorch's own styles, for `parallelize_module`.

The hazard: these adopt one layer each; what a plan of `parallelize` does for whole heads, norms and shared
inputs stays to be done. Source: the styles of `torch.distributed.tensor.parallel`.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel.style import ParallelStyle

from stretto.overlap.modules import ColumnLinear, LinearOptions, RowLinear

__all__ = ["OverlapColwise", "OverlapRowwise"]


class OverlapColwise(ParallelStyle):
    """`ColwiseParallel` with sequence-sharded input, hidden: `ColumnLinear` in `parallelize_module`.

    Takes rows sharded over the mesh, as a tensor or a DTensor, and gives own features of all rows, as a
    tensor.
    """

    def __init__(self, options: LinearOptions | None = None) -> None:
        super().__init__()
        self.options = options or LinearOptions()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ColumnLinear.adopt(_linear(module), device_mesh, self.options)
        return module


class OverlapRowwise(ParallelStyle):
    """`RowwiseParallel` with sequence-sharded output, hidden: `RowLinear` in `parallelize_module`.

    Takes own features of all rows, as a tensor, and gives own rows, as a tensor.
    """

    def __init__(self, options: LinearOptions | None = None) -> None:
        super().__init__()
        self.options = options or LinearOptions()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        RowLinear.adopt(_linear(module), device_mesh, self.options)
        return module


def _linear(module: nn.Module) -> nn.Linear:
    if type(module) is not nn.Linear:
        raise ValueError(f"this style is for nn.Linear, not {type(module).__name__}")
    return module
