"""Plans: which modules of a model become parallel and how, as plain data or beside PyTorch's own styles.

`parallelize` takes name patterns; `OverlapColwise` and `OverlapRowwise` go into
`torch.distributed.tensor.parallel.parallelize_module`. Both work in place. The hazard: a pattern that misses
leaves a layer whole, and the result wrong; so a pattern must match, and nothing may be matched twice.
"""

import difflib
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel.style import ParallelStyle

from stretto.overlap.modules import ColumnLinear, LinearOptions, RowLinear, SharedGather, mesh_of

__all__ = ["OverlapColwise", "OverlapRowwise", "parallelize"]

_STYLES = ("column", "row", "sequence")


def parallelize(
    module: nn.Module,
    plan: Mapping[str, str],
    group: dist.ProcessGroup | DeviceMesh,
    options: LinearOptions | None = None,
) -> nn.Module:
    """Make the linear layers of a model parallel, in place.

    Args:
        module: the model; rank 0's values become everyone's.
        plan: name patterns, each part of which may hold `*`, and what becomes of the modules they match:
            "column" or "row", for `nn.Linear`; "sequence" for a module whose parameters every rank has whole
            and uses on its own rows (norms): their gradients are summed over the group. Names joined by `+`
            in the last part ("layers.*.attn.q+k+v") are column layers with one input, which share one gather.
        group: the ranks, or a one-dimensional mesh of them.
        options: how to communicate.

    Returns:
        The same module. Its state dict has the names of the plain model's and loads full tensors too.

    Raises:
        ValueError: for a pattern that matches nothing (near matches are named), a module that is matched
            twice, or one that is not linear; nothing was changed.
    """
    options = options or LinearOptions()
    matched = match_plan(module, plan)
    if not options.sequence_parallel and "sequence" in plan.values():
        raise ValueError("'sequence' sums gradients of sharded rows; with sequence_parallel=False rows are whole")
    device = next(module.parameters()).device
    mesh = mesh_of(group, device)
    for names, style in matched:
        layers = [module.get_submodule(name) for name in names]
        if style == "sequence":
            for parameter in layers[0].parameters():
                parameter.register_hook(_sum_over(mesh))
            continue
        for layer in layers:
            assert isinstance(layer, nn.Linear)
            (ColumnLinear if style == "column" else RowLinear).adopt(layer, mesh, options)
        if len(layers) > 1:
            shared = SharedGather([layer for layer in layers if isinstance(layer, ColumnLinear)])
            for layer in shared.layers:
                layer.shared = shared
    return module


def match_plan(module: nn.Module, plan: Mapping[str, str]) -> list[tuple[list[str], str]]:
    """The modules that every pattern names, those that share a gather together, and their styles."""
    modules = dict(module.named_modules())
    found: list[tuple[list[str], str]] = []
    taken: dict[str, str] = {}
    for pattern, style in plan.items():
        if style not in _STYLES:
            raise ValueError(f"{pattern!r} asks for {style!r}; the styles are {', '.join(map(repr, _STYLES))}")
        *parents, last = pattern.split(".")
        siblings = last.split("+")
        if len(siblings) > 1 and style != "column":
            raise ValueError(
                f"{pattern!r} joins names by +, which is for column layers with one input, not {style!r}"
            )
        matches = [name for name in modules if _matches(name, [*parents, siblings[0]])]
        if not matches:
            near = difflib.get_close_matches(pattern, [name for name in modules if name], n=3, cutoff=0.3)
            raise ValueError(f"{pattern!r} matches no module; near it are {', '.join(near) or 'none'}")
        for first in matches:
            parent = first.rpartition(".")[0]
            names = [first, *(f"{parent}.{name}".lstrip(".") for name in siblings[1:])]
            for name in names:
                if name not in modules:
                    raise ValueError(f"{pattern!r} names {name!r}, which is no module")
                if name in taken:
                    raise ValueError(f"{name!r} is matched by {taken[name]!r} and again by {pattern!r}")
                if style != "sequence" and type(modules[name]) is not nn.Linear:
                    raise ValueError(f"{name!r} is a {type(modules[name]).__name__}, not an nn.Linear")
                taken[name] = pattern
            found.append((names, style))
    return found


def _matches(name: str, parts: list[str]) -> bool:
    names = name.split(".")
    return len(names) == len(parts) and all(fnmatchcase(one, part) for one, part in zip(names, parts))


def _sum_over(mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    def summed(grad: Tensor) -> Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=mesh.get_group())
        return total

    return summed


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
