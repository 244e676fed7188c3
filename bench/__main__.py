"""All benches, one after another, each writing its JSON to bench/results: about half an hour on a quiet machine.

python -m bench [--quick]
"""

import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
BENCHES = ("schedules", "memory", "field", "digits")


def main():
    quick = ["--quick"] if "--quick" in sys.argv else []
    for name in BENCHES:
        print(f"\n== {name}", flush=True)
        target = [] if quick else ["--json", str(RESULTS / f"{name}.json")]
        subprocess.run([sys.executable, "-m", f"bench.{name}", *quick, *target], check=True)


if __name__ == "__main__":
    main()
