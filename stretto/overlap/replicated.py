"""Parameters that every rank holds whole: norms on own rows or own heads, and whatever no style cuts.

They become replicated DTensors, so that one norm of all gradients is the one-process norm, and one optimizer
and one checkpoint see all of them alike; inside the module's forward they are plain tensors. Where each rank
uses them on its own part of the problem their gradients are summed over the group, one message a module. The
hazard: code that reads such a parameter outside of its module's forward meets a DTensor. Source:
Megatron-LM's sequence parallelism for the sum.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from stretto.overlap.group_sums import with_summed_gradients
from stretto.overlap.inputs import outside_of_graphs
from stretto.overlap.p2p import peers_of
from stretto.overlap.sharding import Sharded, shard_parameters, shard_state

__all__ = ["replicate_parameters"]


def replicate_parameters(
    module: nn.Module,
    mesh: DeviceMesh,
    sharded: Sharded | None = None,
    *,
    summed: bool,
    recurse: bool = True,
    check: bool = True,
) -> None:
    """Make a module's parameters replicated DTensors in place.

    Args:
        module: itself and what is inside it.
        mesh: the ranks; rank 0's values become everyone's.
        sharded: parameters that other modules share.
        summed: sum gradients over the ranks: each uses the parameters on its own rows or heads. Else their
            gradients must be the same on every rank already.
        recurse: those inside of the module too.
        check: announce those sums.
    """
    owners = list(module.modules()) if recurse else [module]
    for owner in owners:
        own: dict[str, Placement] = {name: Replicate() for name, _ in owner.named_parameters(recurse=False)}
        shard_parameters(owner, own, mesh, sharded)
        if own:
            owner.register_load_state_dict_pre_hook(_Loading(own, mesh))
    inside = _Inside(owners, mesh, summed, check)
    module.register_forward_pre_hook(inside.enter)
    module.register_forward_hook(inside.leave, always_call=True)


class _Loading:
    """Before a module loads: whole tensors of a plain checkpoint become replicated DTensors."""

    def __init__(self, placements: dict[str, Placement], mesh: DeviceMesh) -> None:
        self.placements, self.mesh = placements, mesh

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        shard_state(state_dict, prefix, self.placements, self.mesh)


class _Inside:
    """While a module's forward runs its parameters are plain tensors."""

    def __init__(self, owners: list[nn.Module], mesh: DeviceMesh, summed: bool, check: bool) -> None:
        self.owners = [owner for owner in owners if owner._parameters]
        self.mesh, self.summed, self.check = mesh, summed, check
        self._outside: list[dict[str, nn.Parameter | None]] = []

    @outside_of_graphs
    def enter(self, module: nn.Module, args: Any) -> None:
        if self._outside:
            raise RuntimeError(f"{type(module).__name__} was called inside its own forward")
        self._outside = [dict(owner._parameters) for owner in self.owners]
        whole = list(dict.fromkeys(p for owner in self._outside for p in owner.values() if p is not None))
        plain = [p.to_local() for p in whole if isinstance(p, DTensor)]
        if self.summed and plain:
            peers = peers_of(self.mesh.get_group())
            plain = with_summed_gradients(peers, "replicated gradients", plain, check=self.check)
        inside = dict(zip(whole, plain, strict=True))
        for owner, outside in zip(self.owners, self._outside):
            for name, parameter in outside.items():
                if parameter is not None:
                    owner._parameters[name] = inside[parameter]  # type: ignore[assignment]

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        for owner, outside in zip(self.owners, self._outside):
            owner._parameters.update(outside)
        self._outside = []
