"""What an operation is given: looked over before anything is sent, and laid out rows first.

Inside this room a tensor is (rows, inner, features), contiguous, and is cut by rows alone. The hazard is a
fault that only some ranks see: it is raised there at once, and on the others by the header of the first step.
Strided inputs are copied, never refused: the gradients that autograd hands over often are strided.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from stretto.overlap.faults import Header
from stretto.overlap.loops import sum_dtype
from stretto.overlap.p2p import Call, Peers
from stretto.overlap.routes import Asked, Slices, sizes_from, slice_sizes
from stretto.overlap.row_sizes import exchange_sizes

__all__ = ["How", "rows_first", "rows_last"]

Sizes = Sequence[int] | str | None
_OVERLAPPING = ("gloo", "nccl")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def outside_of_graphs(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Under `torch.compile` the function runs eagerly between two graphs; else no compiler is imported."""

    @wraps(function)
    def wrapper(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapper


@dataclass(frozen=True)
class How:
    """How a call communicates; equal on every rank."""

    peers: Peers
    schedule: Asked
    num_subslices: int
    check: bool
    gradients: tuple[bool, ...]
    """Which inputs need one, outside of `torch.no_grad`."""
    device: torch.device
    keep_gathered: bool = False
    tuned_as: str = ""

    def header(self, call: Call, dtype: torch.dtype) -> Header:
        """The part of the headers that is the same for all steps of a call."""
        n, s = self.num_subslices, self.schedule
        return Header(call.operation, call.number, "gather", 0, (), dtype, n, s, self.gradients, self.keep_gathered)


def check_schedule(schedule: str, num_subslices: int, *, ring: bool = True) -> None:
    """`ValueError` unless there is such a schedule; `ring` says whether there is a ring."""
    known = ("auto", "direct", "ring", "plain") if ring else ("auto", "direct", "plain")
    if schedule not in known:
        raise ValueError(f"schedule={schedule!r} is not one of {', '.join(map(repr, known))}")
    if num_subslices < 1:
        raise ValueError(f"num_subslices={num_subslices} must be at least 1")


def can_overlap(peers: Peers, device: torch.device) -> bool:
    """Whether a group's messages for a device can travel beside products; why not is said once."""
    if peers.world_size == 1:
        peers.records.say_once(peers.group, "one rank: there is nothing to overlap")
        return False
    if peers.backend(device) not in _OVERLAPPING:
        where = f"backend {peers.backend(device)!r} on {device.type}"
        peers.records.say_once(peers.group, f"{where} is not overlapped, only {' and '.join(_OVERLAPPING)} are")
        return False
    return True


def checked_how(
    peers: Peers,
    schedule: str,
    num_subslices: int,
    check: bool,
    gradients: tuple[bool, ...],
    keep_gathered: bool = False,
    *,
    device: torch.device,
    tuned_as: str = "",
    ring: bool = True,
) -> How:
    """The settings of a call, or `ValueError`; `ring` says whether the operation has a ring.

    What is asked for and cannot happen here is said once.
    """
    check_schedule(schedule, num_subslices, ring=ring)
    if schedule != "plain" and not can_overlap(peers, device):
        schedule = "direct" if peers.world_size == 1 else "plain"
    chosen: Asked = schedule  # type: ignore[assignment]
    return How(peers, chosen, num_subslices, check, gradients, device, keep_gathered, tuned_as)


def listed(
    weights: Tensor | Sequence[Tensor], biases: Tensor | Sequence[Tensor | None] | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights and biases as lists, whether one was given or several; no biases is None for each."""
    ws = [weights] if isinstance(weights, Tensor) else list(weights)
    if biases is None:
        return ws, [None] * len(ws)
    return ws, [biases] if isinstance(biases, Tensor) else list(biases)


def check_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], dim: int, *, wider: bool = False
) -> int:
    """`dim` counted from the front, or `ValueError` for shapes, dtypes and devices that make no product.

    With `wider` weights may be float32 where x is 16-bit.
    """
    if x.ndim < 2:
        raise ValueError(f"x of shape {tuple(x.shape)} must have at least 2 dimensions, rows and features")
    if not isinstance(dim, int):
        raise ValueError(f"dim={dim!r} must be an int")
    if not -x.ndim <= dim < x.ndim or dim % x.ndim == x.ndim - 1:
        raise ValueError(
            f"dim={dim} is not a row dimension of x, whose shape is {tuple(x.shape)}; features come last"
        )
    if isinstance(weights, Tensor):
        raise ValueError("weights is one tensor; this operation takes a sequence of them, [weight]")
    if not weights:
        raise ValueError("at least one weight is needed")
    if len(biases) != len(weights):
        raise ValueError(f"{len(biases)} biases for {len(weights)} weights; give one, or None, for each")
    if not x.dtype.is_floating_point or x.dtype.itemsize < 2:
        raise ValueError(f"x is {x.dtype}; float64, float32, bfloat16 and float16 are supported")
    for weight, bias in zip(weights, biases):
        if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
            raise ValueError(
                f"weight of shape {tuple(weight.shape)} must be (out_features, {x.shape[-1]}) "
                f"to multiply x of shape {tuple(x.shape)}"
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias of shape {tuple(bias.shape)} must be ({weight.shape[0]},)")
        wanted = weight.dtype if wider and weight.dtype == sum_dtype(x.dtype) else x.dtype
        for name, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None and tensor.dtype != wanted:
                raise ValueError(f"{name} is {tensor.dtype} and x is {x.dtype}; cast one of them")
            if tensor is not None and tensor.device != x.device:
                raise ValueError(f"{name} is on {tensor.device} and x on {x.device}; move one of them")
    return dim % x.ndim


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """`ValueError` for queries, keys and values that no attention can take."""
    if not (q.ndim == k.ndim == v.ndim == 4):
        raise ValueError("q, k and v must be (batch, rows, heads, d)")
    if k.shape[:3] != v.shape[:3] or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise ValueError(f"q, k and v of shapes {shapes} must share batch, rows and d, k and v their heads")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"{k.shape[2]} key-value heads do not divide {q.shape[2]} query heads")
    if len({(t.dtype, t.device) for t in (q, k, v)}) > 1:
        raise ValueError(f"q, k and v are {q.dtype}, {k.dtype}, {v.dtype} on {q.device}, {k.device}, {v.device}")


def rows_first(x: Tensor, dim: int) -> Tensor:
    """(..., rows at dim, ..., features) as a contiguous (rows, inner, features); differentiable."""
    x = x.movedim(dim, 0)
    return x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1]).contiguous()


def rows_last(y: Tensor, like: Tensor, dim: int) -> Tensor:
    """(rows, inner, features) with the inner dimensions of `like` and its rows back at `dim`, as a view."""
    inner = [size for axis, size in enumerate(like.shape[:-1]) if axis != dim]
    return y.view(y.shape[0], *inner, y.shape[-1]).movedim(0, dim)


def side_by_side(y: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """The outputs (rows, inner, F) of several weights out of (rows, inner, sum of F), as views."""
    return [y] if len(weights) == 1 else list(y.split([len(weight) for weight in weights], -1))


def gathered_slices(call: Call, how: How, x: Tensor, sizes: Sizes) -> Slices:
    """The rows of every rank, where this one has those of `x`: given, equal, or exchanged."""
    rank, world_size = call.peers.rank, call.peers.world_size
    if isinstance(sizes, str):
        if sizes != "exchange":
            raise ValueError(f"sizes={sizes!r} must be None (equal slices), 'exchange', or one row count a rank")
        header = replace(how.header(call, x.dtype), lane="sizes", shape=tuple(x.shape))
        return Slices(tuple(exchange_sizes(call, header, x.device)), how.num_subslices)
    given = tuple([x.shape[0]] * world_size) if sizes is None else sizes_from(sizes, world_size)
    if given[rank] != x.shape[0]:
        raise ValueError(f"sizes[{rank}]={given[rank]} but this rank's slice has {x.shape[0]} rows")
    return Slices(given, how.num_subslices)


def scattered_slices(how: How, num_rows: int, sizes: Sizes) -> Slices:
    """How the rows of a whole tensor are owned: as given, or as `torch.chunk` cuts them."""
    world_size = how.peers.world_size
    if isinstance(sizes, str):
        raise ValueError(f"sizes={sizes!r}: a scatter knows all its rows; give row counts, or None for torch.chunk's")
    given = slice_sizes(num_rows, world_size) if sizes is None else sizes
    slices = Slices(sizes_from(given, world_size), how.num_subslices)
    if slices.total != num_rows:
        raise ValueError(f"sizes={list(slices.sizes)} add up to {slices.total} rows, but there are {num_rows}")
    return slices


def needed(*inputs: Tensor | None) -> tuple[bool, ...]:
    """Which inputs will get a gradient, as the headers say it."""
    return tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in inputs)
