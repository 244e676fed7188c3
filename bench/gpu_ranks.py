"""What every rank of `bench.gpu` does: operations beside one process, then every schedule beside compute alone.

Seconds are the host's between two waits for the device's own stream, which has then waited for every message. The
hazard is a device that ranks share: one rank's product is another's delay, so "compute only" runs on all at once.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_checks import SCHEDULES, checks, drawn
from stretto.leaving import end_process
from stretto.overlap import (
    all_gather_matmul,
    matmul_reduce_scatter,
)
from stretto.overlap.p2p import peers_of
from stretto.overlap.routes import route
from stretto.overlap.staged import HostCopies
from stretto.overlap.wires import HOST, staged_wire

Run = Callable[[], Any]
Setting = dict[str, Any]


def serve(rank: int, num_ranks: int, backend: str, port: int, setting: Setting, pipe: Any) -> None:
    """In a process of its own: the checks and figures of this rank, or the text of its error, into the pipe."""
    try:
        pipe.send((_figures(rank, num_ranks, backend, port, setting), ""))
    except BaseException as error:
        pipe.send((None, f"rank {rank} of {num_ranks} over {backend}: {type(error).__name__}: {error}"))
    end_process(0)


def _figures(rank: int, num_ranks: int, backend: str, port: int, setting: Setting) -> dict[str, Any]:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank if backend == "nccl" else 0) if setting["cuda"] else HOST
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=60))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=setting["patience_s"])
    )
    group = dist.group.WORLD if backend == "gloo" else dist.new_group(backend=backend)
    assert group is not None
    if device == HOST:  # go the way that a device's tensors go
        peers = peers_of(group)
        peers.wires[HOST] = staged_wire(group, rank, num_ranks, peers.backends, HostCopies())
    figures = {"checks": dict(checks(group, device)), "cells": {}}
    for name, make in OPERATIONS.items():
        for rho in setting["rhos"]:
            figures["cells"][f"{name}, rho {rho:g}"] = cell(make, rho, group, device, setting)
    dist.barrier()
    dist.destroy_process_group()
    return figures


def _gather(group: dist.ProcessGroup, device: torch.device, setting: Setting, wide: int) -> "Operation":
    """(rows / N, K) on every rank, gathered, times (wide, K)."""
    rows, k = setting["rows"], setting["features"]
    dtype = getattr(torch, setting["dtype"])
    x = drawn(dist.get_rank(group), device, dtype, rows // dist.get_world_size(group), k)
    weight, whole = drawn(9, device, dtype, 1, k).expand(wide, k).contiguous(), drawn(8, device, dtype, rows, k)
    call = partial(all_gather_matmul, x, weight, group)
    return Operation(call, lambda: F.linear(whole, weight), [x], (x, weight), (whole, weight))


def _scatter(group: dist.ProcessGroup, device: torch.device, setting: Setting, wide: int) -> "Operation":
    """(rows, wide) times (F, wide), summed over ranks, (rows / N, F) left on each."""
    rows, f = setting["rows"], setting["features"]
    dtype = getattr(torch, setting["dtype"])
    x = drawn(dist.get_rank(group), device, dtype, rows, 1).expand(rows, wide).contiguous()
    weight = drawn(9, device, dtype, f, 1).expand(f, wide).contiguous()
    sent = drawn(7, device, dtype, rows // dist.get_world_size(group), f)
    call = partial(matmul_reduce_scatter, x, weight, group)
    return Operation(call, lambda: F.linear(x, weight), [sent], (x, weight), (x, weight))


@dataclass
class Operation:
    """A call of the library, the same product alone, and messages of the sizes of its own."""

    call: Callable[..., Tensor]
    compute: Run
    messages: list[Tensor]
    inputs: tuple[Tensor, Tensor]
    """Of the call, and of the product alone: what gets a gradient."""
    alone: tuple[Tensor, Tensor]


def _backward_of(
    make: Callable[..., Operation], num_loops: int, group: Any, device: torch.device, setting: Any, wide: int
) -> Operation:
    """The gradients of both inputs, of the library's call and of the product alone; `num_loops` move bytes."""
    forward = make(group, device, setting, wide)
    for tensor in (*forward.inputs, *forward.alone):
        tensor.requires_grad_()
    graphs: dict[Any, tuple[Tensor, Tensor]] = {}

    def run(key: Any, call: Callable[[], Tensor], inputs: tuple[Tensor, Tensor]) -> Any:
        if key not in graphs:
            with torch.enable_grad():
                y = call()
            graphs[key] = y, torch.ones_like(y)
        y, dy = graphs[key]
        return torch.autograd.grad(y, inputs, dy, retain_graph=True)

    def call(**options: Any) -> Any:
        return run(tuple(options.items()), partial(forward.call, **options), forward.inputs)

    compute = partial(run, (), forward.compute, forward.alone)
    return Operation(call, compute, forward.messages * num_loops, forward.inputs, forward.alone)


OPERATIONS: dict[str, Callable[..., Operation]] = {
    "all_gather_matmul": _gather,
    "matmul_reduce_scatter": _scatter,
    "all_gather_matmul backward": partial(_backward_of, _gather, 2),
    "matmul_reduce_scatter backward": partial(_backward_of, _scatter, 1),
}


@torch.no_grad()
def cell(
    make: Callable[..., Operation],
    rho: float,
    group: dist.ProcessGroup,
    device: torch.device,
    setting: Setting,
) -> dict[str, Any]:
    """Seconds of every contender, interleaved, at a width where messages take about `rho` times the product."""
    wide = setting["wide"]
    if setting["scaled"]:
        first = make(group, device, setting, wide)
        compute_s = min(_timed(first.compute, device) for _ in range(4))
        messages_s = min(_timed(partial(_messages, group, first.messages), device) for _ in range(4))
        wide = min(setting["widest"], max(wide, int(wide * messages_s / (rho * compute_s)) // 256 * 256))
        del first
    operation = make(group, device, setting, wide)
    contenders: dict[str, Run] = {
        "compute only": operation.compute,
        "messages": partial(_messages, group, operation.messages),
        "ideal": partial(_messages, group, operation.messages, beside=operation.compute),
    }
    for name, (schedule, m) in SCHEDULES.items():
        contenders[name] = partial(operation.call, schedule=schedule, num_subslices=m)
    for run in contenders.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    start = time.monotonic()
    for _ in range(setting["repeats"]):
        for name, run in contenders.items():
            seconds[name].append(_timed(run, device))
        if _greatest(time.monotonic() - start) > setting["cell_s"]:
            break
    return {"wide": wide, "seconds": seconds}


def _messages(group: dist.ProcessGroup, messages: list[Tensor], beside: Run | None = None) -> None:
    """As many bytes to and from every rank as the operation moves, needed by nobody."""
    peers = peers_of(group)
    steps = [route("gather", "direct", peers.rank, peers.world_size, step) for step in range(peers.world_size - 1)]
    with peers.call("messages") as call:
        for message in messages:
            for step in steps:
                call.post([(message.detach(), step.send_to)], [(torch.empty_like(message), step.recv_from)])
        if beside is not None:
            beside()


def _timed(run: Run, device: torch.device) -> float:
    """Seconds of the slowest rank, from a common start until its stream is done."""
    _settle(device)
    dist.barrier()
    start = time.perf_counter()
    run()
    _settle(device)
    return _greatest(time.perf_counter() - start)


def _greatest(value: float) -> float:
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
