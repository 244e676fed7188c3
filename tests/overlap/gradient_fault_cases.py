"""What every rank does in tests of data parallelism that is used wrongly, fails or ends early."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from stretto.overlap import GradientReducer, PeerError, parallelize
from stretto.overlap.buckets import Pieces
from stretto.overlap.sliced import SlicedWeight
from tests.overlap.gradient_cases import compare, losses, models
from tests.overlap.matmul_cases import Draw


def misuse() -> None:
    """What is asked in the wrong order is refused on the spot."""
    mine, _ = models()
    n, group = dist.get_world_size(), dist.group.WORLD
    loss = losses(mine, torch.ones(1, 4, 3, dtype=torch.float64)).sum()
    reducer = GradientReducer(mine, group)
    with pytest.raises(ValueError, match="late_bound=True"):
        reducer.settle(torch.ones(n))
    with pytest.raises(ValueError, match="late_bound=True"):
        reducer.fold(torch.ones(1, n))
    with pytest.raises(ValueError, match="late_bound=True"):
        reducer.finish(aside="other")
    with pytest.raises(ValueError, match="sharded=True"):
        reducer.publish()
    reducer.close()
    reducer.close()
    reducer = GradientReducer(mine, group, late_bound=True)
    with pytest.raises(ValueError, match="weights for 1 backwards, but the pieces of"):
        reducer.settle(torch.ones(n))
    with pytest.raises(ValueError, match="nothing was folded"):
        reducer.combine(torch.ones(2))
    with pytest.raises(ValueError, match="nothing was settled"):
        reducer.deliver()
    loss.backward()
    reducer.finish()
    with pytest.raises(ValueError, match="weights for 2 backwards"):
        reducer.settle(torch.ones(2, n))
    with pytest.raises(ValueError, match=rf"weights of shape \({n + 1},\) must be \({n},\) or \(n, {n}\)"):
        reducer.settle(torch.ones(n + 1))
    reducer.fold(torch.ones(2, n))
    losses(mine, torch.ones(1, 4, 3, dtype=torch.float64)).sum().backward()
    reducer.finish()
    with pytest.raises(ValueError, match="1 sums of something of which 2 were begun"):
        reducer.fold(torch.ones(1, n))
    with pytest.raises(ValueError, match=r"coefficients of shape \(3,\) must be \(2,\)"):
        reducer.combine(torch.ones(3))
    reducer.fold(torch.ones(2, n))
    with pytest.raises(ValueError, match="nothing is waiting to be folded"):
        reducer.fold(torch.ones(2, n))
    reducer.close()
    mine.zero_grad()
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight are one parameter"):
        GradientReducer(tied, group, last=tied[0])
    with pytest.raises(ValueError, match="no parameter"):
        GradientReducer(nn.ReLU(), group)
    for wrong in (nn.Linear(2, 2), None, nn.Linear):
        with pytest.raises(ValueError, match="last must be a linear layer"):
            GradientReducer(mine, group, last=wrong)
    with pytest.raises(ValueError, match="last has a layer twice"):
        GradientReducer(mine, group, last=[mine.out, mine.out])
    parallel = nn.Sequential(nn.Linear(2, 2))
    parallelize(parallel, {"0": "column"}, group)
    with pytest.raises(ValueError, match="last has a ColumnLinear; it takes plain"):
        GradientReducer(parallel, group, last=parallel[0])
    reducer = GradientReducer(mine, group, last=[mine.first, mine.shared])
    with pytest.raises(ValueError, match="last has a Linear whose forward was replaced"):
        GradientReducer(mine, group, last=mine.first)
    twice = [losses(mine, torch.ones(1, 4, 3, dtype=torch.float64)).sum() for _ in range(2)]
    mine.first.forward.__self__.flush()  # as if each were alone
    twice[0].backward()
    with pytest.raises(RuntimeError, match="went backward after its gradient was sent"):
        twice[1].backward()
    reducer.finish()
    reducer.close()


def gradients_after_their_bucket_left() -> None:
    """Two backwards without `finish`, and a parameter that reentrant checkpoints meet twice, are refused."""
    group, x = dist.new_group(), torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    layer = nn.Linear(3, 3).double()
    reducer = GradientReducer(layer, group)
    layer(x).sum().backward()
    with pytest.raises(RuntimeError, match="call finish"):
        layer(x).sum().backward()
    reducer.finish()
    layer.zero_grad()
    twice = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(RuntimeError, match="no reentrant checkpoint"):
        twice.sum().backward()
    reducer.finish()
    layer.zero_grad()
    layer(x).sum().backward()
    reducer.finish()
    expected = torch.full((3, 3), 2.0, dtype=torch.float64)
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-12, atol=0)
    reducer.close()
    dist.destroy_process_group(group)


def own_rows_that_fail_once() -> None:
    """An error of the own rows' product in `finish` is raised, and the next `finish` makes them."""
    rank, n = dist.get_rank(), dist.get_world_size()
    mine, whole = models()
    inputs = Draw(3)(n, 4, 3)
    reducer = GradientReducer(mine, dist.group.WORLD, bucket_bytes=1, last=[mine.first, mine.out], average=False)
    losses(mine, inputs[rank : rank + 1]).sum().backward()
    with (
        mock.patch.object(SlicedWeight, "_rows_of", side_effect=RuntimeError("no memory")),
        pytest.raises(RuntimeError, match="no memory"),
    ):
        reducer.finish()
    reducer.finish()
    losses(whole, inputs).sum().backward()
    compare(mine, whole)
    reducer.close()


def closed_within_a_backward(late_bound: bool) -> bool:
    """A reducer whose backward was not ended leaves nothing under way, and its group to another."""
    group = dist.new_group()
    mine, _ = models()
    inputs = torch.ones(1, 4, 3, dtype=torch.float64)
    reducer = GradientReducer(mine, group, bucket_bytes=1, last=mine.first, sharded=True, late_bound=late_bound)
    losses(mine, inputs).sum().backward()
    with mock.patch.object(Pieces, "land", autospec=True, side_effect=Pieces.land) as land:
        reducer.close()
    other = GradientReducer(mine, group, bucket_bytes=1)
    mine.zero_grad()
    losses(mine, inputs).sum().backward()
    other.finish()
    other.close()
    dist.destroy_process_group(group)
    return land.called and not reducer._left


def closed_after_a_fault() -> tuple[str, bool]:
    """A reducer whose group died gives the module back, with an error the first time only."""
    group = dist.new_group()
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    reducer = GradientReducer(model, group, sharded=True, last=model[0])
    reducer.publish(wait=True)
    reducer._peers.fault = "somebody died"
    reducer.publish()
    try:
        reducer.close()
        said = ""
    except PeerError as error:
        said = str(error)
    reducer.close()
    dist.destroy_process_group(group)
    return said, "forward" in model[0].__dict__ or bool(model[0]._forward_pre_hooks)


def different_models() -> tuple[str, str]:
    group = dist.new_group()
    mine, _ = models(width=5 + dist.get_rank())
    reducer = GradientReducer(mine, group)
    losses(mine, torch.ones(1, 4, 3, dtype=torch.float64)).sum().backward()
    try:
        reducer.finish()
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        reducer.close()
    return "", ""
