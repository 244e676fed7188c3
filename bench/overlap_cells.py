"""Cells of `bench.overlap`: an operation at a ratio of communication to compute, every contender in turn.

Cells that compute run one after another on one link, with the machine to themselves. Cells that sleep need no
processor and run side by side, each on a link of its own, and so can sleep long: a call costs the processors some
milliseconds whatever it moves, and only beside a T_comm of a hundred times that can 98 % of it be seen to go. The
hazard is too many at once, or too short: then one's milliseconds delay another.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from queue import SimpleQueue
from typing import Any

from bench.link import Link, LinkError
from bench.overlap_cases import OPERATIONS, Sizes
from bench.overlap_claims import predictions

__all__ = ["OTHERS", "TARGETED", "Setting", "one_by_one", "side_by_side"]

ASLEEP = Sizes(rows=2048, wide=256, narrow=64, batch=32)
REAL = Sizes(rows=3072, wide=1024, narrow=2048)
TARGETED = ("gather forward", "scatter forward", "column backward", "row backward")
OTHERS = tuple(operation for operation in OPERATIONS if operation not in TARGETED)
SIZES = {
    ("schedule", "Ulysses"): replace(ASLEEP, rows=768, wide=1536),
    ("real", "column backward"): replace(REAL, narrow=1024),
    ("real", "column backward, gathered again"): replace(REAL, narrow=1024),
    ("real", "row backward"): replace(REAL, narrow=1024),
    ("real", "Ulysses"): Sizes(rows=1024, wide=1024, narrow=0),
    ("real", "query-split attention"): Sizes(rows=1024, wide=1024, narrow=0),
    ("real", "gradient reduction"): Sizes(rows=0, wide=512, narrow=0),
}
SECONDS = {2: 0.25, 4: 0.4, 8: 0.6}
"""By ranks, the least that a whole compute sleeps."""
T_COMM_S = {2: 0.38, 4: 0.55, 8: 0.95}
"""By ranks, the least T_comm of which 98 % can be seen to go, where the law hides all."""
POSTS_MORE = {"column backward, gathered again": 2, "Ulysses": 2, "gradient reduction": 3}
"""How many times longer operations sleep that post more: two messages a step, two halves, eight layers."""
LINKS = {2: 2, 4: 2, 8: 2}
"""By ranks, how many cells sleep side by side."""


@dataclass(frozen=True)
class Setting:
    """Cells of a mode: ranks, the ratios of communication to compute, how often, and by how much longer asleep."""

    mode: str
    num_ranks: int
    rhos: tuple[float, ...]
    repeats: int
    operations: tuple[str, ...] = tuple(OPERATIONS)
    longer: float = 1.0

    def problem(self, operation: str, rho: float) -> dict[str, Any]:
        """Plain data for the ranks; asleep, a whole compute takes `seconds`."""
        asleep = self.mode == "schedule"
        return {
            "operation": operation,
            "sizes": asdict(SIZES.get((self.mode, operation), ASLEEP if asleep else REAL)),
            "seconds": self.longer * self._asleep_s(operation, rho) if asleep else 0.0,
            "everything": rho == 0.56,
        }

    def _asleep_s(self, operation: str, rho: float) -> float:
        hidden = T_COMM_S[self.num_ranks] / rho if rho < 1 else 0.0
        return POSTS_MORE.get(operation, 1) * max(SECONDS[self.num_ranks], hidden)


def one_by_one(setting: Setting, tolerance: float) -> Iterator[dict[str, Any]]:
    """Measure every cell of a setting; each as soon as it is there."""
    with Link(setting.num_ranks, tolerance=tolerance) as link:
        for operation in setting.operations:
            for rho in setting.rhos:
                yield _cell(link, setting, operation, rho)


def side_by_side(settings: Sequence[Setting], tolerance: float) -> Iterator[dict[str, Any]]:
    """The same of settings that sleep, as many cells at once as there are links for their ranks; longest first.

    After a `LinkError` none begins any more; those under way are still given, then it is raised.
    """
    found = [(s, operation, rho) for s in settings for operation in s.operations for rho in s.rhos]
    found.sort(key=lambda cell: -cell[0].problem(*cell[1:])["seconds"])
    with ExitStack() as stack:
        free: dict[int, SimpleQueue[Link]] = {}
        pools: dict[int, ThreadPoolExecutor] = {}
        for num_ranks in sorted({setting.num_ranks for setting in settings}):
            num_links = min(LINKS[num_ranks], sum(s.num_ranks == num_ranks for s, *_ in found))
            free[num_ranks], pools[num_ranks] = SimpleQueue(), ThreadPoolExecutor(num_links)
            stack.callback(pools[num_ranks].shutdown)
            for _ in range(num_links):
                free[num_ranks].put(stack.enter_context(Link(num_ranks, tolerance=tolerance)))

        futures: list[Future[dict[str, Any]]] = []
        stack.callback(_cancel, futures)  # before the links close

        def measured(setting: Setting, operation: str, rho: float) -> dict[str, Any]:
            link = free[setting.num_ranks].get()
            try:
                return _cell(link, setting, operation, rho)
            except LinkError:
                _cancel(futures)
                raise
            finally:
                free[setting.num_ranks].put(link)

        futures += [pools[cell[0].num_ranks].submit(measured, *cell) for cell in found]
        failed: LinkError | None = None
        for done in as_completed(futures):
            try:
                yield done.result()
            except CancelledError:
                continue
            except LinkError as error:
                failed = failed or error
        if failed is not None:
            raise failed


def _cancel(futures: Sequence[Future[Any]]) -> None:
    """Those that have not begun."""
    for future in futures:
        future.cancel()


def _cell(link: Link, setting: Setting, operation: str, rho: float) -> dict[str, Any]:
    started = time.perf_counter()
    problem, name = setting.problem(operation, rho), f"{setting.mode}, {setting.num_ranks} ranks, {operation}, {rho}"
    before = link.run("bench.overlap_ranks:alone", problem, 3)
    sent_bytes = before[0]["sent_bytes"]
    compute_s = sum(statistics.median(times) for times in _by_part(before))
    bits_per_s = 8 * sum(sent_bytes) / (rho * compute_s)
    layers = problem["sizes"]["layers"] if operation == "gradient reduction" else 0
    link.set_rate(bits_per_s, min(sent_bytes) // (setting.num_ranks - 1) // max(1, layers))
    patience_s = 600 + 40 * (setting.repeats + 2) * problem["seconds"]  # an automatic choice tries a dozen times
    args = problem, setting.repeats, f"{name}, {bits_per_s:.0f}"
    ranks = link.run("bench.overlap_ranks:cell", *args, timeout_s=patience_s)
    after = link.run("bench.overlap_ranks:alone", problem, 2) if len(sent_bytes) > 1 else None
    cell: dict[str, Any] = {"name": name, **asdict(setting), "operation": operation, "rho": rho, "layers": layers}
    for key in ("seconds", "exposed"):
        kept = {n: [max(turn) for turn in zip(*(rank[key][n] for rank in ranks))] for n in ranks[0][key]}
        cell[key if key == "seconds" else f"{key}_s"] = kept
    whole = statistics.median(cell["seconds"]["compute"])
    parts = [statistics.median(times) for times in _by_part(after)] if after else [1.0]
    cell["compute_s"] = [whole * part / sum(parts) for part in parts]
    cell |= {"sent_bytes": sent_bytes, "sent_s": [8 * sent / bits_per_s for sent in sent_bytes]}
    cell |= {"bits_per_s": bits_per_s, "burst_bytes": link.burst_bytes, "choices": ranks[0]["choices"]}
    cell |= {"law_s": predictions(cell), "took_s": time.perf_counter() - started}
    del cell["rhos"], cell["operations"]
    return cell


def _by_part(ranks: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Seconds of each part by repeat, the slowest rank's."""
    repeats = [[max(part) for part in zip(*turn)] for turn in zip(*(rank["seconds"] for rank in ranks))]
    return [list(part) for part in zip(*repeats)]
