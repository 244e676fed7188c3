"""The law: how long a product takes with its communication, for each way of hiding it, and which way to take.

For one link a rank, equal slices and no contention, N ranks and m sub-slices, with the time of the whole
product T_comp and of the N - 1 messages T_comm, gather or scatter, ring or direct:

    T = max(T_comp, T_comm + T_comp / (m N)),  so all is hidden exactly if  T_comm <= (1 - 1 / (m N)) T_comp.

The hazard: a product cut in m N pieces is not the product that was measured whole; `choose` takes the times
of the cut ones. Source: derived here and equal to the event simulation in `simulation`; the paper (arXiv
2604.24013) has T_comm <= T_comp, which is not enough at any m.
"""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["MARGIN", "Choice", "choose", "exposed_s", "is_hidden", "overlapped_s", "plain_s", "slicing_s"]

MARGIN = 0.02
"""More pieces must be faster by this share: they cost what nobody measured."""


def overlapped_s(compute_s: float, communication_s: float, world_size: int, num_subslices: int = 1) -> float:
    """Seconds of a product whose communication leaves no tail, ring or direct: the law."""
    if world_size == 1:
        return compute_s
    first = compute_s / (num_subslices * world_size)
    return max(compute_s, communication_s + first)


def plain_s(compute_s: float, communication_s: float) -> float:
    """Seconds of the collective and the product, one after the other."""
    return compute_s + communication_s


def slicing_s(compute_s: float, communication_s: float, num_chunks: int) -> float:
    """Seconds of the product cut in chunks, the collective of each beside the product of its neighbour."""
    return max(compute_s + communication_s / num_chunks, compute_s / num_chunks + communication_s)


def exposed_s(total_s: float, compute_s: float) -> float:
    """Seconds of communication that nothing hides."""
    return total_s - compute_s


def is_hidden(compute_s: float, communication_s: float, world_size: int, num_subslices: int = 1) -> bool:
    """Whether the law leaves nothing of the communication to be seen."""
    return communication_s <= (1 - 1 / (num_subslices * world_size)) * compute_s


@dataclass(frozen=True)
class Choice:
    """What the law picks for one shape, and why."""

    schedule: str
    """"direct" or "plain"; the ring is never predicted to be faster, and its 16-bit sums are less exact."""
    num_subslices: int
    predicted_s: float
    plain_s: float
    """What the plain collective is predicted to take."""
    predicted_exposed_s: float = 0.0
    """Of `predicted_s`, what no product hides."""
    why: str = ""
    """Why nothing is overlapped, if nothing is."""
    overlapped_s: float | None = None
    """What the best of direct was predicted to take."""

    def __str__(self) -> str:
        plain = f"plain {self.plain_s * 1e3:.3g} ms"
        if self.overlapped_s is None:
            return f"{self.schedule}, num_subslices={self.num_subslices}; {plain} predicted"
        direct = f"direct {self.overlapped_s * 1e3:.3g} ms"
        return f"{self.schedule}, num_subslices={self.num_subslices}; {direct}, {plain} predicted"


def choose(
    compute_s: float,
    communication_s: float,
    world_size: int,
    *,
    cut_compute_s: Mapping[int, float] | None = None,
    message_s: float = 0.0,
) -> Choice:
    """The fastest of direct with some number of sub-slices and the plain collective, by prediction.

    Args:
        compute_s: measured seconds of the whole product.
        communication_s: measured seconds of the collective alone.
        world_size: ranks.
        cut_compute_s: for each number m of sub-slices that may be chosen, measured seconds of all m N pieces
            of the product together. None: cutting costs nothing, and m is 1, 2 or 4.
        message_s: fixed seconds of a message, besides its bytes.

    Returns:
        The choice: the fewest, largest pieces that are within `MARGIN` of the fastest; overlap only if it is
        faster than plain.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be at least 1")
    if min(compute_s, communication_s, message_s) < 0:
        raise ValueError(f"negative times: {compute_s}, {communication_s}, {message_s}")
    serial = plain_s(compute_s, communication_s)
    if world_size == 1:
        return Choice("plain", 1, serial, serial, communication_s, "one rank: there is nothing to overlap")
    cut = dict.fromkeys((1, 2, 4), compute_s) if cut_compute_s is None else cut_compute_s
    best: Choice | None = None
    for m, seconds in sorted(cut.items()):
        messages = communication_s + m * (world_size - 1) * message_s
        predicted = overlapped_s(seconds, messages, world_size, m)
        if best is None or predicted < best.predicted_s * (1 - MARGIN):
            best = Choice("direct", m, predicted, serial, predicted - seconds, overlapped_s=predicted)
    if best is not None and best.predicted_s < serial:
        return best
    direct = None if best is None else best.predicted_s
    return Choice("plain", 1, serial, serial, communication_s, "the law predicts a loss", direct)
