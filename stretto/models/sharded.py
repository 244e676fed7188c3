"""FSDP2 over a transformer: every block of it by itself, then what is left, each rank holding a shard of all weights.

A rank gathers a block's weights for its forward and again for its backward, and sends each gradient's shards to their
owners. Gradients are sums over ranks, not averages. The hazard is that ranks run in lockstep: a forward or a backward
that one of them leaves out stops all. Source: torch's `fully_shard`.
"""

import warnings
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

__all__ = ["blocks_of", "shard_transformer"]


def blocks_of(transformer: nn.Module) -> list[nn.Module]:
    """The entries of the transformer's outermost ModuleLists, in order: its blocks."""
    blocks: list[nn.Module] = []
    for child in transformer.children():
        blocks += list(child) if isinstance(child, nn.ModuleList) else blocks_of(child)
    return blocks


def shard_transformer(
    transformer: nn.Module,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> list[FSDPModule]:
    """Shard a transformer in place over a one-dimensional mesh; its parameters become DTensors.

    Call it when what trains is chosen (LoRA attached, `requires_grad` set), and take the parameters afterwards. The
    weights must be the same on every rank.

    Args:
        transformer: trainables in float32 (float64 where all is); frozen weights in any dtype.
        mesh: the ranks that share the weights.
        compute_dtype: what weights are gathered in; gradients are summed in the trainables' dtype. Inputs are not
            cast, so run it under autocast of this dtype. None: each weight's own.
        reshard_after_forward: drop a block's gathered weights after its forward; else they stay until its backward.

    Returns:
        What was wrapped: the blocks in order, then the transformer; without those that have no parameter.

    Raises:
        ValueError: for a mesh of several dimensions (a replicate axis is not FSDP2's business here: its all-reduce
            would run before the advantages are known), and for trainables in 16 bits.
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh = {mesh}: shard over a mesh of one dimension, and reduce over a replicate axis after")
    for name, parameter in transformer.named_parameters():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} trains in {parameter.dtype}, in which its sharded gradient would be lost in a cast; keep "
                "trainables in float32 and compute in 16 bits by compute_dtype"
            )
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=None if compute_dtype is None else torch.float32,
        cast_forward_inputs=False,
    )
    # A FLUX block returns views; what torch warns of is a write into one in place, and no block or adapter does that.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    wrapped: list[FSDPModule] = []
    for module in [*blocks_of(transformer), transformer]:
        if any(True for _ in module.parameters()):
            fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_after_forward)
            wrapped.append(cast(FSDPModule, module))
    for sharded in wrapped:
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo cannot scale as it sums
        sharded.set_reduce_scatter_unused_params(True, recurse=False)
    return wrapped
