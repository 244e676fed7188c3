"""What every rank does in the tests of memory: the bytes that a loop's buffers hold, counted as they come and go."""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.overlap import all_gather_matmul, matmul_reduce_scatter
from stretto.overlap.loops import Scatter
from stretto.overlap.p2p import Call

ROWS, K, F = 16, 8, 8


class Held:
    """The bytes of buffers from the moment that they are given to a transfer until they are released."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self.seen: dict[int, int] = {}

    def take(self, tensor: Tensor) -> None:
        self.seen[tensor.data_ptr()] = tensor.nbytes
        self.now += tensor.nbytes
        self.peak = max(self.peak, self.now)

    def release(self, call: Call, buffer: Tensor) -> None:
        self.now -= self.seen.pop(buffer.data_ptr(), 0)


def scatter_peak(schedule: str, num_subslices: int) -> float:
    """Peak bytes of messages in flight, in units of one slice of the output."""
    n, held, send = dist.get_world_size(), Held(), Scatter._send

    def counted(scatter: Scatter, piece: Any, partial: Tensor) -> None:
        send(scatter, piece, partial)
        _, incoming, outgoing = scatter._arriving[piece.step, piece.subslice]
        held.take(incoming)
        held.take(outgoing)

    x, weight = torch.randn(ROWS * n, K), torch.randn(F, K)
    with mock.patch.object(Scatter, "_send", counted), mock.patch.object(Call, "release", held_release(held)):
        matmul_reduce_scatter(x, weight, dist.group.WORLD, schedule=schedule, num_subslices=num_subslices)
    return held.peak / (ROWS * F * 4)


def held_release(held: Held) -> Any:
    def release(call: Call, buffer: Tensor) -> None:
        held.release(call, buffer)

    return release


def gather_peak(schedule: str, num_subslices: int) -> float:
    """Peak bytes of arriving slices, in units of one slice of the input."""
    n, held, post = dist.get_world_size(), Held(), Call.post

    def counted(call: Call, sends: Any, receives: Any) -> Any:
        for tensor, _ in receives:
            if tensor.dtype == torch.float32:
                held.take(tensor)
        return post(call, sends, receives)

    x, weight = torch.randn(ROWS, K), torch.randn(F, K)
    with mock.patch.object(Call, "post", counted), mock.patch.object(Call, "release", held_release(held)):
        all_gather_matmul(x, weight, dist.group.WORLD, schedule=schedule, num_subslices=num_subslices)
    assert n == 1 or held.now == 0, held.now
    return held.peak / (ROWS * K * 4)
