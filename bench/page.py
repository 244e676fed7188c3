"""Makes docs/schedules-measured.md from the JSON in bench/results: no figure of that page is typed.

    python -m bench.page [--results FOLDER] [--output FILE]

The hazard is a page older than its results; a test compares the two.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["page"]

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "schedules-measured.md"
RESULTS = ROOT / "bench" / "results"

HEAD = """# The schedules, measured

Made by `python -m bench.page` from the JSON that each section names; do not edit.

All runs: random FLUX transformers, float32, one process, rewards made up, nothing decoded or judged in the timing.
Ratios are native's seconds over the schedule's, medians over interleaved repeats, with 95 % bootstrap intervals.
"""
SPEED = """The ceiling is what a lean schedule could gain at most,
(T F0 + |S|(F1 + B)) / ((T - |S|) F0 + |S|(F1 + B)), with F0 (a forward without gradient), F1 (one with) and B (its
backward) timed between the schedules of the same run.
A target is met when the interval reaches it. *native, replay* is native with the fastest of several replay batches.
"""
MEMORY = """Held: the most bytes at the end of a rollout, counted by unique storages, before or after its reward is
known. Graph peak: the most that autograd kept at a time, update included. Peak resident: of a process of its own,
above its start. One sample a forward.
"""
FIELD = """Who is fastest where. Each cell: the schedules within 3 % of the fastest, and native's seconds over the
fastest's. Five steps; LoRA is of rank 16. Below each map, what the schedules hold, graph of their largest backward
included.
"""


def page(results: Path = RESULTS) -> str:
    """The page as text; a bench without results has no section."""
    lines = [HEAD]
    for name, section in (("schedules", _speed), ("memory", _memory), ("field", _field)):
        if (file := results / f"{name}.json").exists():
            lines += section(json.loads(file.read_text()))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.page", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=PAGE)
    args = parser.parse_args(arguments)
    args.output.write_text(page(args.results))


def _speed(report: dict[str, Any]) -> list[str]:
    lines = ["## Speed", "", _origin("schedules", report), "", SPEED]
    for name, case in report["cases"].items():
        repeats = len(case["probes_s"]["F0"])
        probes = ", ".join(f"{k} {1e3 * statistics.median(v):.1f} ms" for k, v in case["probes_s"].items())
        lines += [
            f"### {name}",
            "",
            f"{case['parameters'] / 1e6:.2f} M parameters, {case['trained_parameters'] / 1e6:.2f} M trained, "
            f"{case['setting']['num_samples']} samples, {case['setting']['rows']} a forward; {probes}; "
            f"{repeats} repeats.",
            "",
            "| schedule | seconds | native / schedule | of the ceiling |",
            "|---|---|---|---|",
        ]
        for label, values in case["seconds"].items():
            share = "" if label.startswith("native") else _interval(case["shares"][label])
            lines.append(
                f"| {label} | {statistics.median(values):.3f} | {_interval(case['ratios'][label])} | {share} |"
            )
        lines += [
            f"| *ceiling* | | {_interval(case['ceiling'])} | |",
            "",
            *_verdicts(case["verdicts"], _speed_verdict),
        ]
    return lines


def _memory(report: dict[str, Any]) -> list[str]:
    lines = ["## Memory", "", _origin("memory", report), "", MEMORY]
    for method, case in report["cases"].items():
        lines += [
            f"### {method}, one gradient {case['gradient_bytes'] / 1e6:.1f} MB",
            "",
            "| schedule | | held MB | graph peak MB | peak resident MB |",
            "|---|---|---|---|---|",
        ]
        for name, shapes in case["rows"].items():
            for shape, row in shapes.items():
                peak = "-" if row["peak_resident"] is None else f"{row['peak_resident'] / 1e6:.0f}"
                held, graph = row["held"] / 1e6, row["graph_peak"] / 1e6
                lines.append(f"| {name} | {_escaped(shape)} | {held:.1f} | {graph:.1f} | {peak} |")
        lines += ["", *_verdicts(case["verdicts"], _memory_verdict)]
    return lines


def _field(report: dict[str, Any]) -> list[str]:
    lines = ["## The field", "", _origin("field", report), "", FIELD]
    maps: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for point in report["cases"].values():
        maps.setdefault((point["method"], point["trained"]), []).append(point)
    for (method, trained), points in maps.items():
        columns = sorted({point["rows"] for point in points})
        head = "".join(f" {rows} a forward |" for rows in columns)
        rule = "|---|---|" + "---|" * len(columns)
        lines += [f"### {method}, {trained} of {points[0]['num_steps']} steps", ""]
        for kind, cell in (("fastest", _winner), ("bytes", _bytes)):
            lines += [f"| width | tokens |{head}", rule]
            for width, tokens in sorted({(point["width"], point["tokens"]) for point in points}):
                here = {p["rows"]: p for p in points if (p["width"], p["tokens"]) == (width, tokens)}
                cells = "".join(f" {cell(here[rows])} |" for rows in columns)
                lines.append(f"| {width} | {tokens} |{cells}")
            lines += ["", "MB:", ""] if kind == "fastest" else [""]
    return lines


def _winner(point: dict[str, Any]) -> str:
    seconds = {label: statistics.median(values) for label, values in point["seconds"].items()}
    return f"{' = '.join(point['winners'])} {seconds['native'] / min(seconds.values()):.2f}"


def _bytes(point: dict[str, Any]) -> str:
    return ", ".join(f"{label} {n / 1e6:.1f}" for label, n in point["bytes"].items())


def _verdicts(verdicts: Sequence[dict[str, Any]], text: Any) -> list[str]:
    return [*(f"- {'met' if verdict['met'] else '**not met**'}: {text(verdict)}" for verdict in verdicts), ""]


def _speed_verdict(verdict: dict[str, Any]) -> str:
    return f"{verdict['what']} {_interval(verdict)}, target {verdict['target']:.2f}"


def _memory_verdict(verdict: dict[str, Any]) -> str:
    note = f" ({verdict['note']})" if verdict["note"] else ""
    return f"{_escaped(verdict['what'])} {verdict['bytes'] / 1e6:.1f} MB, {100 * verdict['share']:+.1f} %{note}"


def _origin(name: str, report: dict[str, Any]) -> str:
    machine = report["machine"]
    torch = machine["packages"]["torch"]
    return (
        f"[bench/results/{name}.json](../bench/results/{name}.json): `{report['command']}` on {report['date'][:10]}, "
        f"commit {(machine['commit'] or 'unknown')[:9]}, {machine['cpu']} with {machine['cpu_cores']} cores, "
        f"torch {torch}{', a quick run' if report['quick'] else ''}."
    )


def _interval(interval: dict[str, float]) -> str:
    return f"{interval['value']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
