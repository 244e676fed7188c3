"""A linear layer whose weight gradient is computed row slice by row slice for the ranks that own the rows.

Others' rows are computed in the backward and leave at once; the own rows need no message and wait until
backward is over, so that something is left to compute while its last messages travel: those of an embedding,
say, whose gradient is made last and is no product. The hazard: the gradient goes to its owners and not to
`weight.grad`, and the layer's input and its output's gradient are kept until then. Source: the data-parallel
row of this library's schedules.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stretto.overlap.buckets import Bucket, local
from stretto.overlap.p2p import Peers
from stretto.overlap.routes import Slices, route, slice_sizes
from stretto.overlap.streams import Made, made

__all__ = ["SlicedWeight", "sliced_layers"]

Launch = Callable[[Callable[[int], Tensor]], None]


def sliced_layers(module: nn.Module, last: nn.Linear | Sequence[nn.Linear]) -> list[nn.Linear]:
    """`last` as a list; `ValueError` unless they are the module's, and nothing else in it has their weights."""
    layers = [last] if isinstance(last, nn.Module) else list(last) if isinstance(last, Sequence) else [last]
    if len({id(layer) for layer in layers}) < len(layers):
        raise ValueError("last has a layer twice")
    if not all(any(m is layer for m in module.modules()) for layer in layers):
        raise ValueError("last must be a linear layer of the module, or several of them")
    for layer in layers:
        if getattr(type(layer), "forward", None) is not nn.Linear.forward or "forward" in vars(layer):
            own = " whose forward was replaced" if "forward" in vars(layer) else ""
            raise ValueError(f"last has a {type(layer).__name__}{own}; it takes plain nn.Linear layers alone")
    everything = list(module.named_parameters(remove_duplicate=False))
    for layer in layers:
        names = [name for name, parameter in everything if parameter is layer.weight]
        if len(names) > 1:
            raise ValueError(
                f"{' and '.join(names)} are one parameter; a layer given as `last` must not share its own"
            )
    return layers


class SlicedWeight:
    """Stands in for the forward of `layer`, whose weight (F, K) becomes the only parameter of `bucket`.

    `launch(make)` starts a trade in which `make(peer)` waits until the peer's rows were computed; `own` gives
    the rows that stay. While `accumulating()` the gradient is an ordinary one.
    """

    def __init__(self, layer: nn.Linear, peers: Peers, launch: Launch, accumulating: Callable[[], bool]) -> None:
        rows = slice_sizes(len(local(layer.weight)), peers.world_size)
        width = local(layer.weight).shape[1]
        self.bucket = Bucket([layer.weight], Slices(tuple(count * width for count in rows)))
        self.layer, self.accumulating = layer, accumulating
        self._peers, self._launch = peers, launch
        self._kept: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._runs: list[tuple[Tensor, Tensor]] = []
        self.awaited = 0
        """How often the forward ran and has not gone backward."""
        layer.forward = self.forward  # type: ignore[method-assign]

    @property
    def waits(self) -> bool:
        """Whether the own rows are still to be computed."""
        return self._kept is not None

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) -> (..., F), as the layer's own."""
        weight, bias = self.layer.weight, self.layer.bias
        if not torch.is_grad_enabled() or not weight.requires_grad:
            return F.linear(input, weight, bias)
        if torch._C._current_graph_task_id() == -1:  # else a recomputation, whose forward was counted
            self.awaited += 1
        result: Tensor = _SlicedLinear.apply(self, input, weight, bias)
        return result

    def add(self, dy: Tensor, x: Tensor) -> None:
        """Take dy (n, F) and x (n, K) of a run; when the last has come, compute others' rows."""
        self._runs.append((dy, x))
        self.awaited -= 1
        if self.awaited <= 0:
            self.flush()

    def flush(self) -> None:
        """Compute and send what has come, whether or not more was awaited."""
        self.awaited = 0
        if self._runs:
            runs, self._runs = self._runs, []
            self._send(*(parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*runs)))

    def _send(self, dy: Tensor, x: Tensor) -> None:
        """Compute others' rows of the gradient, in the order of their owners."""
        rank, world_size = self._peers.rank, self._peers.world_size
        rows: list[Future[Made]] = [Future() for _ in range(world_size)]
        rows[rank].set_result(made(dy.new_empty(self.bucket.slices.sizes[rank])))  # `own` comes in its place
        if self.bucket.launched:
            raise RuntimeError("a layer that was given as `last` went backward after its gradient was sent")
        self._kept = (dy, x, self.layer.weight.grad)
        self._launch(lambda peer: rows[peer].result().take())
        try:
            for step in range(world_size - 1):
                owner = route("scatter", "direct", rank, world_size, step).compute
                rows[owner].set_result(made(self._rows_of(owner, *self._kept)))
        except BaseException as error:
            for future in rows:
                if not future.done():
                    future.set_exception(error)
            raise

    def own(self) -> Tensor:
        """The own rows of the gradient, flat, computed now; where they wait."""
        assert self._kept is not None
        rows = self._rows_of(self._peers.rank, *self._kept)
        self._kept = None
        return rows

    def _rows_of(self, owner: int, dy: Tensor, x: Tensor, before: Tensor | None) -> Tensor:
        elements, width = self.bucket.slices.rows(owner), x.shape[1]
        rows = slice(elements.start // width, elements.stop // width)
        piece = (dy[:, rows].t() @ x).to(self.bucket.dtype)
        return (piece if before is None else piece + before[rows]).flatten()


class _SlicedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sliced: SlicedWeight, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.sliced = sliced
        y = F.linear(x, weight, bias)
        ctx.save_for_backward(x.to(y.dtype), weight)  # under autocast the product is of another dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        dy, inputs = grads[0].flatten(0, -2), x.flatten(0, -2)
        dw = None
        if ctx.sliced.accumulating():
            dw = dy.t() @ inputs
            ctx.sliced.awaited -= 1
        else:
            ctx.sliced.add(dy, inputs)
        dx = grads[0] @ weight.to(dy.dtype) if ctx.needs_input_grad[1] else None
        db = dy.sum(0) if ctx.needs_input_grad[3] else None
        return None, dx, dw, db
