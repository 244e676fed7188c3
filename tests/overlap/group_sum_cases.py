"""What every rank does in the tests of small sums over a group: beside the sum by one process."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.overlap import all_gather_matmul, parallelize, report, trace
from stretto.overlap.group_sums import sum_over_ranks, with_summed_gradients
from stretto.overlap.p2p import peers_of
from tests.overlap.matmul_cases import Draw, leaf


def parts_of(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Every rank's part, the same draw everywhere."""
    return Draw(3)(dist.get_world_size(), *shape).to(dtype)


def added(shape: tuple[int, ...], dtype: torch.dtype) -> list[float]:
    """The sum of own parts, strided, is that of all parts; its numbers, to be compared bit for bit."""
    parts, group = parts_of(shape, dtype), dist.group.WORLD
    mine = parts[dist.get_rank()].repeat_interleave(2, -1)[..., ::2]
    before = mine.clone()
    total = sum_over_ranks(peers_of(group), "replicated gradients", mine, check=True)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert total.dtype == wide
    assert total.shape == shape
    assert total.untyped_storage().nbytes() == total.nbytes or dist.get_world_size() == 1
    rounding = 8 * torch.finfo(wide).eps  # of at most eight parts of about one
    torch.testing.assert_close(total, parts.to(wide).sum(0), rtol=rounding, atol=rounding)
    assert torch.equal(mine, before)
    return total.flatten().tolist()


def summed_gradients() -> None:
    """Gradients of several dtypes, one of them not needed, are summed before they are rounded."""
    rank, n = dist.get_rank(), dist.get_world_size()
    tensors = [
        leaf(torch.ones(3, dtype=torch.bfloat16)),
        torch.ones(2),
        leaf(torch.ones(2, 2, dtype=torch.float64)),
    ]
    peers = peers_of(dist.group.WORLD)
    before = peers.num_calls
    outs = with_summed_gradients(peers, "replicated gradients", tensors, check=True)
    share = torch.tensor(1 + rank / 256)  # of which bfloat16 keeps no more than 7 bits
    sum((out.double() * share.to(out.dtype).double()).sum() for out in outs).backward()
    assert peers.num_calls == before + (n > 1)
    assert tensors[1].grad is None
    exact = [torch.tensor(1 + r / 256) for r in range(n)]
    assert tensors[0].grad.tolist() == [float(sum(s.bfloat16().float() for s in exact).bfloat16())] * 3
    expected = torch.full((2, 2), float(sum(s.double() for s in exact)), dtype=torch.float64)
    torch.testing.assert_close(tensors[2].grad, expected, rtol=1e-14, atol=0)


def norm_gradients() -> list[str]:
    """A bfloat16 norm's gradient is summed in float32; the operations that the report has."""
    group, n = dist.new_group(), dist.get_world_size()
    norm = nn.Sequential(nn.LayerNorm(4)).bfloat16()
    parallelize(norm, {"0": "sequence"}, group)
    part = torch.tensor([1.0, 0.5, 0.25, 2**-7]) * (1 + dist.get_rank() * 2**-4)
    (norm(torch.ones(1, 1, 4, dtype=torch.bfloat16)).float() * part).sum().backward()
    expected = sum(torch.tensor([1.0, 0.5, 0.25, 2**-7]).mul(1 + r * 2**-4).bfloat16().float() for r in range(n))
    assert torch.equal(norm[0].bias.grad.to_local(), expected.bfloat16())
    found = [record.operation for record in report(group).records]
    dist.destroy_process_group(group)
    return found


def products_of_kept_inputs() -> tuple[int, int]:
    """Products in the trace of a column layer's backward whose input was kept, and how many it has."""
    n, draw = dist.get_world_size(), Draw(2)
    x, weight = leaf(draw(2, 3)), leaf(draw(2, 3))
    y = all_gather_matmul(x, weight, dist.group.WORLD, schedule="direct", keep_gathered=True)
    with trace() as recorded:
        y.sum().backward()
    at_once = n - 1 <= 2
    return sum(span.what == "product" for span in recorded.spans), n + (1 if at_once else n)
