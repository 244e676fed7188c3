"""The loops as events: every rank's products, posts and waits, on links that carry one message at a time.

It follows `gather` and `Scatter` step by step with the same `route`, and gives the time at which every rank
ends. The law is its closed form for equal products; with unequal ones (a causal mask) only the simulation
knows. The hazard: a link here is not shared by messages, and waiting costs no processor. Source: the
schedules of this room.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stretto.overlap.routes import Kind, Route, Schedule, route

__all__ = ["finish_times_s"]


@dataclass
class _Message:
    sent_s: float | None = None
    awaited_s: float | None = None
    arrived_s: float | None = None


Event = tuple[str, float, tuple[int, int], Route]


def _program(
    kind: Kind,
    schedule: Schedule,
    rank: int,
    n: int,
    m: int,
    product_s: Callable[[int, int], float],
    window: int,
) -> Iterator[Event]:
    """One rank's events: ("work", seconds), ("post" or "wait", the transfer's step and sub-slice)."""
    routes = [route(kind, schedule, rank, n, step) for step in range(n)]
    for step, here in enumerate(routes):
        # the own slice is one product, and the sub-slices of its step leave or are awaited together
        pieces = [range(m)] if here.compute == rank else [range(s, s + 1) for s in range(m)]
        for piece in pieces:
            late = window if (kind, schedule) == ("scatter", "direct") else 1
            awaited = range(max(0, step - late), n - 1 if step == n - 1 else step - late + 1)
            work: Event = ("work", product_s(rank, here.compute) / len(pieces), (step, piece[0]), here)
            wait: list[Event] = [("wait", 0.0, (earlier, s), routes[earlier]) for earlier in awaited for s in piece]
            post: list[Event] = [("post", 0.0, (step, s), here) for s in piece if step < n - 1]
            if kind == "gather":
                yield from (*wait, *post, work)
            elif schedule == "ring":
                yield from (work, *wait, *post)
            else:
                yield from (work, *post, *wait)


def finish_times_s(
    kind: Kind,
    schedule: Schedule,
    world_size: int,
    *,
    product_s: Callable[[int, int], float],
    message_s: float,
    num_subslices: int = 1,
    window: int = 2,
) -> list[float]:
    """When every rank has done its last product and has all that it waits for.

    Args:
        kind: "gather" before the product or "scatter" after it.
        schedule: "ring" or "direct".
        world_size: ranks.
        product_s: seconds of the product of a rank for a slice.
        message_s: seconds of a slice's message on its sender's link; sub-slices share it.
        num_subslices: pieces per slice.
        window: of a direct scatter, as in `Scatter`.

    Returns:
        Seconds, by rank, from a common start.
    """
    n, m = world_size, num_subslices
    programs = [list(_program(kind, schedule, rank, n, m, product_s, window)) for rank in range(n)]
    clocks, places, free = [0.0] * n, [0] * n, [0.0] * n
    messages: dict[tuple[int, tuple[int, int]], _Message] = {}
    queues: list[list[_Message]] = [[] for _ in range(n)]
    moved = True
    while moved:
        moved = False
        for rank in range(n):
            while places[rank] < len(programs[rank]):
                what, seconds, key, here = programs[rank][places[rank]]
                if what == "work":
                    clocks[rank] += seconds
                elif what == "post":
                    out = messages.setdefault((rank, key), _Message())
                    out.sent_s = clocks[rank]
                    queues[rank].append(out)
                    messages.setdefault((here.recv_from, key), _Message()).awaited_s = clocks[rank]
                else:
                    ends = [messages[rank, key].arrived_s, messages[here.recv_from, key].arrived_s]
                    if None in ends:
                        break
                    clocks[rank] = max(clocks[rank], *(end for end in ends if end is not None))
                places[rank] += 1
                moved = True
        for rank, queue in enumerate(queues):
            while queue and queue[0].awaited_s is not None:
                message = queue.pop(0)
                assert message.sent_s is not None
                assert message.awaited_s is not None
                free[rank] = max(message.sent_s, message.awaited_s, free[rank]) + message_s / m
                message.arrived_s = free[rank]
                moved = True
    assert all(place == len(program) for place, program in zip(places, programs)), "the schedule deadlocks"
    return clocks
