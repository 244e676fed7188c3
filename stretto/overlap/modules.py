"""Parallel linear layers: `nn.Linear` with a sharded weight.

Same names, same state dict as the plain layer; the weights are DTensors on the group's mesh. The hazard:
features are cut as `torch.chunk` cuts them, heads or not; and so are rows between a row layer and the next
column layer. Source: Megatron-LM's sequence parallelism for the layout.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from stretto.overlap.all_reduce import matmul_all_reduce, replicate_matmul
from stretto.overlap.matmul import all_gather_matmul, matmul_reduce_scatter
from stretto.overlap.routes import Schedule

__all__ = ["ColumnLinear", "LinearOptions", "RowLinear", "SharedGather", "mesh_of"]


@dataclass(frozen=True)
class LinearOptions:
    """How parallel layers communicate; the same for all layers of a plan."""

    sequence_parallel: bool = True
    """Activations outside of a column-row pair are sharded by rows; else every rank has them whole."""
    uneven: bool = False
    """Rows may differ from rank to rank (as `torch.chunk` cuts them): ask before each gather."""
    schedule: Schedule = "direct"
    num_subslices: int = 1
    keep_gathered: bool = False
    """Column layers keep their gathered input for the backward."""
    check: bool = True

    def of_call(self) -> dict[str, Any]:
        """The arguments that all operations share."""
        return {"schedule": self.schedule, "num_subslices": self.num_subslices, "check": self.check}


class _ParallelLinear(nn.Linear):
    """A linear layer whose parameters are DTensors; loads full tensors and its own shards alike."""

    mesh: DeviceMesh
    options: LinearOptions
    placements: ClassVar[dict[str, Placement]]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: dist.ProcessGroup | DeviceMesh,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        options: LinearOptions | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._shard(mesh_of(group, self.weight.device), options or LinearOptions())

    @classmethod
    def adopt(cls, linear: nn.Linear, mesh: DeviceMesh, options: LinearOptions) -> None:
        """Turn a linear layer into a parallel one in place; rank 0's values are everyone's."""
        linear.__class__ = cls
        assert isinstance(linear, _ParallelLinear)
        linear._shard(mesh, options)

    def extra_repr(self) -> str:
        """As of nn.Linear, and over how many ranks."""
        return f"{super().extra_repr()}, ranks={self.mesh.size()}"

    def _shard(self, mesh: DeviceMesh, options: LinearOptions) -> None:
        self.mesh, self.options = mesh, options
        for name, parameter in list(self.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter.detach(), mesh, [self.placements[name]])
            self.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        rank, size = self.mesh.get_local_rank(), self.mesh.size()
        for name, placement in self.placements.items():
            whole = state_dict.get(prefix + name)
            if isinstance(whole, Tensor) and not isinstance(whole, DTensor):
                local = whole
                if isinstance(placement, Shard):
                    chunks = whole.chunk(size, placement.dim)
                    local = chunks[rank] if rank < len(chunks) else whole.narrow(placement.dim, 0, 0)
                state_dict[prefix + name] = DTensor.from_local(
                    local, self.mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
                )
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _local(self) -> tuple[Tensor, Tensor | None]:
        assert isinstance(self.weight, DTensor)
        bias = self.bias
        return self.weight.to_local(), bias.to_local() if isinstance(bias, DTensor) else None


class ColumnLinear(_ParallelLinear):
    """A linear layer with some output features a rank: rows are gathered while it multiplies.

    Shapes:
        x (..., own rows, in_features) -> (..., all rows, own features) with sequence parallelism;
        x (..., rows, in_features), the same on every rank -> (..., rows, own features) without.

    weight: (out_features, in_features), DTensor, Shard(0). bias: (out_features,), DTensor, Shard(0).
    Gradients, communication and errors: as `all_gather_matmul`, or `replicate_matmul`. x may be a DTensor
    that is sharded by rows.
    """

    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(0), "bias": Shard(0)}
    shared: "SharedGather | None" = None

    def forward(self, input: Tensor) -> Tensor:
        """One gather, alone or with the layers that share it."""
        if self.shared is not None:
            return self.shared.output(self, input)
        return _column_outputs([self], input)[0]


class RowLinear(_ParallelLinear):
    """A linear layer with some input features on each rank: partial sums leave while it multiplies.

    Shapes:
        x (..., all rows, own features) -> (..., own rows, out_features) with sequence parallelism;
        x (..., rows, own features) -> (..., rows, out_features), the same on every rank, without.

    weight: (out_features, in_features), DTensor, Shard(1). bias: (out_features,), DTensor, Replicate; added
        once.
    Gradients, communication and errors: as `matmul_reduce_scatter`, or `matmul_all_reduce`.
    """

    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(1), "bias": Replicate()}

    def forward(self, input: Tensor) -> Tensor:
        """One reduce-scatter, or one all-reduce."""
        weight, bias = self._local()
        group, options = self.mesh.get_group(), self.options
        if not options.sequence_parallel:
            return matmul_all_reduce(input, weight, group, biases=bias, **options.of_call())
        return matmul_reduce_scatter(input, weight, group, dim=-2, biases=bias, **options.of_call())


class SharedGather:
    """Column layers with one input: the first that is called multiplies for all, the others take theirs."""

    def __init__(self, layers: list[ColumnLinear]) -> None:
        self.layers = layers
        self._key: tuple[Tensor, bool] | None = None
        self._outputs: dict[int, Tensor] = {}

    def output(self, layer: ColumnLinear, x: Tensor) -> Tensor:
        """`layer`'s output for x; kept from a sibling's call if x is the very same tensor."""
        held = self._key is not None and self._key[0] is x and self._key[1] == torch.is_grad_enabled()
        if not held or id(layer) not in self._outputs:
            outputs = _column_outputs(self.layers, x)
            self._key = (x, torch.is_grad_enabled())
            self._outputs = {id(one): out for one, out in zip(self.layers, outputs)}
        found = self._outputs.pop(id(layer))
        if not self._outputs:
            self._key = None
        return found


def _column_outputs(layers: list[ColumnLinear], x: Tensor) -> list[Tensor]:
    x = _local_rows(x)
    weights, biases = zip(*(layer._local() for layer in layers))
    group, options = layers[0].mesh.get_group(), layers[0].options
    if not options.sequence_parallel:
        return replicate_matmul(x, weights, group, biases=biases, **options.of_call())
    return all_gather_matmul(
        x,
        weights,
        group,
        dim=-2,
        biases=biases,
        sizes="exchange" if options.uneven else None,
        keep_gathered=options.keep_gathered,
        **options.of_call(),
    )


def _local_rows(x: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        return x
    if tuple(x.placements) != (Shard(x.ndim - 2),):
        rows = x.ndim - 2
        raise ValueError(f"x is a DTensor placed {x.placements}; a column layer takes Shard({rows}), its rows")
    return x.to_local()


def mesh_of(group: dist.ProcessGroup | DeviceMesh, device: torch.device) -> DeviceMesh:
    """The one-dimensional mesh of a group."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"the mesh has {group.ndim} axes; pass one of them, mesh['name']")
        return group
    return DeviceMesh.from_group(group, "cpu" if device.type == "meta" else device.type)
