"""Parameters as DTensors: sharded or replicated in place, and filled from a plain model's checkpoint.

The hazard is a parameter that two modules share: it must become ONE DTensor, which is what `Sharded` is for.
Source: torch's DTensor.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

from stretto.overlap.rows import as_part_of

__all__ = ["Sharded", "shard_parameters", "shard_state"]

Sharded = dict[nn.Parameter, nn.Parameter]
"""What became of parameters that were met before."""


def shard_parameters(
    module: nn.Module, placements: Mapping[str, Placement], mesh: DeviceMesh, sharded: Sharded | None = None
) -> None:
    """Turn a module's own parameters into DTensors, rank 0's values being everyone's; tied ones stay tied."""
    known = {} if sharded is None else sharded
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter not in known:
            part = distribute_tensor(parameter.detach(), mesh, [placements[name]])
            known[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
        module.register_parameter(name, known[parameter])


def shard_state(
    state_dict: dict[str, Any], prefix: str, placements: Mapping[str, Placement], mesh: DeviceMesh
) -> None:
    """Replace whole tensors in a state dict by this rank's parts of them; DTensors stay."""
    rank, world_size = mesh.get_local_rank(), mesh.size()
    for name, placement in placements.items():
        whole = state_dict.get(prefix + name)
        if not isinstance(whole, Tensor) or isinstance(whole, DTensor):
            continue
        local = whole
        if isinstance(placement, Shard):
            chunks = whole.chunk(world_size, placement.dim)
            local = chunks[rank] if rank < len(chunks) else whole.narrow(placement.dim, 0, 0)
        state_dict[prefix + name] = as_part_of(tuple(whole.shape), local, mesh, placement)
