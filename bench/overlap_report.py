"""What `bench.overlap` shows: a table for each cell, the file, and measured against the law as a plot."""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.parts import write_part

__all__ = ["merged", "plot", "table", "write"]


def table(cell: Mapping[str, Any]) -> str:
    """A cell as text: seconds with spread, what is exposed beside compute, seconds waited, the law."""
    compute = statistics.median(cell["seconds"]["compute"])
    rate, sent = cell["bits_per_s"] / 1e6, sum(cell["sent_s"])
    lines = [
        f"\n{cell['name']}: {rate:.0f} Mbit/s, burst {cell['burst_bytes']} bytes, T_comp {1e3 * compute:.1f} ms, "
        f"T_comm {1e3 * sent:.1f} ms, {cell['repeats']} repeats, {cell['took_s']:.1f} s",
        f"  {'ms':<22}{'median':>9}{'least':>9}{'most':>9}{'exposed':>9}{'waited':>9}{'law':>9}{'of law':>8}",
    ]
    for name, seconds in cell["seconds"].items():
        median, predicted = statistics.median(seconds), cell["law_s"][name]
        waited = statistics.median(cell["exposed_s"][name])
        values = (median, min(seconds), max(seconds), median - compute, waited)
        of_law = "" if predicted is None else f"{1e3 * predicted:>9.1f}{median / predicted:>8.3f}"
        lines.append(f"  {name:<22}" + "".join(f"{1e3 * value:>9.1f}" for value in values) + of_law)
    lines += [f"  auto: {operation}: {choice}" for operation, choice in cell["choices"].items()]
    return "\n".join(lines)


def merged(file: Path | None, cells: dict[str, Any]) -> dict[str, Any]:
    """The cells of a file, if it is there, and those that were measured now."""
    before = json.loads(file.read_text())["cases"] if file and file.exists() else {}
    return before | cells


def write(file: Path | None, figures: dict[str, Any], cells: dict[str, Any], is_part: bool) -> None:
    """As every bench, with the machine, date, commit and command."""
    write_part(file, "overlap", figures, cells, is_part)


def plot(cells: Mapping[str, Any], file: Path) -> None:
    """Measured against predicted time, both over compute, a panel for each mode and number of ranks."""
    from matplotlib.figure import Figure

    panels = sorted({(cell["mode"], cell["num_ranks"]) for cell in cells.values()})
    figure = Figure(figsize=(4 * len(panels), 4), layout="constrained")
    marks = {"direct 1": "o", "direct 2": "s", "direct 4": "^", "ring": "x", "slicing 4": ".", "plain": "+"}
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        mine = [cell for cell in cells.values() if (cell["mode"], cell["num_ranks"]) == panel]
        for name, mark in marks.items():
            held = [cell for cell in mine if name in cell["seconds"]]
            over = [sum(cell["compute_s"]) for cell in held]
            laws = [cell["law_s"][name] / whole for cell, whole in zip(held, over)]
            measured = [statistics.median(cell["seconds"][name]) / whole for cell, whole in zip(held, over)]
            axes.plot(laws, measured, mark, label=name, alpha=0.7)
        axes.axline((1, 1), slope=1, color="gray", linewidth=0.8)
        axes.set(title=f"{panel[0]}, {panel[1]} ranks", xlabel="law / compute", ylabel="measured / compute")
    axes.legend()
    figure.savefig(file)
