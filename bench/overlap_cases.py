"""What each rank of `bench.overlap` runs: an operation done by compute alone, plainly, sliced, and by the library.

Every operation is built from the same tensors for all contenders, each a function without arguments. Shapes:
`rows` is the whole sequence, `wide` what is sent of a row, `narrow` a rank's features. The hazard is the
processors: in "schedule" mode products sleep, see `sleeping`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bench.sleeping import pace, sleeping_attention
from bench.slicing import Run, Sends, slice_columns, slice_gather, slice_queries, slice_reduction, slice_scatter
from stretto.overlap import (
    GradientReducer,
    all_gather_matmul,
    attention_all_to_all,
    attention_reduce_scatter,
    matmul_all_to_all,
    matmul_reduce_scatter,
    reference,
    scaled_dot_product_attention,
)

__all__ = ["OPERATIONS", "Operation", "Sizes"]


@dataclass(frozen=True)
class Sizes:
    """Of a problem, whole; `layers` and `batch` are of the gradient reduction."""

    rows: int
    wide: int
    narrow: int
    heads: int = 16
    layers: int = 8
    batch: int = 1024


@dataclass
class Operation:
    """The contenders of one operation. `parts`: compute and bytes sent of each half that hides its own bytes."""

    parts: list[tuple[Run, int]]
    slicing: Callable[[int], Run]
    library: Callable[..., Run]
    has_ring: bool = True
    has_subslices: bool = True
    collective: Run | None = None
    """Plain by gloo's own collective, where the library's plain is direct sends."""
    close: list[Run] = field(default_factory=list)

    @property
    def sent_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.parts)

    def compute(self) -> None:
        for run, _ in self.parts:
            run()


def gather_forward(sizes: Sizes, sends: Sends, group: dist.ProcessGroup) -> Operation:
    """all_gather_matmul: (rows / N, wide) gathered, times (narrow, wide)."""
    whole, weight = torch.randn(sizes.rows, sizes.wide), torch.randn(sizes.narrow, sizes.wide)
    x = whole.chunk(sends.world_size)[sends.rank].clone()

    def sliced(k: int) -> Run:
        def run() -> Tensor:
            out = x.new_empty(k, sizes.rows // k, sizes.narrow)
            slice_gather(sends, x, k, lambda c, rows: torch.mm(rows, weight.t(), out=out[c]))
            return out

        return run

    return Operation(
        [(lambda: whole @ weight.t(), (sends.world_size - 1) * x.nbytes)],
        sliced,
        lambda **how: lambda: all_gather_matmul(x, weight, group, **how),
        collective=lambda: reference.all_gather_matmul(x, [weight], group, [None], [len(x)] * sends.world_size),
    )


def scatter_forward(sizes: Sizes, sends: Sends, group: dist.ProcessGroup) -> Operation:
    """matmul_reduce_scatter: (rows, narrow) times (wide, narrow), summed over ranks by rows."""
    n = sends.world_size
    x, weight = torch.randn(sizes.rows, sizes.narrow), torch.randn(sizes.wide, sizes.narrow)

    def sliced(k: int) -> Run:
        chunks = x.chunk(k)
        return lambda: slice_scatter(sends, (sizes.rows // n, sizes.wide), k, lambda c: chunks[c] @ weight.t())

    return Operation(
        [(lambda: x @ weight.t(), (n - 1) * (sizes.rows // n) * sizes.wide * 4)],
        sliced,
        lambda **how: lambda: matmul_reduce_scatter(x, weight, group, **how),
        collective=lambda: reference.matmul_reduce_scatter(x, [weight], group, [None], [sizes.rows // n] * n),
    )


def _backward(call: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[..., Run]:
    """The backward alone: the forward runs once, when the contender is made, and takes no time if asleep."""

    def library(**how: Any) -> Run:
        with pace.unspent():
            y = call(**how)
        dy = torch.randn_like(y)
        return lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True)

    return library


def column_backward(sizes: Sizes, sends: Sends, group: dist.ProcessGroup, keep_gathered: bool = True) -> Operation:
    """Of all_gather_matmul: input gradients are scattered, weight gradients beside; x was kept or is sent again."""
    n = sends.world_size
    whole, weight = torch.randn(sizes.rows, sizes.wide), torch.randn(sizes.narrow, sizes.wide, requires_grad=True)
    x = whole.chunk(n)[sends.rank].clone().requires_grad_()
    dy, w, own = torch.randn(sizes.rows, sizes.narrow), weight.detach(), x.detach()

    def compute() -> None:
        torch.mm(dy, w)
        torch.mm(dy.t(), whole)

    def sliced(k: int) -> Run:
        dys, kept = dy.chunk(k), whole.chunk(k)

        def run() -> None:
            dw, dx = torch.zeros_like(w), []

            def products(c: int, rows: Tensor) -> None:
                dx.append(scatter(c))
                dw.addmm_(dys[c].t(), rows)

            def scatter(c: int) -> tuple[Any, ...]:
                partial = (dys[c] @ w).view(n, -1, sizes.wide)
                into = {peer: torch.empty_like(partial[peer]) for peer in sends.peers}
                return sends.post(partial.__getitem__, into.__getitem__), partial, into

            if keep_gathered:
                for c in range(k):
                    products(c, kept[c])
            else:
                slice_gather(sends, own, k, products)
            for works, partial, into in dx:
                sends.wait(works)
                for peer in sends.peers:
                    partial[sends.rank] += into[peer]
            torch.cat([partial[sends.rank] for _, partial, _ in dx])

        return run

    call = lambda **how: all_gather_matmul(x, weight, group, keep_gathered=keep_gathered, **how)  # noqa: E731
    sent = (n - 1) * x.nbytes * (1 if keep_gathered else 2)
    return Operation([(compute, sent)], sliced, _backward(call, [x, weight]))


def column_backward_again(sizes: Sizes, sends: Sends, group: dist.ProcessGroup) -> Operation:
    """The same with x gathered again: two messages a step in one loop."""
    return column_backward(sizes, sends, group, keep_gathered=False)


def row_backward(sizes: Sizes, sends: Sends, group: dist.ProcessGroup) -> Operation:
    """Of matmul_reduce_scatter: one gather of the output's gradient feeds both products."""
    n = sends.world_size
    x = torch.randn(sizes.rows, sizes.narrow, requires_grad=True)
    weight = torch.randn(sizes.wide, sizes.narrow, requires_grad=True)
    dy, w, rows = torch.randn(sizes.rows, sizes.wide), weight.detach(), x.detach()
    own = dy.chunk(n)[sends.rank].clone()

    def compute() -> None:
        torch.mm(dy, w)
        torch.mm(dy.t(), rows)

    def sliced(k: int) -> Run:
        def run() -> None:
            dx, dw = torch.empty_like(rows), torch.zeros_like(w)

            def products(c: int, grad: Tensor) -> None:
                torch.mm(grad, w, out=dx.chunk(k)[c])
                dw.addmm_(grad.t(), rows.chunk(k)[c])

            slice_gather(sends, own, k, products)

        return run

    call = lambda **how: matmul_reduce_scatter(x, weight, group, **how)  # noqa: E731
    return Operation([(compute, (n - 1) * own.nbytes)], sliced, _backward(call, [x, weight]))


def _attention() -> Any:
    return sleeping_attention if pace.asleep else scaled_dot_product_attention


def ulysses(sizes: Sizes, sends: Sends, group: dist.ProcessGroup) -> Operation:
    """matmul_all_to_all, then attention_all_to_all: (1, rows / N, wide) to own heads of all rows and back."""
    n, attention = sends.world_size, _attention()
    x = torch.randn(1, sizes.rows // n, sizes.wide)
    weights = [torch.randn(sizes.wide, sizes.wide) / sizes.wide**0.5 for _ in range(3)]
    cut = [sizes.wide // n] * n
    by_owner = torch.stack([torch.cat([w.chunk(n)[peer] for w in weights]) for peer in range(n)])
    d = sizes.wide // sizes.heads
    q, k_, v = (torch.randn(1, sizes.rows, sizes.heads // n, d) for _ in range(3))
    heads_first = [t.transpose(1, 2).contiguous() for t in (q, k_, v)]

    def library(**how: Any) -> Run:
        def run() -> None:
            matmul_all_to_all(x, weights, group, features=[cut] * 3, **how)
            attention_all_to_all(q, k_, v, group, attention=attention, **how)

        return run

    def sliced(k: int) -> Run:
        def run() -> None:
            slice_columns(sends, x[0], by_owner, k)
            slice_queries(sends, *heads_first, k, attention)

        return run

    message = (sizes.rows // n) * (sizes.wide // n) * 4 * (n - 1)
    project = (lambda: [F.linear(x, w) for w in weights], 3 * message)
    attend = (lambda: attention(*heads_first, None), message)
    return Operation([project, attend], sliced, library, has_ring=False)


def query_split(sizes: Sizes, sends: Sends, group: dist.ProcessGroup) -> Operation:
    """attention_reduce_scatter: own heads of all rows, times (wide, own features), summed over ranks by rows."""
    n, attention = sends.world_size, _attention()
    own, d = sizes.heads // n, sizes.wide // sizes.heads
    q, k_, v = (torch.randn(1, sizes.rows, own, d) for _ in range(3))
    query, key, value = (t.transpose(1, 2).contiguous() for t in (q, k_, v))
    weight = torch.randn(sizes.wide, own * d)

    def project(queries: Tensor) -> Tensor:
        out = attention(queries, key, value, None).permute(2, 0, 1, 3)
        return out.reshape(queries.shape[2], own * d) @ weight.t()

    def sliced(k: int) -> Run:
        chunks = query.chunk(k, 2)
        return lambda: slice_scatter(sends, (sizes.rows // n, sizes.wide), k, lambda c: project(chunks[c]))

    return Operation(
        [(lambda: project(query), (n - 1) * (sizes.rows // n) * sizes.wide * 4)],
        sliced,
        lambda **how: lambda: attention_reduce_scatter(q, k_, v, weight, group, attention=attention, **how),
    )


def gradients(sizes: Sizes, sends: Sends, group: dist.ProcessGroup) -> Operation:
    """The backward of `layers` linear layers, (wide, wide), whose gradients go to the owners of their shards."""

    def make() -> tuple[list[nn.Linear], nn.Sequential]:
        layers = [nn.Linear(sizes.wide, sizes.wide, bias=False) for _ in range(sizes.layers)]
        return layers, nn.Sequential(*layers)

    def backward(module: nn.Sequential) -> Run:
        with pace.unspent():
            y = module(torch.randn(sizes.batch, sizes.wide))
        dy = torch.randn_like(y)

        def run() -> None:
            module.zero_grad()
            y.backward(dy, retain_graph=True)

        return run

    closers: list[Run] = []

    def library(num_last: int) -> Run:
        layers, module = make()
        size, last = layers[0].weight.nbytes, layers[:num_last]
        reducer = GradientReducer(module, _group_of_reducers(), bucket_bytes=size, last=last, sharded=True)
        closers.append(reducer.close)
        run = backward(module)
        return lambda: (run(), reducer.finish())

    def sliced(k: int) -> Run:
        layers, module = make()
        return slice_reduction(sends, layers, k, backward(module))

    sent = sizes.layers * sizes.wide**2 * 4 * (sends.world_size - 1) // sends.world_size
    alone = backward(make()[1])
    return Operation([(alone, sent)], sliced, library, has_ring=False, has_subslices=False, close=closers)


@functools.cache
def _group_of_reducers() -> dist.ProcessGroup:
    """For all reducers of a rank: a group more is threads that ask for messages for ever.

    They take turns: each run ends with a `finish`, which leaves nothing under way.
    """
    return dist.new_group()


OPERATIONS: dict[str, Callable[[Sizes, Sends, dist.ProcessGroup], Operation]] = {
    "gather forward": gather_forward,
    "scatter forward": scatter_forward,
    "column backward": column_backward,
    "column backward, gathered again": column_backward_again,
    "row backward": row_backward,
    "Ulysses": ulysses,
    "query-split attention": query_split,
    "gradient reduction": gradients,
}
