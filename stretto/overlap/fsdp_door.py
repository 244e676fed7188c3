"""Where FSDP2 hands a module's gradients over: the object that it calls in place of its own reduce-scatter.

FSDP2 gives all gradients of a module in one vector, cut by owner, after each backward of the module; this object
takes the vector away and leaves zeros, so that the module's `.grad` views a shard of zeros until the reduced one is
put in its place. The hazard is a `.grad` that views something else: FSDP2 casts trainables of another dtype than the
reduction's, and copies under CPU offload, silently; `check` finds both. Source: torch's
`FSDPModule.set_custom_reduce_scatter`; the layout of the vector is read from FSDP2's own record of its parameters,
which is private, and `check` compares it with what FSDP2 does.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from stretto.overlap.buckets import Bucket
from stretto.overlap.routes import Slices

__all__ = ["Door", "doors_of"]


class Door:
    """The reduce-scatter of one FSDP2 module; `take(number, flat)` gets its gradients, (bucket.slices.total,)."""

    def __init__(self, module: FSDPModule, number: int, take: Callable[[int, Tensor], None]) -> None:
        self._module, self._number, self._take = module, number, take
        (self._group,) = _groups(module)
        self._params = [p for p in self._group.fsdp_params if p.sharded_param.requires_grad]
        sizes = [p.padded_sharded_param_size.numel() for p in self._params]
        self._offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self._views: Tensor | None = None
        self._is_checked = True
        self._before = self._group._reduce_scatter_comm
        world_size = self.process_group.size()
        stand_in = torch.empty(0, dtype=self._dtype(), device=self._group.device)
        self.bucket = Bucket([stand_in], Slices((sum(sizes),) * world_size))
        """Its gradients as the vector that is cut by owner."""
        module.set_custom_reduce_scatter(self)  # type: ignore[arg-type]
        module.set_reduce_scatter_unused_params(True, recurse=False)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks among which the module is sharded."""
        group: dist.ProcessGroup = self._group._reduce_scatter_process_group
        return group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """For FSDP2: a buffer, new every time, since it is kept."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """For FSDP2: take the gradients, and leave zeros."""
        assert op == dist.ReduceOp.SUM, op
        assert len(input_tensor) == self.bucket.slices.total, self._group._module_fqn
        self.check()
        output_tensor.zero_()
        if any(p.sharded_param.grad is None for p in self._params):
            self._views = output_tensor
        self._is_checked = False
        self._take(self._number, input_tensor)

    def check(self) -> None:
        """`ValueError` unless the last backward left every `.grad` a view of what FSDP2 was given."""
        if self._is_checked:
            return
        self._is_checked = True
        assert self._views is not None
        for param, offset in zip(self._params, self._offsets):
            grad = param.sharded_param.grad
            local = None if grad is None else grad.to_local()
            if local is not None and local.numel() == 0:
                continue
            place = self._views.data_ptr() + offset * self._views.element_size()
            if local is None or local.dtype != self._views.dtype or local.data_ptr() != place:
                raise ValueError(f"the gradient of {param._param_fqn} is not the reduced one: {self._why(param)}")

    def put(self, shard: Tensor) -> None:
        """Make this rank's reduced shard the parameters' gradients, which view it."""
        self._views = shard
        for param, offset in zip(self._params, self._offsets):
            local = torch.as_strided(shard, param.sharded_size, param.contiguous_sharded_stride, offset)
            param.sharded_param.grad = param.to_sharded_dtensor(local)

    def close(self) -> None:
        """Give the module its own reduce-scatter back."""
        self._module.set_custom_reduce_scatter(self._before)

    def _dtype(self) -> torch.dtype:
        """What gradients are handed over in."""
        policy, own = self._group.mp_policy, self._params[0].sharded_param.dtype
        dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or own
        return dtype

    def _why(self, param: Any) -> str:
        if param.offload_to_cpu:
            return "FSDP2 copied it for CPU offload; leave offload_policy out"
        own = param.sharded_param.dtype
        if own != self.bucket.dtype:
            return (
                f"it trains in {own} and is reduced in {self.bucket.dtype}; keep trainables and reduction in float32"
            )
        return "its .grad was exchanged or set to None before deliver(); leave .grad alone until then"


def doors_of(modules: Sequence[FSDPModule], take: Callable[[int, Tensor], None]) -> list[Door]:
    """A door for every module that has something to train."""
    training = [
        module
        for module in modules
        if any(p.sharded_param.requires_grad for group in _groups(module) for p in group.fsdp_params)
    ]
    return [Door(module, number, take) for number, module in enumerate(training)]


def _groups(module: FSDPModule) -> list[Any]:
    if not isinstance(module, FSDPModule):
        raise ValueError(f"modules must be wrapped by fully_shard, not {type(module).__name__}")
    groups: list[Any] = module._get_fsdp_state()._fsdp_param_groups
    if any(group._is_hsdp for group in groups):
        raise ValueError("FSDP2 would sum over its replicate axis by itself, too early; shard over one dimension")
    return groups
