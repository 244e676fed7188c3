"""Parallel linear layers: `nn.Linear` with a sharded weight.

Same names, same state dict as the plain layer; the weights are DTensors on the group's mesh. The hazard:
features are cut as `torch.chunk` cuts them, heads or not; and so are rows between a row layer and the next
column layer. Source: Megatron-LM's sequence parallelism for the layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from stretto.overlap.all_reduce import matmul_all_reduce, matmul_all_reduce_start, replicate_matmul
from stretto.overlap.follower import Follower
from stretto.overlap.inputs import Sizes, check_schedule, outside_of_graphs
from stretto.overlap.matmul import all_gather_matmul, matmul_reduce_scatter
from stretto.overlap.p2p import peers_of
from stretto.overlap.packed import PackedColumns, packed_columns
from stretto.overlap.routes import Asked, slice_sizes
from stretto.overlap.row_counts import Rows
from stretto.overlap.sharding import Sharded, shard_parameters, shard_state
from stretto.overlap.shared_rows import SharedRows, shared_rows

__all__ = ["ColumnLinear", "LinearOptions", "ParallelLinear", "RowLinear", "SharedInput", "mesh_of"]


@dataclass(frozen=True)
class LinearOptions:
    """How parallel layers communicate; the same for all layers of a plan."""

    sequence_parallel: bool = True
    """Activations outside of a column-row pair are sharded by rows; else every rank has them whole."""
    uneven: bool = False
    """Rows may differ from rank to rank (as `torch.chunk` cuts them): ask before each gather."""
    schedule: Asked = "auto"
    """"auto": each shape is measured once, forward and backward, and the law decides."""
    num_subslices: int = 1
    """Pieces a slice is cut in; of no account with "auto"."""
    keep_gathered: bool = False
    """Column layers keep their gathered input for the backward."""
    check: bool = True

    def __post_init__(self) -> None:
        check_schedule(self.schedule, self.num_subslices)

    def of_call(self, layers: "Sequence[ParallelLinear]") -> dict[str, Any]:
        """The arguments that all operations share; what is measured is kept by the sizes of the whole layers."""
        tuned_as = " + ".join(f"{layer.out_features} x {layer.in_features}" for layer in layers)
        options = {"schedule": self.schedule, "num_subslices": self.num_subslices, "check": self.check}
        return {**options, "tuned_as": tuned_as}


class ParallelLinear(nn.Linear):
    """A linear layer whose parameters are DTensors; loads full tensors and its own shards alike."""

    mesh: DeviceMesh
    options: LinearOptions
    placements: ClassVar[dict[str, Placement]]
    used_rows: SharedRows | None = None
    """Rows that this rank's heads use, where they are not those of its shard."""
    used_columns: PackedColumns | None = None
    """Columns that this rank's input features need, where they are not those of its shard."""
    rows: Rows | None = None
    """The rows of every rank, where they are known without asking, or are not as `torch.chunk` cuts their sum."""
    shared: "SharedInput | None" = None
    leads: ClassVar[bool] = True
    """Whether a call of this layer computes for those that share its input."""

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
    def adopt(
        cls, linear: nn.Linear, mesh: DeviceMesh, options: LinearOptions, sharded: Sharded | None = None
    ) -> None:
        """Turn a linear layer into a parallel one in place; rank 0's values are everyone's."""
        linear.__class__ = cls
        assert isinstance(linear, ParallelLinear)
        linear._shard(mesh, options, sharded)

    def forward(self, input: Tensor) -> Tensor:
        """One communication, alone or with the layers that share the input."""
        if self.shared is not None:
            return self.shared.output(self, input)
        return self.together([self], input)[0]

    @staticmethod
    def together(layers: Sequence["ParallelLinear"], x: Tensor) -> list[Tensor]:
        """The outputs of several layers of one kind for one input, in one communication."""
        raise NotImplementedError

    def joins(self) -> bool:
        """Whether this layer is about to be called with its siblings' input."""
        return True

    def extra_repr(self) -> str:
        """As of nn.Linear, and over how many ranks."""
        return f"{super().extra_repr()}, ranks={self.mesh.size()}"

    def _shard(self, mesh: DeviceMesh, options: LinearOptions, sharded: Sharded | None = None) -> None:
        self.mesh, self.options = mesh, options
        shard_parameters(self, self.placements, mesh, sharded)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        shard_state(state_dict, prefix, self.placements, self.mesh)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _local(self) -> tuple[Tensor, Tensor | None]:
        assert isinstance(self.weight, DTensor)
        weight, bias = self.weight.to_local(), self.bias.to_local() if isinstance(self.bias, DTensor) else None
        if self.used_rows is None and self.used_columns is None:
            return weight, bias
        peers, check = peers_of(self.mesh.get_group()), self.options.check
        if self.used_rows is None:
            assert self.used_columns is not None
            return packed_columns(weight, self.used_columns, peers, check=check), bias
        if bias is not None:
            bias = shared_rows(bias, self.used_rows, peers, check=check)
        return shared_rows(weight, self.used_rows, peers, check=check), bias


class ColumnLinear(ParallelLinear):
    """A linear layer with some output features a rank: rows are gathered while it multiplies.

    Shapes:
        x (..., own rows, in_features) -> (..., all rows, own features) with sequence parallelism;
        x (..., rows, in_features), the same on every rank -> (..., rows, own features) without.

    weight: (out_features, in_features), DTensor, Shard(0). bias: (out_features,), DTensor, Shard(0).
    Gradients, communication and errors: as `all_gather_matmul`, or `replicate_matmul`. x may be a DTensor:
    sharded by rows, whose numbers are then known without asking; or replicated, with all rows on every rank.
    """

    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(0), "bias": Shard(0)}

    @staticmethod
    def together(layers: Sequence[ParallelLinear], x: Tensor) -> list[Tensor]:
        """One gather feeds all, or none where every rank has all rows."""
        x, weights, biases = _of_one_dtype(x, layers)
        mesh, options, rows = layers[0].mesh, layers[0].options, layers[0].rows
        sizes: Sizes = "exchange" if options.uneven else None
        if isinstance(x, DTensor):
            if tuple(x.placements) == (Replicate(),):
                whole = x.to_local()
                return replicate_matmul(whole, weights, mesh.get_group(), biases=biases, **options.of_call(layers))
            x, sizes = _announced_rows(x, mesh)
        elif not options.sequence_parallel:
            return replicate_matmul(x, weights, mesh.get_group(), biases=biases, **options.of_call(layers))
        return all_gather_matmul(
            x,
            weights,
            mesh.get_group(),
            dim=-2,
            biases=biases,
            sizes=sizes if rows is None else rows.sizes(mesh.size()),
            keep_gathered=options.keep_gathered,
            **options.of_call(layers),
        )


class RowLinear(ParallelLinear):
    """A linear layer with some input features on each rank: partial sums leave while it multiplies.

    Shapes:
        x (..., all rows, own features) -> (..., own rows, out_features) with sequence parallelism;
        x (..., rows, own features) -> (..., rows, out_features), the same on every rank, without.

    weight: (out_features, in_features), DTensor, Shard(1). bias: (out_features,), DTensor, Replicate; added
        once.
    Gradients, communication and errors: as `matmul_reduce_scatter`, or `matmul_all_reduce`.
    """

    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(1), "bias": Replicate()}
    follower: Follower | None = None
    """Behind whose forward the last half of the all-reduce hides; else it is waited for at once."""

    @staticmethod
    def together(layers: Sequence[ParallelLinear], x: Tensor) -> list[Tensor]:
        """One reduce-scatter, or one all-reduce, whose last half only a layer alone leaves to a follower."""
        x, weights, biases = _of_one_dtype(x, layers)
        first = layers[0]
        group, options = first.mesh.get_group(), first.options
        if options.sequence_parallel:
            sizes = None if first.rows is None else first.rows.sizes(first.mesh.size())
            return matmul_reduce_scatter(
                x, weights, group, dim=-2, biases=biases, sizes=sizes, **options.of_call(layers)
            )
        if len(layers) > 1 or not isinstance(first, RowLinear) or first.follower is None:
            return matmul_all_reduce(x, weights, group, biases=biases, **options.of_call(layers))
        pending = matmul_all_reduce_start(x, weights[0], group, biases=biases[0], **options.of_call(layers))
        return [first.follower.behind(pending)]


def _of_one_dtype(
    x: Tensor, layers: Sequence[ParallelLinear]
) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor | None]]:
    """x, and the layers' own weights and biases: under autocast in its dtype, as `nn.Linear` computes."""
    weights, biases = zip(*(layer._local() for layer in layers))
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x, weights, biases
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), [w.to(dtype) for w in weights], [None if b is None else b.to(dtype) for b in biases]


class SharedInput:
    """Layers of one kind with one input: the first that is called multiplies for all, the others take theirs."""

    def __init__(self, layers: Sequence[ParallelLinear]) -> None:
        self.layers = list(layers)
        self._key: tuple[Tensor, tuple[object, ...]] | None = None
        self._outputs: dict[int, Tensor] = {}

    @outside_of_graphs
    def output(self, layer: ParallelLinear, x: Tensor) -> Tensor:
        """`layer`'s output for x; kept from a sibling's call if x and parameters are the same, unchanged.

        Not compiled: whether a tensor is the same and unchanged is no operation of a graph.
        """
        parameters = (p for one in self.layers for p in one.parameters(recurse=False))
        state = (torch.is_grad_enabled(), _version(x), *((id(p), _version(p)) for p in parameters))
        held = self._key is not None and self._key[0] is x and self._key[1] == state
        if not held or id(layer) not in self._outputs:
            if not layer.leads:
                return layer.together([layer], x)[0]
            layers = [one for one in self.layers if one.joins()]
            self._key = (x, state)
            self._outputs = {id(one): out for one, out in zip(layers, layer.together(layers, x))}
        found = self._outputs.pop(id(layer))
        if not self._outputs:
            self._key = None
        return found


def _version(tensor: Tensor) -> int:
    """How often it was changed in place; of a DTensor itself or its local part."""
    with torch.no_grad():
        both = {tensor, tensor.to_local()} if isinstance(tensor, DTensor) else {tensor}
    return sum(one._version for one in both if not one.is_inference())


def _announced_rows(x: DTensor, mesh: DeviceMesh) -> tuple[Tensor, list[int]]:
    """The own rows of x and the number of every rank's."""
    dim = x.ndim - 2
    if tuple(x.placements) != (Shard(dim),):
        raise ValueError(f"x is a DTensor placed {x.placements}; a column layer takes Shard({dim}), its rows")
    return x.to_local(), slice_sizes(x.shape[dim], mesh.size())


def mesh_of(group: dist.ProcessGroup | DeviceMesh, device: torch.device) -> DeviceMesh:
    """The one-dimensional mesh of a group."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"the mesh has {group.ndim} axes; pass one of them, mesh['name']")
        return group
    peers_of(group)  # refuses what is no group, or not this rank's
    if device.type != "meta":
        return DeviceMesh.from_group(group, device.type)
    return DeviceMesh.from_group(group, "cuda" if "nccl" in dist.get_backend(group) else "cpu")
