"""What every rank does in the tests on a CUDA device: the cases of the host, their tensors drawn there and moved.

Ranks share one device through a gloo group, or have one each and an NCCL group. The default device is the CUDA one
inside, so that what the cases make without saying where is there too.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.overlap import (
    GradientReducer,
    all_gather_matmul,
    matmul_all_reduce_start,
    matmul_reduce_scatter,
    report,
    trace,
)
from stretto.overlap.p2p import Call, peers_of
from stretto.overlap.staged import Staged
from stretto.overlap.wires import HOST, Nccl
from tests.overlap import attention_cases, gradient_cases, matmul_cases, module_cases

MODULES = {
    "matmul": matmul_cases,
    "attention": attention_cases,
    "gradient": gradient_cases,
    "module": module_cases,
}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6}


@contextmanager
def on_device(index: int, dtype: torch.dtype) -> Iterator[None]:
    """Cases draw on the host, the same numbers everywhere, and work on the device."""
    draw = matmul_cases.Draw.__call__

    def moved(self: matmul_cases.Draw, *shape: int) -> Tensor:
        with torch.device("cpu"):
            drawn = draw(self, *shape)
        return drawn.to(f"cuda:{index}", dtype)

    defaults = (TOLERANCES[dtype],)
    torch.cuda.set_device(index)
    with (
        mock.patch.object(matmul_cases.Draw, "__call__", moved),
        mock.patch.object(matmul_cases.same, "__defaults__", defaults),
        torch.device("cuda", index),
    ):
        yield
        torch.cuda.current_stream().synchronize()


def shared(module: str, name: str, dtype: torch.dtype, *args: Any) -> Any:
    """A case on a device that all ranks share, over the gloo group of the world."""
    with on_device(0, dtype):
        return getattr(MODULES[module], name)(*args)


def each_its_own(name: str, dtype: torch.dtype, case: dict[str, Any]) -> None:
    """A product over NCCL, a device a rank."""
    with on_device(dist.get_rank(), dtype):
        group = dist.new_group(backend="nccl")
        getattr(matmul_cases, name)(case, group)
        wires = peers_of(group).wires
        assert isinstance(wires[torch.device("cuda", dist.get_rank())], Nccl)
        assert HOST in wires
        dist.destroy_process_group(group)


def poisoned(dtype: torch.dtype, name: str, case: dict[str, Any]) -> None:
    """As `shared`, with every buffer filled with nan when a call or the wire lets go of it."""

    def poison(self: object, buffer: Tensor) -> None:
        buffer.fill_(float("nan") if buffer.is_floating_point() else -1)

    with mock.patch.object(Call, "release", poison), mock.patch.object(Staged, "release", poison):
        shared("matmul", name, dtype, case)


def other_stream() -> None:
    """What was posted on one stream may be waited for on another, its memory used again at once."""
    torch.cuda.set_device(0)
    group, n = dist.group.WORLD, dist.get_world_size()
    x, w = torch.ones(64, 32, device="cuda"), torch.ones(16, 32, device="cuda")
    other = torch.cuda.Stream()
    for _ in range(20):
        pending = matmul_all_reduce_start(x, w, group)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            y = pending.wait()
            y.record_stream(other)
            total = y.sum()
        spoiled = [torch.full((64, 16), float("nan"), device="cuda") for _ in range(4)]
        torch.cuda.current_stream().wait_stream(other)
        assert float(total) == 32.0 * n * 64 * 16
        del spoiled


def traced() -> tuple[bool, bool, bool]:
    """Whether spans are in order, products took time, and the wait for a late message is seen."""
    torch.cuda.set_device(0)
    x, w = torch.randn(2048, 1024, device="cuda"), torch.randn(2048, 1024, device="cuda")
    all_gather_matmul(x, w, dist.group.WORLD)
    with trace() as recorded:
        all_gather_matmul(x, w, dist.group.WORLD)
    spans = recorded.spans
    ordered = all(span.start_s <= span.end_s for span in spans)
    products = [span for span in spans if span.what == "product"]
    within = max(s.end_s for s in spans) - min(s.start_s for s in spans) < 60
    return ordered, all(span.seconds > 0 for span in products), within


def automatic() -> list[tuple[str, int]]:
    """The choices of a step, forward and backward; its results are those of a plain step."""
    torch.cuda.set_device(0)
    x = torch.randn(512, 256, device="cuda", dtype=torch.float64, requires_grad=True)
    w = torch.randn(256, 256, device="cuda", dtype=torch.float64, requires_grad=True)

    def step(schedule: str) -> list[Tensor]:
        h = all_gather_matmul(x, w, dist.group.WORLD, schedule=schedule)
        y = matmul_reduce_scatter(h, w, dist.group.WORLD, schedule=schedule)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, w))]

    for plain, found in zip(step("plain"), step("auto")):
        matmul_cases.same("a step", found, plain)
    assert "plain" in str(report(dist.group.WORLD))
    return [(c.schedule, c.num_subslices) for c in peers_of(dist.group.WORLD).choices.values()]


def reducer_on_a_side_stream() -> None:
    """A backward on a stream of the user's: what leaves is what was made there, step after step."""
    torch.cuda.set_device(0)
    group, rank, n = dist.new_group(), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256)).cuda().double()
    alone = copy.deepcopy(model)
    reducer = GradientReducer(model, group, bucket_bytes=1 << 18, last=model[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for step in range(5):
        torch.manual_seed(step)
        inputs = torch.randn(n, 64, 256, dtype=torch.float64).cuda()
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            whole = torch.autograd.grad(alone(inputs).square().sum() / n, list(alone.parameters()))
            model.zero_grad()
            model(inputs[rank]).square().sum().backward()
            reducer.finish()
            for parameter, expected in zip(model.parameters(), whole):
                matmul_cases.same("gradient", parameter.grad, expected)
        torch.cuda.current_stream().wait_stream(stream)
    reducer.close()
    dist.destroy_process_group(group)
