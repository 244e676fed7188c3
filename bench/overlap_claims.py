"""What `bench.overlap` measured against what it should: the law for every contender, and the targets.

A cell holds, for each contender, seconds by repeat (the last rank's). The best number of sub-slices, or of
chunks, is the one of the least median, on both sides of a comparison. The hazard is a law read as exact where a
column layer gathers its input again: ours then is a bound that the second product of a step can beat.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.intervals import Interval, bootstrap, median_ratio
from stretto.overlap.law import overlapped_s, plain_s, slicing_s

__all__ = ["claims", "law", "predictions", "removed"]

SUBSLICES, CHUNKS = (1, 2, 4), (2, 4, 8)
REAL_OPERATIONS = ("gather forward", "scatter forward", "column backward", "row backward")
Cell = Mapping[str, Any]


def law(
    name: str, parts: Sequence[tuple[float, float]], num_ranks: int, layers: int = 0, operation: str = ""
) -> float | None:
    """Predicted seconds of a contender, from (compute, communication) seconds of each part; None: no law."""
    compute, sent = (sum(values) for values in zip(*parts))
    kind, _, number = name.partition(" ")
    count = int(number) if number.isdigit() else 1
    if name in ("compute", "bare", "ideal"):
        return {"compute": compute, "bare": sent, "ideal": max(compute, sent)}[name]
    is_column = operation.startswith("column backward")
    if is_column and kind in ("slicing", "sends"):
        return _sliced_column_s(count, compute, sent, again=operation != "column backward")
    if name in ("plain", "sends", "collective"):
        return plain_s(compute, sent)
    if kind not in ("slicing", "direct", "ring", "auto", "last"):
        return None
    if layers:
        return _reduction_s(kind, count, compute, sent, num_ranks, layers)
    if operation == "column backward":
        count *= 2  # a piece's message leaves after the first of its two products
    if kind == "slicing":
        return sum(slicing_s(c, s, count) for c, s in parts)
    if kind == "auto":
        ways = [[plain_s(c, s), *(overlapped_s(c, s, num_ranks, count * m) for m in SUBSLICES)] for c, s in parts]
        return sum(map(min, ways))
    return sum(overlapped_s(c, s, num_ranks, count) for c, s in parts)


def _sliced_column_s(count: int, compute: float, sent: float, *, again: bool) -> float:
    """A column layer's backward in chunks: a product, its sends, and the weight's product beside them.

    `again`: half of what is sent gathers x, each chunk beside the products of the one before.
    """
    product = compute / (2 * count)
    if not again:
        return max(compute, product + sent, compute - product + sent / count)
    message = sent / (2 * count)
    clock = free = arrived = message
    for chunk in range(count):
        clock = max(clock, arrived)
        if chunk + 1 < count:
            free = arrived = max(free, clock) + message
        clock += product
        free = max(free, clock) + message
        clock += product
    return max(clock, free)


def _reduction_s(kind: str, count: int, compute: float, sent: float, num_ranks: int, layers: int) -> float:
    """A backward of equal layers (two products each, the first layer one) whose gradients leave meanwhile.

    "slicing": in `count` buckets. "last": layer by layer, of the last `count` only others' rows, own rows after all.
    """
    product, clock, free = compute / (2 * layers - 1), 0.0, 0.0
    for layer in reversed(range(layers)):
        if kind == "last" and layer < count:
            for _ in range(num_ranks - 1):
                clock += product / num_ranks
                free = max(free, clock) + sent / layers / (num_ranks - 1)
            clock += product if layer else 0.0
        else:
            clock += 2 * product if layer else product
            if kind == "last" or layer % (layers // count) == 0:
                free = max(free, clock) + sent / (layers if kind == "last" else count)
    return max(compute, free)


def predictions(cell: Cell) -> dict[str, float | None]:
    """The law of every contender of a cell."""
    parts = list(zip(cell["compute_s"], cell["sent_s"]))
    return {name: law(name, parts, cell["num_ranks"], cell["layers"], cell["operation"]) for name in cell["seconds"]}


def removed(cell: Cell, name: str, against: str) -> Interval:
    """The share of plain's overhead over `against` that a contender does not have, by repeat."""
    seconds = cell["seconds"]
    shares = [(p - t) / (p - i) for p, t, i in zip(seconds[plain(cell)], seconds[name], seconds[against])]
    return bootstrap(lambda chosen: statistics.median(shares[i] for i in chosen), len(shares))


def plain(cell: Cell) -> str:
    """The faster of the ways that hide nothing; a column backward's sends lie beside its weight gradient."""
    hides = cell["operation"].startswith("column backward")
    return _best(cell, ("plain", "collective") if hides else ("plain", "sends", "collective"))


def claims(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """Every target that the cells can speak about: value, target, whether it is met."""
    cells = list(cells)
    asleep = [cell for cell in cells if cell["mode"] == "schedule"]
    real = [cell for cell in cells if cell["mode"] == "real" and cell["num_ranks"] == 2]
    found = [*_law_claims(asleep), *_removal_claims(asleep), *_real_claims(real)]
    return [*found, *_auto_claims([*asleep, *real]), *_slicing_claims([*asleep, *real])]


def _law_claims(cells: Sequence[Cell]) -> Iterable[dict[str, Any]]:
    for num_ranks in sorted({cell["num_ranks"] for cell in cells}):
        ratios = []
        for cell in cells:
            if cell["num_ranks"] == num_ranks:
                laws = predictions(cell)
                names = [*_ours(cell), *(["ring"] if "ring" in laws else [])]
                ratios += [statistics.median(cell["seconds"][n]) / (laws[n] or 0.0) for n in names]
        yield _at_most(f"schedule, {num_ranks} ranks: measured / law, median", statistics.median(ratios), 1.05)


def _removal_claims(cells: Sequence[Cell]) -> Iterable[dict[str, Any]]:
    worst: dict[int, list[tuple[Interval, str]]] = {}
    for cell in cells:
        name = _hiding(cell)
        if name:
            worst.setdefault(cell["num_ranks"], []).append((removed(cell, name, "compute"), cell["name"]))
    for num_ranks, intervals in sorted(worst.items()):
        reached = [interval.reaches(0.98) for interval, _ in intervals]
        least, where = min(intervals, key=lambda pair: pair[0].value)
        yield {
            "what": f"schedule, {num_ranks} ranks: overhead removed where the law hides all, median of cells",
            "value": statistics.median(interval.value for interval, _ in intervals),
            "target": 0.98,
            "cells": len(reached),
            "cells_met": sum(reached),
            "least": {"cell": where, **least.as_dict()},
            "met": all(reached),
        }


def _real_claims(cells: Sequence[Cell]) -> Iterable[dict[str, Any]]:
    for cell in cells:
        name = _hiding(cell)
        if name and cell["operation"] in REAL_OPERATIONS:
            interval = removed(cell, name, "ideal")
            what = f"real, {cell['operation']}, rho {cell['rho']}: share of plain - ideal removed by {name}"
            yield {"what": what, **interval.as_dict(), "target": 0.95, "met": interval.reaches(0.95)}


def _auto_claims(cells: Sequence[Cell]) -> Iterable[dict[str, Any]]:
    ratios = sorted(
        statistics.median(cell["seconds"]["auto"]) / statistics.median(cell["seconds"][plain(cell)])
        for cell in cells
        if "auto" in cell["seconds"]
    )
    if ratios:
        yield _at_most("the automatic choice / plain, median", statistics.median(ratios), 1.00)
        late = ratios[min(len(ratios) - 1, int(0.95 * len(ratios)))]
        yield _at_most("the automatic choice / plain, 95th percentile", late, 1.05)


def _slicing_claims(cells: Sequence[Cell]) -> Iterable[dict[str, Any]]:
    """Where the law says shorter, and where it says as long: there 1 % is for headers, which slicing lacks."""
    found: dict[bool, list[tuple[Interval, str]]] = {True: [], False: []}
    for cell in cells:
        laws = {name: seconds for name, seconds in predictions(cell).items() if seconds is not None}
        ours, sliced = _ours(cell), [f"slicing {k}" for k in CHUNKS if f"slicing {k}" in laws]
        law_of_ours, law_of_sliced = (min(laws[n] for n in names) for names in (ours, sliced))
        if law_of_ours <= law_of_sliced * (1 + 1e-9):
            over, under = (cell["seconds"][_best(cell, names)] for names in (ours, sliced))
            interval = bootstrap(median_ratio(over, under), len(over))
            found[law_of_ours < law_of_sliced * (1 - 1e-9)].append((interval, cell["name"]))
    for is_shorter, target in ((True, 1.0), (False, 1.01)):
        if found[is_shorter]:
            worst, where = max(found[is_shorter], key=lambda pair: pair[0].low)
            yield {
                "what": f"ours / the best slicing, where the law says {'shorter' if is_shorter else 'as long'}, "
                "median of cells",
                "value": statistics.median(interval.value for interval, _ in found[is_shorter]),
                "target": target,
                "cells": len(found[is_shorter]),
                "cells_met": sum(interval.low <= target for interval, _ in found[is_shorter]),
                "worst": {"cell": where, **worst.as_dict()},
                "met": worst.low <= target,
            }


def _hiding(cell: Cell) -> str:
    """Our fastest contender of those whose law leaves nothing to be seen; empty if the law has none."""
    laws = predictions(cell)
    hidden = [name for name in _ours(cell) if (laws[name] or 0) <= (laws["compute"] or 0) * (1 + 1e-9)]
    return _best(cell, hidden) if hidden else ""


def _ours(cell: Cell) -> list[str]:
    """The library's ways without a tail: with m sub-slices, or with so many last layers sliced."""
    return [name for kind in ("direct", "last") for m in SUBSLICES if (name := f"{kind} {m}") in cell["seconds"]]


def _best(cell: Cell, names: Iterable[str]) -> str:
    found = (name for name in names if name in cell["seconds"])
    return min(found, key=lambda name: statistics.median(cell["seconds"][name]))


def _at_most(what: str, value: float, target: float) -> dict[str, Any]:
    return {"what": what, "value": value, "target": target, "met": value <= target}
