"""Tensor parallelism of the transformers: attention and feed-forward cut over a few ranks by the shipped plans.

Every rank is given whole latents and gets the whole velocity; each parameter's gradient is complete for the piece
that the rank holds, and equal on every rank where it holds all of it. With sharded rows tokens are sharded
between the products too, which shrinks activations as well. The hazard is the order: what trains first (LoRA, or
all in float32), then this, then FSDP2 over another axis of the same mesh. Source: Megatron-LM; the plans of
`overlap`.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from stretto.models.base import Adapter
from stretto.overlap import FLUX, FLUX_TP, WAN, WAN_I2V, WAN_I2V_TP, WAN_TP, LinearOptions, parallelize

__all__ = ["split_layers"]


def split_layers(
    model: Adapter | nn.Module, mesh: DeviceMesh, *, shard_rows: bool = True, schedule: str = "auto"
) -> nn.Module:
    """Split the attention and feed-forward layers of an adapter's transformer over ranks, in place.

    Args:
        model: an adapter (its transformer is meant), or a FLUX or Wan transformer; plain or with peft's LoRA.
        mesh: the ranks, one axis. Rank 0's values become everyone's; one rank leaves the model as it is.
        shard_rows: shard tokens too, between the products; counts may be uneven. Otherwise every rank has all.
        schedule: how products and messages are interleaved, as in `overlap.LinearOptions`.

    Returns:
        The transformer. Every parameter is a DTensor on the mesh, under the plain model's names.

    Communication:
        With sharded rows a gather before each group of column layers and a scatter after each row layer, hidden
        behind their products, one gather of the velocity, and in the backward the same transposed and a sum of
        each modulation's gradient. Otherwise an all-reduce after each row layer, and in the backward before it.

    Raises:
        ValueError: a transformer that no plan is for; heads that the ranks do not divide; one that is split already.
    """
    transformer: Any = model if isinstance(model, nn.Module) else model.transformer
    plan = _plan(transformer, shard_rows)
    heads, num_ranks = transformer.config.num_attention_heads, mesh.size()
    if heads % num_ranks:
        divisors = ", ".join(str(n) for n in range(1, min(heads + 1, num_ranks)) if heads % n == 0)
        raise ValueError(
            f"num_heads={heads} cannot be split over {num_ranks} ranks; "
            f"set parallel.tensor to a divisor of {heads} ({divisors})"
        )
    if any(isinstance(parameter, DTensor) for parameter in transformer.parameters()):
        raise ValueError(
            "its layers are split already, or sharded by FSDP2; split a transformer once, and before FSDP2"
        )
    if num_ranks == 1:
        return transformer
    options = LinearOptions(sequence_parallel=shard_rows, schedule=schedule)  # type: ignore[arg-type]
    return parallelize(transformer, plan, mesh, options)


def _plan(transformer: Any, shard_rows: bool) -> Mapping[str, str]:
    """The shipped plan for a transformer of diffusers, by its class's name."""
    names = [cls.__name__ for cls in type(transformer).__mro__]
    if "FluxTransformer2DModel" in names:
        return FLUX if shard_rows else FLUX_TP
    if "WanTransformer3DModel" not in names:
        raise ValueError(f"no plan splits the layers of a {names[0]}; set parallel.tensor to 1, or write a plan")
    if transformer.config.added_kv_proj_dim is not None:
        return WAN_I2V if shard_rows else WAN_I2V_TP
    return WAN if shard_rows else WAN_TP
