"""Activations sharded by rows, and the whole shape that some code asks them for.

Inside a parallel model an activation is a plain tensor of own rows. Code that reads its shape, to make masks,
positions or views, gets it announced: as a DTensor whose shape is that of all rows. The hazard: rows must be
cut as `torch.chunk` cuts them, which is how row layers leave them. Source: torch's DTensor.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from stretto.overlap.faults import Header
from stretto.overlap.inputs import outside_of_graphs
from stretto.overlap.p2p import peers_of
from stretto.overlap.routes import slice_sizes
from stretto.overlap.row_sizes import exchange_sizes

__all__ = ["AnnouncedOutput", "OwnRowsInput", "announce", "as_part_of", "count_all", "own_part"]


def as_part_of(shape: tuple[int, ...], local: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """`local` as this rank's part of a tensor of `shape`; differentiable, nothing is sent."""
    stride = torch.empty(shape, device="meta").stride()
    part = DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride)
    assert isinstance(part, DTensor)
    return part


def announce(x: Tensor, mesh: DeviceMesh, *, uneven: bool) -> DTensor:
    """Own rows (..., own rows, K) as a DTensor of all rows (..., all rows, K); nothing is sent but their number.

    With `uneven` rows every rank is asked how many it has; else all are taken to have as many as here.
    """
    if isinstance(x, DTensor):
        return x
    rows = count_all(x, mesh, -2, uneven=uneven)
    return as_part_of((*x.shape[:-2], rows, x.shape[-1]), x, mesh, Shard(x.ndim - 2))


def count_all(x: Tensor, mesh: DeviceMesh, dim: int, *, uneven: bool) -> int:
    """The sum over ranks of the sizes of x along `dim`.

    `ValueError` on every rank if they are not as `torch.chunk` cuts the sum.
    """
    own, world_size = x.shape[dim], mesh.size()
    if not uneven or world_size == 1:
        return own * world_size
    peers = peers_of(mesh.get_group())
    with peers.call("sizes") as call:
        rest = tuple(size for axis, size in enumerate(x.shape) if axis != dim % x.ndim)
        header = Header("sizes", call.number, "sizes", 0, (own, *rest), x.dtype, 1, "direct", ())
        sizes = exchange_sizes(call, header, x.device)
    if sizes != slice_sizes(sum(sizes), world_size):
        expected = slice_sizes(sum(sizes), world_size)
        raise ValueError(f"the ranks have {sizes} of {sum(sizes)} rows; cut them as torch.chunk does: {expected}")
    return sum(sizes)


def own_part(x: Any) -> Any:
    """The plain rows of an announced tensor; anything else as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


class AnnouncedOutput:
    """After a module's forward: its own rows are announced with the shape of all rows."""

    def __init__(self, mesh: DeviceMesh, uneven: bool) -> None:
        self.mesh, self.uneven = mesh, uneven

    @outside_of_graphs
    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        """A forward hook."""
        return announce(output, self.mesh, uneven=self.uneven) if isinstance(output, Tensor) else output


class OwnRowsInput:
    """Before a module's forward: announced rows become the plain rows that they are here."""

    @outside_of_graphs
    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A forward pre-hook with keywords."""
        return tuple(map(own_part, args)), {name: own_part(given) for name, given in kwargs.items()}
