"""RMS norm over features that are sharded: one number a row is summed over the ranks.

For norms of queries and keys across all heads, behind column layers or a `matmul_all_to_all`. The hazard: the sum is
waited for before and after; it is one number a row, so what it costs is latency. Source: RMSNorm (arXiv 1910.07467).
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from stretto.overlap.group_sums import sum_over_ranks
from stretto.overlap.inputs import outside_of_graphs
from stretto.overlap.loops import sum_dtype
from stretto.overlap.p2p import Peers, peers_of
from stretto.overlap.sharding import Sharded, shard_parameters, shard_state

__all__ = ["FeaturesRMSNorm", "features_rms_norms"]


@outside_of_graphs
def features_rms_norms(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    group: dist.ProcessGroup,
    *,
    eps: Sequence[float | None],
    num_features: int,
    check: bool = True,
) -> list[Tensor]:
    """Several RMS norms over the last dimension, of which each rank has some, by one all-reduce.

    Args:
        xs: each (..., own features of it), alike in shape but for the last dimension, and of one dtype.
        weights: each (own features,), or None.
        group: every rank of it makes this call.
        eps: of each norm; None: that of xs' dtype.
        num_features: of all ranks together.
        check: announce the sums.

    Returns:
        Each of its x's shape and dtype.

    Communication: one float32 (float64 for float64) number a row and norm, forward and backward.
    Gradients: xs and weights, of own features; nothing else is sent.
    """
    wide = [x.to(sum_dtype(x.dtype)) for x in xs]
    squares = torch.stack([one.square().sum(-1, keepdim=True) for one in wide])
    totals: Tensor = _SumOverRanks.apply(squares, peers_of(group), check)
    normed = []
    for x, one, total, weight, small in zip(xs, wide, totals, weights, eps):
        small = torch.finfo(x.dtype).eps if small is None else small
        y = one * torch.rsqrt(total / num_features + small)
        normed.append((y if weight is None else y * weight).to(x.dtype))
    return normed


class FeaturesRMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` over the last dimension, of which each rank has some.

    Shapes:
        x (..., own features) -> (..., own features), in x's dtype; the mean of squares is over all features.

    weight: (features,), DTensor, Shard(0).
    Communication: an all-reduce of one float32 (float64 for float64) number a row, forward and backward.
    Gradients: x and weight, of own features; nothing else is sent.
    """

    mesh: DeviceMesh
    check: bool
    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(0)}

    @classmethod
    def adopt(cls, norm: nn.RMSNorm, mesh: DeviceMesh, sharded: Sharded | None = None, *, check: bool = True) -> None:
        """Turn a norm into a parallel one in place; rank 0's weight is everyone's."""
        norm.__class__ = cls
        assert isinstance(norm, FeaturesRMSNorm)
        norm.mesh, norm.check = mesh, check
        shard_parameters(norm, cls.placements, mesh, sharded)

    @outside_of_graphs
    def forward(self, x: Tensor) -> Tensor:
        """One all-reduce, then own features alone."""
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else None
        group, num_features = self.mesh.get_group(), self.normalized_shape[0]
        how: dict[str, Any] = {"eps": [self.eps], "num_features": num_features, "check": self.check}
        return features_rms_norms([x], [weight], group, **how)[0]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        shard_state(state_dict, prefix, self.placements, self.mesh)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class _SumOverRanks(torch.autograd.Function):
    """A sum over ranks that every rank uses for its own features: the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, check: bool) -> Tensor:
        ctx.peers, ctx.check = peers, check
        return sum_over_ranks(peers, "features_rms_norms", x, check=check)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return sum_over_ranks(ctx.peers, "features_rms_norms backward", grads[0], check=ctx.check), None, None
