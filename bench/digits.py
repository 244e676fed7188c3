"""The demo over several seeds, native against the default schedule: the same curves, in less time.

    python -m bench.digits [--seeds 0 1 2] [--whole-native 0 1 2] [--threads N] [--quick] [--json FILE [--append]]

For every seed the recipe runs once with `native` and once with the default, in turn, each in a process of its own.
Native stops after 12 iterations on seeds that are not in --whole-native: enough to compare curves. Prints the
judge before and after, the largest difference of the reward curves over the first 10 iterations, and the seconds
of training (evaluation apart) until the judge reads .80.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.record import write_result

ROOT = Path(__file__).parent.parent
TARGET_ACCURACY = 0.80
SHORT = 12


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=0, help="default: the recipe's")
    parser.add_argument("--every", type=int, default=10, help="iterations between evaluations")
    parser.add_argument("--threads", type=int, default=0, help="default: torch's own choice")
    parser.add_argument("--whole-native", type=int, nargs="*", help="seeds that native runs whole; default: all")
    parser.add_argument("--append", action="store_true", help="add the seeds to what the file holds")
    parser.add_argument("--quick", action="store_true", help="one seed, few iterations")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.iterations, arguments.every = [0], 2, 1
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            for schedule in ("native", "auto"):
                is_whole = schedule == "auto" or arguments.whole_native is None or seed in arguments.whole_native
                row = run(Path(folder) / f"{schedule}-{seed}", schedule, seed, arguments, is_whole=is_whole)
                rows.append(row)
                print(line(row), flush=True)
    if arguments.append and arguments.json.exists():
        rows = sorted(json.loads(arguments.json.read_text())["rows"] + rows, key=lambda row: row["seed"])
    summary = summarise(rows)
    for name, value in summary.items():
        print(f"{name:<44}{value}")
    write_result(arguments.json, {"rows": rows, "summary": summary})


def run(folder, schedule, seed, arguments, *, is_whole):
    """One training run in a process of its own, read back from its metrics."""
    command = [sys.executable, "-m", "stretto", "train", str(ROOT / "recipes/digits.toml")]
    settings = {
        "run.folder": folder,
        "run.seed": seed,
        "schedule.name": schedule,
        "evaluation.every": arguments.every,
        "run.threads": arguments.threads,
    }
    if arguments.iterations or not is_whole:
        settings["run.iterations"] = arguments.iterations or SHORT
    for name, value in settings.items():
        command += [f"--{name}", str(value)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [sum(v for k, v in entry["seconds"].items() if k != "evaluation") for entry in lines]
    reached = [i for i, e in enumerate(lines) if e.get("evaluation", {}).get("judge/accuracy", 0) >= TARGET_ACCURACY]
    return {
        "seed": seed,
        "asked": schedule,
        "is_whole": is_whole,
        "schedule": lines[0]["schedule"],
        "rewards": [entry["reward"] for entry in lines],
        "before": lines[0]["evaluation_at_start"],
        "after": lines[-1]["evaluation"],
        "seconds": sum(seconds),
        "seconds_an_iteration": statistics.median(seconds),
        "seconds_to_target": sum(seconds[: reached[0] + 1]) if reached else None,
    }


def line(row):
    """One run as a line of text."""
    before, after = row["before"], row["after"]
    figures = "  ".join(
        f"{name} {before[f'judge/{name}']:.3f} -> {after[f'judge/{name}']:.3f}"
        for name in ("accuracy", "frechet", "spread")
    )
    reached = "never" if row["seconds_to_target"] is None else f"{row['seconds_to_target']:.1f} s"
    return f"seed {row['seed']}  {row['schedule']:<9}{figures}  {row['seconds']:.1f} s, judge at .80 after {reached}"


def summarise(rows):
    """Native against the default over the seeds."""
    native = [row for row in rows if row["asked"] == "native"]
    default = [row for row in rows if row["asked"] == "auto"]
    curves = [max(abs(a - b) for a, b in zip(n["rewards"][:10], d["rewards"][:10])) for n, d in zip(native, default)]
    whole = [row for row in rows if row["is_whole"]]
    accuracies = [[row["after"]["judge/accuracy"] for row in side if row["is_whole"]] for side in (native, default)]
    frechet = [row["after"]["judge/frechet"] / row["before"]["judge/frechet"] for row in whole]
    summary = {
        "default schedule": default[0]["schedule"],
        "largest reward difference, 10 iterations": max(curves),
        "accuracy after, native (mean)": statistics.mean(accuracies[0]),
        "accuracy after, default (mean)": statistics.mean(accuracies[1]),
        "accuracy after, least of all": min(accuracies[0] + accuracies[1]),
        "frechet after / before, largest": max(frechet),
        "seconds an iteration, native / default": statistics.median(
            n["seconds_an_iteration"] / d["seconds_an_iteration"] for n, d in zip(native, default)
        ),
    }
    pairs = [(n, d) for n, d in zip(native, default) if n["seconds_to_target"] and d["seconds_to_target"]]
    if pairs:
        summary["seconds until the judge reads .80, native / default"] = statistics.median(
            n["seconds_to_target"] / d["seconds_to_target"] for n, d in pairs
        )
    return summary


if __name__ == "__main__":
    main()
