"""One job, the demo, on 1, 2 and 4 ranks of this machine: the same samples and gradient, and what time goes where.

    python -m bench.ranks [--whole] [--ways NAME ...] [--ranks 1 2 4] [--iterations N] [--quick] [--json FILE]

Each number of ranks runs the recipe as a user would, by torchrun, one thread a rank, for a few iterations, of which
the first is left out of the seconds: as the recipe says, and ("one by one") with 4 prompts, one sample a forward and
reweight, whose gradients leave late. --whole instead runs the recipe to its end on two ranks, judged before and
after. The hazard: ranks share this machine's processors and its memory's bandwidth, so seconds tell nothing of
machines with a processor for every rank.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.parts import write_part

__all__ = ["PHASES", "summarise", "whole"]

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes/digits.toml"
PHASES = ("rollout", "decode", "reward", "backward", "gather_rewards", "update", "reduction", "optimizer")
WAYS = {
    "recipe": {},
    "one by one": {"schedule.name": "reweight", "sampling.samples_per_forward": 1, "prompts.per_iteration": 4},
}
WHOLE = "whole, 2 ranks"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", action="store_true", help="the recipe to its end on two ranks")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--iterations", type=int, default=7, help="the first, which warms up, included")
    parser.add_argument("--quick", action="store_true", help="2 iterations, and --whole 2 as well")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.whole:
        settings = {"run.iterations": 2, "evaluation.every": 1} if options.quick else {}
        cases = {WHOLE: whole(*run(2, settings))}
    else:
        cases = short(options.ways, options.ranks, 2 if options.quick else options.iterations)
    for name, case in cases.items():
        print(f"{name}: {json.dumps(case)}")
    write_part(options.json, "ranks", {"cpus": os.cpu_count()}, cases, is_part=True)


def short(ways, ranks, iterations):
    """A case for every way and number of ranks, compared with the first number's."""
    cases = {}
    for way in ways:
        runs = {n: run(n, {"run.iterations": iterations, "evaluation.every": 0, **WAYS[way]})[0] for n in ranks}
        first = runs[ranks[0]]
        cases |= {
            f"{way}, {n} rank{'s' * (n > 1)}": {"num_ranks": n, **summarise(lines, first)}
            for n, lines in runs.items()
        }
    return cases


def run(num_ranks, settings):
    """The metrics of a run on as many ranks, its settings beside the recipe's, and the seconds of the command."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    with tempfile.TemporaryDirectory() as folder:
        words = {"run.folder": f"{folder}/run", "run.threads": 1, "run.device": "cpu", **settings}
        command += ["-m", "stretto", "train", str(RECIPE), *(w for k, v in words.items() for w in (f"--{k}", str(v)))]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        start = time.monotonic()
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            sys.exit(f"{num_ranks} ranks ended with exit code {ended.returncode}:\n{ended.stderr[-2000:]}")
        seconds = time.monotonic() - start
        return [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()], seconds


def summarise(lines, one):
    """What a run's metrics say, `one` being those of the run that it is compared with.

    Seconds are rank 0's, medians over all iterations but the first; differences are relative, of the first iteration,
    before any step enlarges rounding.
    """
    counted = lines[1:] or lines
    difference = {name: abs(lines[0][name] / one[0][name] - 1) for name in ("reward", "grad_norm")}
    return {
        "schedule": lines[0]["schedule"],
        "reduction": lines[0]["reduction"],
        "seconds_an_iteration": statistics.median(total(line) for line in counted),
        "seconds": {p: statistics.median(line["seconds"].get(p, 0.0) for line in counted) for p in PHASES},
        "seconds_blocked": statistics.median(line["seconds"].get("reduction_blocked", 0.0) for line in counted),
        "relative_difference": difference,
        "same_noise": [line["noise_fingerprint"] for line in lines] == [line["noise_fingerprint"] for line in one],
    }


def whole(lines, seconds):
    """What a run to its end says: the judge before and after, and the seconds of each phase in sum."""
    return {
        "schedule": lines[0]["schedule"],
        "reduction": lines[0]["reduction"],
        "iterations": len(lines),
        "before": lines[0]["evaluation_at_start"],
        "after": lines[-1]["evaluation"],
        "seconds_of_training": sum(total(line) for line in lines),
        "seconds": {p: sum(line["seconds"].get(p, 0.0) for line in lines) for p in (*PHASES, "evaluation")},
        "seconds_blocked": sum(line["seconds"].get("reduction_blocked", 0.0) for line in lines),
        "seconds_of_the_command": seconds,
    }


def total(line):
    """Seconds of one iteration: its phases exclude each other."""
    return sum(line["seconds"].get(phase, 0.0) for phase in PHASES)


if __name__ == "__main__":
    main()
