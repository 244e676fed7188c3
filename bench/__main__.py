"""All benches, one after another, each writing its JSON to bench/results: about an hour and a half, quietly.

    python -m bench [--quick]

One that cannot run here, for want of root or of a GPU, says so and is left out; one that fails fails the whole.
`python -m bench.page` and `python -m bench.readme` then write what docs and README say.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCHES = {"schedules": [], "memory": [], "field": [], "digits": [], "sums": []}
BENCHES |= {"overlap": ["--emulate"], "llm": [], "gpu": []}
WITHOUT_QUICK = ("sums", "gpu")
CANNOT_RUN_HERE = 2


def main():
    left_out = []
    for name, options in BENCHES.items():
        print(f"\n== {name}", flush=True)
        if "--quick" not in sys.argv:
            options = [*options, "--json", f"bench/results/{name}.json"]
        elif name not in WITHOUT_QUICK:
            options = [*options, "--quick"]
        ended = subprocess.run([sys.executable, "-m", f"bench.{name}", *options], check=False, cwd=ROOT)
        if ended.returncode == CANNOT_RUN_HERE:
            left_out.append(name)
        elif ended.returncode:
            sys.exit(f"bench.{name} failed with exit code {ended.returncode}")
    if left_out:
        print(f"\nleft out, for the reasons given above: {', '.join(left_out)}")


if __name__ == "__main__":
    main()
