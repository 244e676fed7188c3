"""Writes the README's results between its two markers from bench/results/*.json: no figure there is typed.

    python -m bench.readme

The hazard is a README older than its results; a test compares the two.
"""

import json
import statistics
from pathlib import Path

from bench.overlap_claims import REAL_OPERATIONS, plain
from bench.ranks import PHASES, WHOLE

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "bench/results"
BEGIN = "<!-- results: written by `python -m bench.readme` from bench/results/*.json -->\n"
END = "<!-- end of results -->\n"
SPEED = ("retain", "reweight", "two_sum")
SYNC = "4 ranks, full, 0.8 F"


def results(folder=RESULTS):
    """The text between the markers."""
    speed, memory, digits = (
        json.loads((folder / f"{n}.json").read_text()) for n in ("schedules", "memory", "digits")
    )
    parts = [
        _speed(speed),
        _memory(memory),
        _digits(digits),
        _ranks(folder),
        _sync(folder),
        _overlap(folder),
        _llm(folder),
    ]
    return "\n".join(line for part in parts if part for line in [*part, ""])


def written(readme, folder=RESULTS):
    """The README's text with the results in it."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + "\n" + results(folder) + "\n" + END + rest.split(END)[1]


def _speed(report):
    cases = report["cases"]
    any_case = next(iter(cases.values()))
    size = f"{any_case['parameters'] / 1e6:.1f} M parameters"
    lines = [
        f"Seconds of native over seconds of the schedule, rollout and update, on a FLUX transformer of {size} "
        f"([JSON](bench/results/schedules.json), `{report['command']}`, [all of it](docs/schedules-measured.md)):",
        "",
        "| trained | native with batched replay | " + " | ".join(SPEED) + " | ceiling |",
        "|---|---|" + "---|" * (len(SPEED) + 1),
    ]
    for name, case in cases.items():
        ratios = [case["ratios"].get(label) for label in ("native, replay", *SPEED)]
        cells = ["-" if ratio is None else f"{ratio['value']:.2f}" for ratio in ratios]
        lines.append(f"| {name} | {' | '.join(cells)} | {case['ceiling']['value']:.2f} |")
    return lines


def _memory(report):
    lines = [
        f"Held between rollout and update, one sample a forward ([JSON](bench/results/memory.json), "
        f"`{report['command']}`):",
        "",
    ]
    for method, case in report["cases"].items():
        shapes = list(next(iter(case["rows"].values())))
        lines += ["| " + method + " | " + " | ".join(shape.replace("|", r"\|") for shape in shapes) + " |"]
        lines += ["|---|" + "---|" * len(shapes)]
        for schedule in SPEED:
            cells = " | ".join(f"{case['rows'][schedule][shape]['held'] / 1e6:.1f} MB" for shape in shapes)
            lines.append(f"| {schedule} | {cells} |")
        lines.append("")
    return lines[:-1]


def _digits(report):
    lines = [
        "The demo, judged ([JSON](bench/results/digits.json), `python -m bench.digits --threads 1`); the default "
        f"schedule here is {report['summary']['default schedule']}:",
        "",
        "| seed | accuracy | distance to real digits | variety within a class | seconds of training |",
        "|---|---|---|---|---|",
    ]
    runs = [row for row in report["rows"] if row["asked"] == "auto"]
    for row in runs:
        cells = [
            f"{row['before'][f'judge/{name}']:.3f} → {row['after'][f'judge/{name}']:.3f}"
            for name in ("accuracy", "frechet", "spread")
        ]
        lines.append(f"| {row['seed']} | {' | '.join(cells)} | {row['seconds']:.0f} |")
    difference = report["summary"]["largest reward difference, 10 iterations"]
    ratio = report["summary"]["seconds an iteration, native / default"]
    steps = statistics.median(len(row["rewards"]) for row in runs)
    lines += [
        "",
        f"Native's reward curves over the first 10 of {steps:.0f} iterations differ from these by at most "
        f"{difference:.1g}; an iteration takes it {ratio:.2f} times as long (two of eight steps are trained).",
    ]
    return lines


def _ranks(folder):
    if not (folder / "ranks.json").exists():
        return []
    report = json.loads((folder / "ranks.json").read_text())
    cases = {name: case for name, case in report["cases"].items() if name != WHOLE}
    shown = [p for p in PHASES if any(case["seconds"][p] >= 0.005 for case in cases.values())]
    lines = [
        f"One job on 1, 2 and 4 ranks of a machine with {report['cpus']} processors "
        "([JSON](bench/results/ranks.json), `python -m bench.ranks`, then `--whole`): "
        "seconds an iteration and by phase ([metrics](docs/metrics.md)), *blocked* what of them stood still for "
        "gradients or parameters; *difference* is the largest relative one of the first iteration's reward and "
        "gradient norm from one rank's, *noise* whether every iteration drew one rank's. Four ranks share two "
        "processors, and seconds say nothing of machines with more:",
        "",
        f"| the demo | schedule, reduction | an iteration | {' | '.join(shown)} | blocked | difference | noise |",
        "|---|---|---|" + "---|" * (len(shown) + 3),
    ]
    for name, case in cases.items():
        seconds = [case["seconds_an_iteration"], *(case["seconds"][p] for p in shown), case["seconds_blocked"]]
        cells = [f"{value:.2f}" for value in seconds]
        difference, same = max(case["relative_difference"].values()), "the same" if case["same_noise"] else "another"
        told = [
            name,
            f"{case['schedule']}, {case['reduction']}",
            *cells,
            f"{difference:.0e}" if difference else "0",
            same,
        ]
        lines.append(f"| {' | '.join(told)} |")
    if WHOLE in report["cases"]:
        lines += ["", _whole(report["cases"][WHOLE])]
    return lines


def _whole(case):
    before, after = (case[when]["judge/accuracy"] for when in ("before", "after"))
    spent = ", ".join(f"{phase} {seconds:.0f}" for phase, seconds in case["seconds"].items() if seconds >= 0.5)
    return (
        f"The whole demo on two ranks, {case['iterations']} iterations: the judge reads {before:.3f} → {after:.3f} "
        f"after {case['seconds_of_the_command']:.0f} s, of which {spent}."
    )


def _sync(folder):
    """The ablation over ranks, from bench.sync's first cell."""
    if not (folder / "sync.json").exists():
        return []
    report = json.loads((folder / "sync.json").read_text())
    case = report["cases"][SYNC]
    step = {way: statistics.median(seconds["step"]) for way, seconds in case["seconds"].items()}
    blocked = {way: statistics.median(seconds["blocked"]) for way, seconds in case["seconds"].items()}
    ways = [way for way in case["labels"] if "computing" not in way]
    lines = [
        f"An iteration on {case['num_ranks']} ranks, full tuning, on an emulated link where one reduction takes "
        f"{case['rho']:g} forwards, products as sleeps of their measured time ([JSON](bench/results/sync.json), "
        "`python -m bench.sync --emulate`, [all of it](docs/many-ranks-measured.md)):",
        "",
        "| | ms | of it blocked for gradients | its time over that of *reweight, late* |",
        "|---|---|---|---|",
    ]
    for way in ways:
        ratio = step[way] / step["reweight, late"]
        lines.append(f"| {way} | {step[way] * 1e3:.0f} | {blocked[way] * 1e3:.1f} | {ratio:.2f} |")
    return lines


def _overlap(folder):
    if not (folder / "overlap.json").exists():
        return []
    report = json.loads((folder / "overlap.json").read_text())
    lines = [
        "Milliseconds of products with their communication, 2 ranks on an emulated link, T_comm = 0.56 T_comp "
        "([JSON](bench/results/overlap.json), `python -m bench.overlap --emulate`, "
        "[all of it](docs/overlap-measured.md)); *ideal* computes while as many bytes move that nobody needs:",
        "",
        "| | compute alone | ideal | ours | best slicing | plain |",
        "|---|---|---|---|---|---|",
    ]
    for operation in REAL_OPERATIONS:
        cell = report["cases"].get(f"real, 2 ranks, {operation}, 0.56")
        if cell:
            medians = {name: 1e3 * statistics.median(seconds) for name, seconds in cell["seconds"].items()}
            ours = min(v for n, v in medians.items() if n.startswith("direct") and n[7:].isdigit())
            slicing = min(v for n, v in medians.items() if n.startswith("slicing"))
            values = [medians["compute"], medians["ideal"], ours, slicing, medians[plain(cell)]]
            lines.append(f"| {operation} | " + " | ".join(f"{value:.0f}" for value in values) + " |")
    return lines


def _llm(folder):
    if not (folder / "llm.json").exists():
        return []
    report = json.loads((folder / "llm.json").read_text())
    lines = [
        "A Llama on 2 ranks, milliseconds a step, at a link's rate where plain exposes about 0.56 of the compute "
        "([JSON](bench/results/llm.json), `python -m bench.llm`, [all of it](docs/overlap-measured.md)):",
        "",
        "| | ideal | ours | best slicing | plain | of plain - ideal, ours removes |",
        "|---|---|---|---|---|---|",
    ]
    for case, result in report["cases"].items():
        steps = {way: 1e3 * found["step_s"]["value"] for way, found in result["ways"].items()}
        slicing = min((v for way, v in steps.items() if way.startswith("slicing")), default=float("nan"))
        share = result["removed_of_plain_minus_ideal"]
        removed = f"{share['value']:.0%} [{share['low']:.0%}, {share['high']:.0%}]"
        values = " | ".join(f"{value:.0f}" for value in (steps["ideal"], steps["ours"], slicing, steps["plain"]))
        lines.append(f"| {case} | {values} | {removed} |")
    return lines


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
