"""A linear layer whose weight gradient is computed row slice by row slice for the ranks that own the rows.

It is for the layer that backward comes to last: with its gradient made in one piece, nothing would be left to
compute while it travels. Others' rows are computed first and each leaves at once, own rows last. The hazard:
the gradient goes to its owners and not to `weight.grad`. Source: the data-parallel row of this library's
schedules.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stretto.overlap.buckets import Bucket
from stretto.overlap.p2p import Peers
from stretto.overlap.routes import route

__all__ = ["SlicedWeight"]


class SlicedWeight:
    """Stands in for the forward of `layer`, whose weight (F, K) is the only parameter of `bucket`.

    `launch(make)` starts a trade in which `make(peer)` waits until the peer's rows were computed. While
    `accumulating()` the gradient is an ordinary one.
    """

    def __init__(
        self,
        layer: nn.Linear,
        bucket: Bucket,
        peers: Peers,
        launch: Callable[[Callable[[int], Tensor]], None],
        accumulating: Callable[[], bool],
    ) -> None:
        self.layer, self.accumulating = layer, accumulating
        self._bucket, self._peers, self._launch = bucket, peers, launch

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) -> (..., F), as the layer's own."""
        weight, bias = self.layer.weight, self.layer.bias
        if not torch.is_grad_enabled() or not weight.requires_grad:
            return F.linear(input, weight, bias)
        result: Tensor = _SlicedLinear.apply(self, input, weight, bias)
        return result

    def send(self, dy: Tensor, x: Tensor) -> None:
        """Compute the gradient of dy (n, F) and x (n, K) in the order of its owners, own rows last."""
        rank, world_size = self._peers.rank, self._peers.world_size
        before, width = self.layer.weight.grad, self.layer.weight.shape[1]
        made: list[Future[Tensor]] = [Future() for _ in range(world_size)]
        self._launch(lambda peer: made[peer].result())
        try:
            for step in range(world_size):
                owner = route("scatter", "direct", rank, world_size, step).compute
                elements = self._bucket.slices.rows(owner)
                rows = slice(elements.start // width, elements.stop // width)
                piece = dy[:, rows].t() @ x
                made[owner].set_result((piece if before is None else piece + before[rows]).flatten())
        except BaseException as error:
            for future in made:
                if not future.done():
                    future.set_exception(error)
            raise


class _SlicedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sliced: SlicedWeight, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.sliced = sliced
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        dy, inputs = grads[0].flatten(0, -2), x.flatten(0, -2)
        dx = grads[0] @ weight if ctx.needs_input_grad[1] else None
        db = dy.sum(0) if ctx.needs_input_grad[3] else None
        if ctx.sliced.accumulating():
            return None, dx, dy.t() @ inputs, db
        ctx.sliced.send(dy, inputs)
        return None, dx, None, db
