"""One cell of `bench.overlap`, in a rank: every contender once a repeat, in an order that rotates.

All ranks start a contender at one instant and tell when they were done; the parent takes the last. What moves
unneeded is waited for as well, so nothing is left on the link for the next. The hazard is the collector of
garbage: it is off while contenders run.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from bench.link import start_together
from bench.overlap_cases import OPERATIONS, Operation, Sizes
from bench.sleeping import asleep, pace
from bench.slicing import Run, Sends, beside
from stretto.overlap import GradientReducer
from stretto.overlap.p2p import Call, peers_of

__all__ = ["alone", "cell"]

SLICES = (2, 4, 8)
SUBSLICES = (1, 2, 4)


def alone(problem: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Bytes sent in each part of an operation, and seconds of its compute, (repeats, parts); reckoned if asleep."""
    with _operation(problem) as operation:
        runs = [run for run, _ in operation.parts]
        if problem["seconds"]:
            seconds = [[_reckoned(run) for run in runs]]
        else:
            seconds = [[_timed(run)["end"] for run in runs] for _ in range(repeats + 1)][1:]
        return {"sent_bytes": [sent for _, sent in operation.parts], "seconds": seconds}


def cell(problem: dict[str, Any], repeats: int, key: str) -> dict[str, dict[str, Any]]:
    """For each contender and repeat: when this rank was done after the common start, and waited how long.

    "seconds" and "exposed" by contender; "choices": of the automatic one, by operation. What is not asleep runs once
    uncounted; asleep only the automatic choice does, which is made then.
    """
    with _operation(problem) as operation, _waits_counted():
        found = dict(_contenders(operation, problem, key))
        for name, run in found.items():
            if not problem["seconds"] or name == "auto":
                run()
        times: dict[str, list[dict[str, float]]] = {name: [] for name in found}
        gc.collect()
        gc.disable()
        try:
            for repeat in range(repeats):
                order = list(found)
                turn = repeat % len(order)
                for name in (*order[turn:], *order[:turn]):
                    times[name].append(_timed(found[name]))
        finally:
            gc.enable()
        for close in operation.close:
            close()
        chosen = peers_of(dist.group.WORLD).choices.items()
        choices = {operation: str(choice) for (operation, named, _), choice in chosen if named == key}
        seconds, exposed = ({n: [t[k] for t in turns] for n, turns in times.items()} for k in ("end", "exposed"))
        return {"seconds": seconds, "exposed": exposed, "choices": choices}


def _contenders(operation: Operation, problem: dict[str, Any], key: str) -> Iterator[tuple[str, Run]]:
    sends = Sends(dist.group.WORLD)
    yield "compute", operation.compute
    yield "ideal", beside(sends, operation.sent_bytes, operation.compute)
    if not problem["seconds"] or not operation.has_subslices:
        yield "sends", operation.slicing(1)  # asleep it is as long as "plain"
    for k in SLICES:
        yield f"slicing {k}", operation.slicing(k)
    if operation.has_subslices:
        yield "plain", operation.library(schedule="plain")
        for m in SUBSLICES:
            yield f"direct {m}", operation.library(num_subslices=m)
    else:
        for m in SUBSLICES:
            yield f"last {m}", operation.library(num_last=m)
    if operation.has_ring:
        yield "ring", operation.library(schedule="ring")
    if operation.has_subslices and (not problem["seconds"] or dist.get_world_size() < 8):  # its trials are long
        yield "auto", operation.library(schedule="auto", tuned_as=key)
    if not problem["everything"]:
        return
    yield "bare", beside(sends, operation.sent_bytes, lambda: None)
    if operation.collective is not None:
        yield "collective", operation.collective
    if operation.has_subslices:
        yield "direct 1, no headers", operation.library(check=False)


@contextmanager
def _operation(problem: dict[str, Any]) -> Iterator[Operation]:
    """The operation of a problem; asleep, its whole compute takes `problem["seconds"]`."""
    torch.manual_seed(0)
    with asleep() if problem["seconds"] else nullcontext():
        make = OPERATIONS[problem["operation"]]
        operation = make(Sizes(**problem["sizes"]), Sends(dist.group.WORLD), dist.group.WORLD)
        if problem["seconds"]:
            pace.seconds_per_flop = problem["seconds"] / _flops(operation.compute)
        yield operation


def _flops(compute: Run) -> int:
    """Of a compute that is asleep, without its time."""
    with pace.unspent():
        pace.flops = 0
        compute()
        return pace.flops


def _reckoned(compute: Run) -> float:
    return pace.seconds_per_flop * _flops(compute)


def _timed(run: Run) -> dict[str, float]:
    start = start_together()
    Sends.exposed_s = 0.0
    run()
    return {"end": time.monotonic() - start, "exposed": Sends.exposed_s}


@contextmanager
def _waits_counted() -> Iterator[None]:
    """The seconds that this thread is blocked in the library's waits are counted with the baselines' own."""
    mine = threading.current_thread()

    def counted(wait: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return wait(*args)
            finally:
                if threading.current_thread() is mine:
                    Sends.exposed_s += time.perf_counter() - start

        return run

    call_waits, reducer_waits = Call.wait, GradientReducer._awaited
    Call.wait = counted(call_waits)  # type: ignore[method-assign]
    GradientReducer._awaited = counted(reducer_waits)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Call.wait = call_waits  # type: ignore[method-assign]
        GradientReducer._awaited = reducer_waits  # type: ignore[method-assign]
