"""Benches, one after another, each writing its JSON to bench/results: about an hour and a half, quietly, for all.

    python -m bench [NAME ...] [--quick]

`--quick` shows that they run, and writes nothing. One that cannot run here, for want of root or of a GPU, says so and
is left out; one that fails fails the whole. Then `python -m bench.page`, `bench.overlap_page`,
`bench.sync_page` and `bench.readme` write what docs and README say.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCHES = {"schedules": [], "memory": [], "field": [], "digits": [], "sums": []}
BENCHES |= {"overlap": ["--emulate"], "sync": ["--emulate"], "ranks": [], "llm": [], "gpu": []}
WITHOUT_QUICK = ("sums", "gpu")
CANNOT_RUN_HERE = 2


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHES))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in BENCHES]
    if unknown:
        parser.error(f"{unknown[0]!r} is no bench; there are {', '.join(BENCHES)}")
    left_out = []
    for name in options.names or BENCHES:
        print(f"\n== {name}", flush=True)
        command = [sys.executable, "-m", f"bench.{name}", *BENCHES[name]]
        if not options.quick:
            command += ["--json", f"bench/results/{name}.json"]
        elif name not in WITHOUT_QUICK:
            command += ["--quick"]
        ended = subprocess.run(command, check=False, cwd=ROOT)
        if ended.returncode == CANNOT_RUN_HERE:
            left_out.append(name)
        elif ended.returncode:
            sys.exit(f"bench.{name} failed with exit code {ended.returncode}")
    if left_out:
        print(f"\nleft out, for the reasons given above: {', '.join(left_out)}")


if __name__ == "__main__":
    main()
