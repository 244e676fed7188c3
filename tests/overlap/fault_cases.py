"""What every rank does in the tests of faults: calls that must fail, each on a group of its own."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.overlap import (
    GradientReducer,
    all_gather_matmul,
    attention_all_to_all,
    matmul_all_reduce,
    matmul_all_reduce_start,
    matmul_all_to_all,
    matmul_reduce_scatter,
    p2p,
    parallelize,
    replicate_matmul,
    report,
)
from stretto.overlap.norms import features_rms_norms
from stretto.overlap.p2p import Call
from stretto.overlap.products import WeightGradient
from stretto.overlap.transfers import Transfer

Ends = tuple[str, str, str]


@contextmanager
def own_group(timeout_s: float = 30.0) -> Any:
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    yield group
    dist.destroy_process_group(group)


def ends(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def square(group: dist.ProcessGroup, rows: int = 4, k: int = 3, **options: Any) -> Tensor:
    x = torch.ones(rows, k, requires_grad=options.pop("grad", False))
    return all_gather_matmul(x, torch.ones(2, k), group, **options)


def disagree(how: str, bad: int) -> Ends:
    """The error of a call on which rank `bad` disagrees, and of the call after it."""
    with own_group() as group:
        odd = dist.get_rank() == bad
        calls: dict[str, Callable[[], object]] = {
            "rows": lambda: square(group, rows=5 if odd else 4),
            "longer": lambda: square(group, rows=900 if odd else 4),
            "features": lambda: square(group, k=5 if odd else 3),
            "num_subslices": lambda: square(group, num_subslices=2 if odd else 1),
            "schedule": lambda: square(group, schedule="ring" if odd else "direct"),
            "plain": lambda: square(group, schedule="plain" if odd else "direct"),
            "no_grad": lambda: with_grad_mode(not odd, lambda: square(group, grad=True)),
            "gradients": lambda: square(group, grad=odd),
            "keep_gathered": lambda: square(group, grad=True, keep_gathered=odd),
            "sizes": lambda: square(group, sizes=[4] * dist.get_world_size() if odd else "exchange"),
            "dtype": lambda: all_gather_matmul(
                torch.ones(4, 3, dtype=torch.float64 if odd else torch.float32),
                torch.ones(2, 3, dtype=torch.float64 if odd else torch.float32),
                group,
            ),
            "operation": lambda: (
                matmul_reduce_scatter(torch.ones(8, 3), torch.ones(2, 3), group)
                if odd
                else matmul_all_reduce(torch.ones(8, 3), torch.ones(2, 3), group)
            ),
            "total": lambda: matmul_reduce_scatter(torch.ones(8 + odd, 3), torch.ones(2, 3), group, schedule="plain"),
        }
        kind, text = ends(calls[how])
        return kind, text, ends(lambda: square(group))[1]


def with_grad_mode(enabled: bool, call: Callable[[], object]) -> None:
    with torch.set_grad_enabled(enabled):
        call()


def refuse(how: str) -> tuple[str, str, bool]:
    """The error of a call whose input every rank can see to be wrong, and whether the group still works."""
    with own_group() as group:
        x, w = torch.ones(4, 3), torch.ones(2, 3)
        calls: dict[str, Callable[[], object]] = {
            "k": lambda: all_gather_matmul(x, torch.ones(2, 5), group),
            "weight of 3 dimensions": lambda: matmul_reduce_scatter(x, torch.ones(2, 3, 1), group),
            "x of 1 dimension": lambda: all_gather_matmul(torch.ones(3), w, group),
            "feature dim": lambda: all_gather_matmul(x, w, group, dim=1),
            "far dim": lambda: matmul_reduce_scatter(x, w, group, dim=4),
            "dtype": lambda: all_gather_matmul(x, w.double(), group),
            "integers": lambda: all_gather_matmul(x.long(), w.long(), group),
            "bias": lambda: matmul_all_reduce(x, w, group, biases=torch.ones(3)),
            "biases": lambda: replicate_matmul(x, [w, w], group, biases=[None]),
            "no weight": lambda: all_gather_matmul(x, [], group),
            "schedule": lambda: all_gather_matmul(x, w, group, schedule="circle"),
            "num_subslices": lambda: all_gather_matmul(x, w, group, num_subslices=0),
            "sizes": lambda: all_gather_matmul(x, w, group, sizes=[1] * dist.get_world_size()),
            "too few sizes": lambda: all_gather_matmul(x, w, group, sizes=[]),
            "sizes by name": lambda: all_gather_matmul(x, w, group, sizes="guess"),
            "total": lambda: matmul_reduce_scatter(x, w, group, sizes=[1] * dist.get_world_size()),
            "exchange": lambda: matmul_reduce_scatter(x, w, group, sizes="exchange"),
            "one weight": lambda: replicate_matmul(x, w, group),
            "a dim by name": lambda: all_gather_matmul(x, w, group, dim="rows"),
            "no group": lambda: all_gather_matmul(x, w, None),
        }
        kind, text = ends(calls[how])
        return (
            kind,
            text,
            bool(torch.equal(square(group, grad=False), torch.full((4 * len_of(group), 2), 3.0))),
        )


def len_of(group: dist.ProcessGroup) -> int:
    return dist.get_world_size(group)


def refuse_on_one(bad: int) -> Ends:
    with own_group() as group:
        k = 7 if dist.get_rank() == bad else 3
        kind, text = ends(lambda: all_gather_matmul(torch.ones(4, 3), torch.ones(2, k), group))
        return kind, text, ""


def fail_and_stay(bad: int) -> tuple[str, float]:
    """Rank `bad` disagrees; nobody leaves the group until long after."""
    with own_group() as group:
        dist.barrier(group=group)
        start = time.monotonic()
        kind, _ = ends(lambda: square(group, num_subslices=2 if dist.get_rank() == bad else 1))
        seconds = time.monotonic() - start
        time.sleep(8)
        return kind, seconds


def never_come(bad: int) -> Ends:
    with own_group(timeout_s=5) as group:
        if dist.get_rank() == bad:
            time.sleep(6)
            return "", "", ""
        start = time.monotonic()
        return *ends(lambda: square(group)), str(time.monotonic() - start)


def die_while_another_is_awaited(bad: int, late: int) -> tuple[str, str]:
    """Rank `bad` dies within the group's first call, which rank `late` has not made yet; the error and seconds.

    Nobody leaves the group before all know.
    """
    with own_group(timeout_s=20) as group:
        dist.barrier()
        start = time.monotonic()
        if dist.get_rank() == bad:
            threading.Timer(0.5, os._exit, (3,)).start()
        if dist.get_rank() == late:
            time.sleep(1)
        kind, _ = ends(lambda: square(group))
        seconds = time.monotonic() - start
        time.sleep(3)
        return kind, str(seconds)


def open_two_at_once() -> None:
    """Two groups' first calls, in two threads; each rank opens the second while it waits to open the first."""
    with own_group(timeout_s=20) as one, own_group(timeout_s=20) as other:
        groups, opened = [one, other] if dist.get_rank() % 2 else [other, one], p2p.open_words

        def late_for_the_second(group: dist.ProcessGroup, *rest: Any) -> Any:
            time.sleep(0.5 if group is groups[1] else 0)
            return opened(group, *rest)

        dist.barrier()
        with mock.patch.object(p2p, "open_words", late_for_the_second), ThreadPoolExecutor() as threads:
            first, second = (threads.submit(square, group) for group in groups)
            assert torch.equal(first.result(), second.result())


def one_call_more(bad: int) -> Ends:
    """Rank `bad` has one refused call behind it that the others never made."""
    with own_group() as group:
        if dist.get_rank() == bad:
            ends(lambda: square(group, sizes="guess"))
        return *ends(lambda: square(group)), ""


def die(bad: int, what: str) -> Ends:
    """Rank `bad` is gone before the second half of something, or before a second call of it."""
    with own_group() as group:
        n, x = dist.get_world_size(), torch.ones(1, 4, 3, requires_grad=True)
        norm, linear = nn.Sequential(nn.LayerNorm(3)), nn.Linear(3, 2)

        def attention() -> Tensor:
            (q,) = matmul_all_to_all(x, [torch.ones(2 * n, 3)], group, features=[[2] * n])
            return attention_all_to_all(*[q.unflatten(-1, (1, 2))] * 3, group)

        calls: dict[str, Callable[[], Tensor]] = {
            "all_gather_matmul": lambda: square(group, grad=True),
            "matmul_all_to_all": attention,
            "attention_all_to_all": attention,
            "features_rms_norms": lambda: features_rms_norms([x], [None], group, eps=[None], num_features=9)[0],
            "replicated gradients": lambda: norm(x),
            "gradient reduction": lambda: linear(x),
        }
        if what.startswith("replicated"):
            parallelize(norm, {"0": "sequence"}, group)
        reducer = GradientReducer(linear, group) if what.startswith("gradient") else None
        call = calls[what.removesuffix(" backward")]
        y = call()
        square(group)
        if dist.get_rank() == bad:
            os._exit(3)

        def second() -> None:
            if what in ("all_gather_matmul", "matmul_all_to_all", "features_rms_norms"):
                call()
            y.sum().backward()
            if reducer is not None:
                reducer.finish()

        return *ends(second), ""


def fail_between_products(bad: int) -> Ends:
    """Rank `bad` runs into an error of its own in the middle of a call."""
    with own_group() as group:
        x, w = torch.ones(4, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
        y = matmul_reduce_scatter(x, w, group)
        patched = mock.patch.object(WeightGradient, "add", side_effect=MemoryError("no room for a product"))
        with patched if dist.get_rank() == bad else nullcontext():
            return *ends(lambda: (y.sum().backward(), square(group))), ""


def stranger() -> tuple[str, str]:
    group = dist.new_group([0])
    return ends(lambda: square(group))


def ask_for_one_gradient(odd: int) -> None:
    """A backward that reads one gradient here and two there: all are computed everywhere."""
    x, w = torch.ones(4, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    y = all_gather_matmul(x, w, dist.group.WORLD)
    (grad, *_) = torch.autograd.grad(y.sum(), [x] if dist.get_rank() == odd else [x, w])
    assert torch.equal(grad, torch.full((4, 3), 2.0 * dist.get_world_size()))


def unchecked() -> None:
    with own_group() as group, mock.patch.object(Call, "tell", side_effect=AssertionError("a header")):
        square(group, check=False)
        x, w = torch.randn(5, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
        y = matmul_reduce_scatter(x, w, group, check=False, schedule="ring", num_subslices=2)
        y.sum().backward()
        assert torch.isfinite(x.grad).all()
        assert "check=False: no headers" in str(report(group))


def wait_twice() -> tuple[Ends, Ends]:
    """A sum that was lost on its way, waited for again."""
    with own_group() as group:
        pending = matmul_all_reduce_start(torch.ones(4, 3), torch.ones(2, 3), group, check=False)
        dist.barrier(group=group)  # who fails hangs up
        with mock.patch.object(Transfer, "wait", side_effect=RuntimeError("lost on the way")):
            first = *ends(pending.wait), ""
        return first, (*ends(pending.wait), "")
