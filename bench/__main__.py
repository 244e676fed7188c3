"""All benches, one after another, each writing its JSON to bench/results: about half an hour on a quiet machine.

    python -m bench [--quick]

`python -m bench.page` and `python -m bench.readme` then write what docs and README say.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCHES = ("schedules", "memory", "field", "digits")


def main():
    quick = ["--quick"] if "--quick" in sys.argv else []
    for name in BENCHES:
        print(f"\n== {name}", flush=True)
        target = [] if quick else ["--json", f"bench/results/{name}.json"]
        subprocess.run([sys.executable, "-m", f"bench.{name}", *quick, *target], check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
