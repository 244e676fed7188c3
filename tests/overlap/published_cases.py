"""What every rank does in tests of shards: whole tensors from the owners' parts, and back."""

import torch
import torch.distributed as dist

from stretto.overlap import GradientReducer
from tests.overlap.gradient_cases import Model


def whole_and_back(bucket_bytes: int) -> None:
    """Parameters, and moments in float32 of bfloat16 parameters, arrive bit for bit."""
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = Model().to(dtype)
        reducer = GradientReducer(model, dist.group.WORLD, sharded=True, bucket_bytes=bucket_bytes)
        whole = reducer.gather([owned.detach() for owned in reducer.owned])
        for parameter, value in zip(model.parameters(), whole, strict=True):
            assert torch.equal(parameter.float(), value)
        moments = [torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) for p in model.parameters()]
        shards = reducer.shards(moments)
        assert [shard.shape for shard in shards] == [owned.shape for owned in reducer.owned]
        for given, value in zip(moments, reducer.gather(shards), strict=True):
            assert value.dtype == torch.float32
            assert torch.equal(given, value)
        reducer.close()
