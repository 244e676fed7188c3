"""Where a sequence splits over the ranks and where it joins again, and what is whole in between.

A module before the first block is given all rows and works on its own; one after the last gives all rows back.
Gradients are whole on every rank outside of the two. What modulates own rows (shift, scale, gate) comes from
layers that every rank has whole; the gradient of such an output is summed over the ranks, so that everything
before it is as in one process: a message of a few numbers a sample, where the sum of the layers' own gradients
would be as large as they are. The hazard: splits and joins hide behind nothing; there is one of each in a
forward. Source: Megatron-LM's sequence parallelism for the conjugate pairs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from stretto.overlap.faults import Header
from stretto.overlap.group_sums import with_summed_gradients
from stretto.overlap.inputs import outside_of_graphs, rows_first, rows_last
from stretto.overlap.loops import gather
from stretto.overlap.p2p import Peers, peers_of
from stretto.overlap.routes import Slices, slice_sizes
from stretto.overlap.row_counts import RowCount, Rows

__all__ = ["JoinedOutput", "SplitInput", "SummedOutput"]

_INPUT = ("hidden_states", "x", "input")


class SplitInput:
    """Before a module's forward: of all rows, the same on every rank, its first input keeps the own."""

    def __init__(self, count: RowCount, mesh: DeviceMesh, check: bool) -> None:
        self.count, self.mesh, self.check = count, mesh, check

    @outside_of_graphs
    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A forward pre-hook with keywords."""
        if args and isinstance(args[0], Tensor):
            return (self._own(args[0]), *args[1:]), kwargs
        for name in _INPUT:
            if isinstance(kwargs.get(name), Tensor):
                return args, {**kwargs, name: self._own(kwargs[name])}
        raise ValueError(f"{type(module).__name__} is to split rows, but its first input is no tensor")

    def _own(self, x: Tensor) -> Tensor:
        self.count.total = x.shape[-2]
        own: Tensor = _Split.apply(peers_of(self.mesh.get_group()), self.check, x)
        return own


class JoinedOutput:
    """After a module's forward: its own rows become all rows, on every rank."""

    def __init__(self, rows: Rows, mesh: DeviceMesh, check: bool) -> None:
        self.rows, self.mesh, self.check = rows, mesh, check

    @outside_of_graphs
    def __call__(self, module: Any, args: Any, output: Tensor) -> Tensor:
        """A forward hook."""
        sizes = tuple(self.rows.sizes(self.mesh.size()))
        whole: Tensor = _Join.apply(peers_of(self.mesh.get_group()), self.check, sizes, output)
        return whole


class SummedOutput:
    """After a module's forward: the gradients of its outputs, or of those numbered, will be summed over the ranks."""

    def __init__(self, mesh: DeviceMesh, check: bool, numbers: tuple[int, ...] = ()) -> None:
        self.mesh, self.check, self.numbers = mesh, check, numbers

    @outside_of_graphs
    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        """A forward hook."""
        if isinstance(output, Tensor):
            return self._summed(output)
        chosen = self.numbers or range(len(output))
        return type(output)(self._summed(one) if index in chosen else one for index, one in enumerate(output))

    def _summed(self, output: Any) -> Any:
        if not isinstance(output, Tensor):
            return output
        peers = peers_of(self.mesh.get_group())
        return with_summed_gradients(peers, "modulation gradients", [output], check=self.check)[0]


class _Split(torch.autograd.Function):
    """(..., all rows, K) -> (..., own rows, K); the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, peers: Peers, check: bool, x: Tensor) -> Tensor:
        sizes = tuple(slice_sizes(x.shape[-2], peers.world_size))
        ctx.peers, ctx.check, ctx.sizes = peers, check, sizes
        return _own_part(x, sizes, peers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, _gathered(ctx.peers, "split rows backward", ctx.check, ctx.sizes, grads[0])


class _Join(torch.autograd.Function):
    """(..., own rows, K) -> (..., all rows, K); of the gradient, whole on every rank, the own part is kept."""

    @staticmethod
    def forward(ctx: Any, peers: Peers, check: bool, sizes: tuple[int, ...], x: Tensor) -> Tensor:
        ctx.peers, ctx.sizes = peers, sizes
        return _gathered(peers, "join rows", check, sizes, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, None, _own_part(grads[0], ctx.sizes, ctx.peers)


def _own_part(x: Tensor, sizes: tuple[int, ...], peers: Peers) -> Tensor:
    rows = Slices(sizes).rows(peers.rank)
    return x.narrow(-2, rows.start, rows.stop - rows.start).contiguous()


def _gathered(peers: Peers, operation: str, check: bool, sizes: tuple[int, ...], x: Tensor) -> Tensor:
    """Own rows (..., own rows, K) of every rank, in the order of ranks; all messages leave at once."""
    dim = x.ndim - 2
    own = rows_first(x, dim)
    with peers.call(operation) as call:
        header = Header(operation, call.number, "gather", 0, (), x.dtype, 1, "plain", ())
        for _, whole in gather(call, header, own, Slices(sizes), check=check):
            gathered = whole
    return rows_last(gathered, x, dim)
