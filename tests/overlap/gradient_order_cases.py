"""What every rank does in tests of when data parallelism sends, waits and multiplies."""

import threading
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.overlap import GradientReducer
from stretto.overlap.buckets import Pieces
from stretto.overlap.lane import Lane
from stretto.overlap.p2p import Call
from stretto.overlap.sliced import SlicedWeight
from tests.overlap.gradient_cases import losses, models


def order_of_events() -> tuple[list[str], list[tuple[str, int]]]:
    """What was sent by when: payload posts in the thread beside gradients and products in the backward."""
    mine, _ = models()
    events: list[str] = []
    own = SlicedWeight.own

    def noted_own(sliced: SlicedWeight) -> Tensor | None:
        events.append("own rows")
        return own(sliced)

    products: list[tuple[str, int]] = []
    reducer = GradientReducer(mine, dist.group.WORLD, bucket_bytes=1, last=mine.first)
    mine.out.weight.register_post_accumulate_grad_hook(lambda _: time.sleep(0.2))
    mine.first.bias.register_post_accumulate_grad_hook(lambda _: events.append("the last ordinary gradient"))
    post = Lane.post

    def noted(lane: Lane, step: int, subslice: int, outgoing: Tensor, incoming: Tensor) -> Any:
        assert threading.current_thread().name.startswith("stretto gradients")
        events.append("sent")
        products.append(("sent", outgoing.numel()))
        return post(lane, step, subslice, outgoing, incoming)

    with mock.patch.object(Lane, "post", noted), mock.patch.object(SlicedWeight, "own", noted_own):
        losses(mine, torch.ones(1, 4, 3, dtype=torch.float64)).sum().backward()
        reducer.finish()
    reducer.close()
    return events, products


def gradients_that_left() -> list[bool]:
    """Whether a layer's gradients are gone when the layers before it have theirs, sharded and replicated."""
    found = []
    for sharded in (True, False):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        reducer = GradientReducer(model, dist.group.WORLD, sharded=sharded, bucket_bytes=1)
        handle = model[0].weight.register_post_accumulate_grad_hook(
            lambda _, later=model[1]: found.append(later.weight.grad is None)
        )
        model(torch.ones(1, 3)).sum().backward()
        reducer.finish()
        handle.remove()
        reducer.close()
    return found


def order_of_sends_and_landings(sharded: bool, late_bound: bool) -> str:
    """ "s" for a bucket's pieces that leave, "l" for pieces that are awaited, of two backwards."""
    mine, _ = models()
    last = [mine.first, mine.shared, mine.out]
    reducer = GradientReducer(
        mine, dist.group.WORLD, bucket_bytes=1, last=last, sharded=sharded, late_bound=late_bound
    )
    done: list[str] = []
    send, land = Pieces.send, Pieces.land

    def noted(name: str, what: Any) -> Any:
        def run(pieces: Pieces, *sent: Any) -> Tensor:
            done.append(name)
            return what(pieces, *sent)

        return run

    with mock.patch.object(Pieces, "send", noted("s", send)), mock.patch.object(Pieces, "land", noted("l", land)):
        for _ in range(2):
            losses(mine, torch.ones(1, 4, 3, dtype=torch.float64)).sum().backward()
            reducer.finish()
        if late_bound:
            reducer.settle(torch.ones(2, dist.get_world_size()))
    reducer.close()
    return "".join(done)


def blocked_in_finish(late_bound: bool) -> float:
    """Seconds blocked in `finish` where the messages take 200 ms."""
    mine, _ = models()
    reducer = GradientReducer(mine, dist.group.WORLD, late_bound=late_bound)
    send = Pieces.send

    def late(pieces: Pieces) -> Tensor:
        time.sleep(0.2)
        return send(pieces)

    with mock.patch.object(Pieces, "send", late):
        losses(mine, torch.ones(1, 4, 3, dtype=torch.float64)).sum().backward()
        start = time.perf_counter()
        reducer.finish()
        blocked = time.perf_counter() - start
    if late_bound:
        reducer.settle(torch.ones(dist.get_world_size()))
    reducer.close()
    return blocked


def exposed_on_a_slow_link(sliced: bool) -> float:
    """Seconds blocked in a backward and `finish` where a slice takes 100 ms on the link and a product 150 ms.

    A product of the sliced layer is stretched; the link carries one message at a time. The layer's weight is
    the only one with messages worth mentioning.
    """
    message_s, product_s, n = 0.1, 0.15, dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64 * n, bias=False), nn.Linear(64 * n, 2))
    reducer = GradientReducer(model, dist.group.WORLD, last=model[0] if sliced else (), sharded=True, bucket_bytes=1)
    free, rows, backward = [0.0], SlicedWeight._rows_of, torch.Tensor.backward
    arrivals: dict[int, float] = {}
    post, wait = Lane.post, Call.wait

    def slow_post(lane: Lane, step: int, subslice: int, outgoing: Tensor, incoming: Tensor) -> Any:
        transfer = post(lane, step, subslice, outgoing, incoming)
        if outgoing.numel() >= 64 * 64:
            free[0] = max(free[0], time.perf_counter()) + message_s
            arrivals[id(transfer)] = free[0]
        return transfer

    def slow_wait(call: Call, transfer: Any) -> None:
        time.sleep(max(0.0, arrivals.get(id(transfer), 0.0) - time.perf_counter()))
        wait(call, transfer)

    def slow_rows(layer: SlicedWeight, owner: int, *kept: Any) -> Tensor:
        time.sleep(product_s)
        return rows(layer, owner, *kept)

    x = torch.randn(4, 64)
    with (
        mock.patch.object(Lane, "post", slow_post),
        mock.patch.object(Call, "wait", slow_wait),
        mock.patch.object(SlicedWeight, "_rows_of", slow_rows),
    ):
        loss = model(x).sum()
        dist.barrier()
        backward(loss)
        reducer.finish()
    reducer.close()
    return reducer.exposed_s
