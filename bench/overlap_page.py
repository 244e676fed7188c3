"""Makes docs/overlap-measured.md from the JSON in bench/results: no figure of that page is typed.

    python -m bench.overlap_page

The hazard is a page older than its results; a test compares the two. A result that is not there leaves its section
out.
"""

import json
import statistics
from pathlib import Path

from bench.overlap_cases import OPERATIONS
from bench.overlap_claims import plain

__all__ = ["page"]

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "overlap-measured.md"
RESULTS = ROOT / "bench" / "results"

HEAD = """# Overlap, measured

Made by `python -m bench.overlap_page` from the JSON that each section names; do not edit. What the columns mean and
how the library works is in [overlap.md](overlap.md).

One machine of 2 cores, float32, gloo; ranks in network namespaces on links of a set rate. No GPU figure is here
because none was measured.
"""
CLAIMS = """## Claims of the paper, and here

The paper (arXiv 2604.24013) measured forwards on 4 accelerators at a ratio of communication to compute of about 0.56;
dtype and link are not stated. Here every figure is this machine's, forward and backward.

| claim | here | command |
|---|---|---|
"""
CELLS = """## The schedules on an emulated link ([JSON](../bench/results/overlap.json))

Made by `COMMAND`.

Milliseconds, median over interleaved repeats, of the slowest rank. *asleep*: every product is a sleep, so that cores
are not what is measured, and cells run side by side on links of their own; *real*: products. rho is T_comm / T_comp.
*ideal* computes while as many bytes move that nobody needs; *plain* hides nothing (sends all at once; at rho 0.56 the
collective where that is faster); *law* is the law's time for the best of ours. With 4 ranks on 2 cores one rank's
waiting is another's computing: no target.
"""
OURS = ("direct 1", "direct 2", "direct 4", "ring")


def page(results=RESULTS):
    """The whole page."""
    overlap, llm, sums = (_read(results / f"{name}.json") for name in ("overlap", "llm", "sums"))
    parts = [HEAD, CLAIMS + "\n".join(_claims(overlap, llm)) + "\n"]
    parts += [_targets(overlap, llm), _llm(llm), _sums(sums), _cells(overlap)]
    return "\n".join(part for part in parts if part)


def _read(path):
    return json.loads(path.read_text()) if path.exists() else None


def _claims(overlap, llm):
    rows = []
    if overlap:
        asleep = [c for c in overlap["claims"] if c["what"].startswith("schedule") and "removed" in c["what"]]
        real = [c for c in overlap["claims"] if c["what"].startswith("real")]
        spread = ", ".join(f"{_ranks(c)} ranks {c['value']:.1%}" for c in asleep)
        rows.append(f"| no tail: 99.7 to 99.8 % of the overhead removed | asleep, median of cells: {spread} | ")
        if real:
            met = sum(c["met"] for c in real)
            least, most = min(c["value"] for c in real), max(c["value"] for c in real)
            share = f"{least:.0%} to {most:.0%} of plain - ideal"
            here = f"real products, 2 ranks: {share}, {met} of {len(real)} intervals reach 95 %"
            rows.append(f"| the same with real products | {here} | ")
        sliced = next((c for c in overlap["claims"] if c["what"].startswith("ours / the best slicing")), None)
        if sliced:
            told = f"median of the {sliced['cells']} cells where the law says shorter"
            here = f"{sliced['value']:.3f} of the best slicing's time, {told}"
            rows.append(f"| 8.1 % less than slicing (78 to 85 % removed) | {here} | ")
        rows = [row + "`python -m bench.overlap --emulate` |" for row in rows]
    if llm:
        for case, result in llm["cases"].items():
            here = f"{result['shorter_than_plain']['value']:.1%} less at rho {result['rho']['value']:.2f}"
            rows.append(f"| 35.0 to 40.2 % less end to end | {case}: {here} | `python -m bench.llm` |")
    rows.append("| exact | operations and gradients, float64, within 1e-12 of one process | `pytest tests/overlap` |")
    rows.append("| training and inference | both, above | |")
    return rows


def _ranks(claim):
    return claim["what"].split(",")[1].split()[0]


def _targets(overlap, llm):
    rows = [
        "## Targets\n",
        "A target beside an interval is met where the interval reaches it.\n",
        "| what | measured | target | met |",
        "|---|---|---|---|",
    ]
    for claim in overlap["claims"] if overlap else ():
        interval = f" [{claim['low']:.3f}, {claim['high']:.3f}]" if "low" in claim else ""
        cells = f" ({claim['cells_met']} of {claim['cells']} cells)" if "cells" in claim else ""
        met = "yes" if claim["met"] else "no"
        rows.append(f"| {claim['what']} | {claim['value']:.3f}{interval}{cells} | {claim['target']:.2f} | {met} |")
    for what, claim in llm["claims"].items() if llm else ():
        figure, met = claim["figure"], "yes" if claim["holds"] else "no"
        if isinstance(figure, dict):
            known = f"{figure['value']:.3f} [{figure['low']:.3f}, {figure['high']:.3f}]"
        else:
            known = f"{figure:.3f}"
        rows.append(f"| {what} | {known} | {claim['target']:.2f} | {met} |")
    return "\n".join(rows) + "\n" if len(rows) > 4 else ""


def _llm(llm):
    if not llm:
        return ""
    rows = [
        f"## A language model ([JSON](../bench/results/llm.json), `{llm['command']}`)\n",
        "A Llama on 2 ranks; at the link's rate plain's exposed communication is rho of the whole step's compute.",
        "MFU against the matrix rate measured in the same run. *removed*: of plain - ideal, with its 95 % interval.",
        "Cases were measured in several runs: the shape of each stands with it.",
    ]
    for case, result in llm["cases"].items():
        share, shape = result["removed_of_plain_minus_ideal"], result["shape"]
        interval = f"{share['value']:.1%} [{share['low']:.1%}, {share['high']:.1%}]"
        rows += [
            f"\n**{case}**, {shape['batch']} x {shape['length']} tokens, "
            f"{shape['layers']} layers of {shape['hidden']}, "
            f"rho {result['rho']['value']:.2f}, {result['matrix_flops_per_s'] / 1e9:.1f} Gflop/s; ours "
            f"removes {interval}\n",
            "| way | step, ms | tokens/s | MFU |",
            "|---|---|---|---|",
        ]
        for way, found in result["ways"].items():
            step, mfu = 1e3 * found["step_s"]["value"], found["mfu"]
            rows.append(f"| {way} | {step:.0f} | {found['tokens_per_s']:.0f} | {mfu:.1%} |")
    rows += _decoding(llm)
    return "\n".join(rows) + "\n"


def _decoding(llm):
    found = llm.get("decode")
    if not found:
        return []
    told = "; ".join(
        f"{way} {1e3 * row['s_per_token']:.0f} ms a token, calls {row['calls']}" for way, row in found.items()
    )
    return [f"\nDecoding with a cache, one row a step on 2 ranks: {told}."]


def _sums(sums):
    if not sums:
        return ""
    rows = [
        f"## The error of 16-bit sums ([JSON](../bench/results/sums.json), `{sums['command']}`)\n",
        "Relative root mean square error of a reduce-scatter; the last column rounds the exact sum once.\n",
        "| dtype | ranks | ring, rounded at each hop | direct, float32 sum | one rounding |",
        "|---|---|---|---|---|",
    ]
    rows += [
        f"| {r['dtype']} | {r['ranks']} | {r['ring']:.2e} | {r['direct']:.2e} | {r['rounding']:.2e} |"
        for r in sums["rows"]
    ]
    return "\n".join(rows) + "\n"


def _cells(overlap):
    if not overlap:
        return ""
    rows = [CELLS.replace("COMMAND", overlap["command"])]
    head = ["rho", "compute", "ideal", "plain", "best slicing", *OURS, "auto", "waited", "best of ours", "law"]
    groups = {}
    for cell in sorted(overlap["cases"].values(), key=_place):
        groups.setdefault((cell["mode"], cell["num_ranks"], cell["operation"]), []).append(cell)
    for (mode, num_ranks, operation), cells in groups.items():
        how = "asleep" if mode == "schedule" else "real"
        rows += [
            f"\n**{operation}**, {how}, {num_ranks} ranks\n",
            "| " + " | ".join(head) + " |",
            "|---" * len(head) + "|",
        ]
        rows += [_cell(cell) for cell in cells]
    return "\n".join(rows) + "\n"


def _place(cell):
    return cell["mode"] == "real", cell["num_ranks"], list(OPERATIONS).index(cell["operation"]), cell["rho"]


def _cell(cell):
    medians = {name: statistics.median(seconds) for name, seconds in cell["seconds"].items()}
    ours = [n for n in medians if n in OURS or n.startswith("last")]
    best = min(ours, key=medians.__getitem__)
    values = [
        medians["compute"],
        medians.get("ideal"),
        medians[plain(cell)],
        min((v for n, v in medians.items() if n.startswith("slicing")), default=None),
        *(medians.get(name) for name in OURS),
        medians.get("auto"),
        statistics.median(cell["exposed_s"][best]),
        medians[best],
        min((cell["law_s"][n] for n in ours if cell["law_s"][n] is not None), default=None),
    ]
    texts = ["-" if value is None else f"{1e3 * value:.1f}" for value in values]
    return f"| {cell['rho']} | " + " | ".join(texts) + " |"


def main():
    PAGE.write_text(page())
    print(f"written to {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
