"""The overlap room on an emulated link: every schedule beside compute alone, the ideal, plain, slicing, the law.

    sudo python -m bench.overlap --emulate [--quick] [--mode schedule|real|both] [--json FILE] [--plot FILE]

In "schedule" mode every matrix product is a sleep, so that the cores of one machine are not what is measured; in
"real" mode it is a product. The rate of the link is set from the compute measured just before, so that T_comm is
rho times it; T_comm of the law is what the messages of a rank take at that rate. All contenders run once in every
repeat. Where the law hides all, sleeps are long: a call costs the processors some milliseconds whatever it moves,
and only beside a T_comm of a hundred times that can 98 % of it be seen to go (`asleep_s`). The hazard is anything
else that runs on the machine: quiet it first. Source: section 3 of the schedules.
"""

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.link import Link, LinkError, unavailable
from bench.overlap_cases import OPERATIONS, Sizes
from bench.overlap_claims import claims, predictions
from bench.overlap_report import merged, plot, table, write

RHOS = (0.3, 0.56, 0.75, 1.0, 1.5)
ASLEEP = Sizes(rows=2048, wide=256, narrow=64, batch=32)
REAL = Sizes(rows=3072, wide=1024, narrow=2048)
TARGETED = ("gather forward", "scatter forward", "column backward", "row backward")
OTHERS = tuple(operation for operation in OPERATIONS if operation not in TARGETED)
SIZES = {
    ("schedule", "Ulysses"): replace(ASLEEP, rows=768, wide=1536),
    ("real", "column backward"): replace(REAL, narrow=1024),
    ("real", "column backward, gathered again"): replace(REAL, narrow=1024),
    ("real", "row backward"): replace(REAL, narrow=1024),
    ("real", "Ulysses"): Sizes(rows=1024, wide=1024, narrow=0),
    ("real", "query-split attention"): Sizes(rows=1024, wide=1024, narrow=0),
    ("real", "gradient reduction"): Sizes(rows=0, wide=512, narrow=0),
}
SECONDS = {2: 0.1, 4: 0.14, 8: 0.24}
"""By ranks, the least that a whole compute sleeps."""
T_COMM_S = {2: 0.18, 4: 0.2, 8: 0.5}
"""By ranks, the least T_comm of which 98 % can be seen to go."""


@dataclass(frozen=True)
class Setting:
    """Cells on one link: a mode, ranks, the ratios of communication to compute, and how often."""

    mode: str
    num_ranks: int
    rhos: tuple[float, ...]
    repeats: int
    operations: tuple[str, ...] = tuple(OPERATIONS)
    longer: float = 1.0

    def problem(self, operation: str, rho: float) -> dict[str, Any]:
        """Plain data for the ranks; asleep, a whole compute takes `seconds`."""
        sizes = SIZES.get((self.mode, operation), ASLEEP if self.mode == "schedule" else REAL)
        return {
            "operation": operation,
            "sizes": asdict(sizes),
            "seconds": self.longer * asleep_s(self.num_ranks, rho) if self.mode == "schedule" else 0.0,
            "everything": rho == 0.56,
        }


def asleep_s(num_ranks: int, rho: float) -> float:
    """Seconds of a whole compute that sleeps."""
    return max(SECONDS[num_ranks], T_COMM_S[num_ranks] / rho if rho < 1 else 0.0)


FULL = (
    Setting("schedule", 2, RHOS, 2, TARGETED),
    Setting("schedule", 2, (0.56, 1.0), 2, OTHERS),
    Setting("schedule", 4, RHOS, 2, TARGETED),
    Setting("schedule", 4, (0.56, 1.0), 2, OTHERS),
    Setting("schedule", 8, RHOS, 2, TARGETED),
    Setting("schedule", 8, (0.56,), 2, OTHERS),
    Setting("real", 2, (0.3, 0.56, 0.75), 9, TARGETED),
    Setting("real", 2, (1.0, 1.5), 5, TARGETED),
    Setting("real", 2, (0.56,), 3, OTHERS),
    Setting("real", 4, (0.56,), 3, TARGETED),
)
QUICK = (
    Setting("schedule", 2, (0.56, 1.0), 2, TARGETED, longer=0.4),
    Setting("schedule", 2, (0.56,), 2, OTHERS, longer=0.4),
    Setting("schedule", 4, (0.56,), 2, TARGETED[:2], longer=0.4),
    Setting("schedule", 8, (0.56,), 2, TARGETED[:2], longer=0.4),
    Setting("real", 2, (0.56,), 3, TARGETED[:2]),
)


def cells(setting: Setting, tolerance: float) -> Iterator[dict[str, Any]]:
    """Measure every cell of a setting; each as soon as it is there."""
    with Link(setting.num_ranks, tolerance=tolerance) as link:
        for operation in setting.operations:
            for rho in setting.rhos:
                yield _cell(link, setting, operation, rho)


def _cell(link: Link, setting: Setting, operation: str, rho: float) -> dict[str, Any]:
    started = time.perf_counter()
    problem, name = setting.problem(operation, rho), f"{setting.mode}, {setting.num_ranks} ranks, {operation}, {rho}"
    before = link.run("bench.overlap_ranks:alone", problem, 3)
    sent_bytes = before[0]["sent_bytes"]
    compute_s = sum(statistics.median(times) for times in _by_part(before))
    bits_per_s = 8 * sum(sent_bytes) / (rho * compute_s)
    layers = problem["sizes"]["layers"] if operation == "gradient reduction" else 0
    link.set_rate(bits_per_s, min(sent_bytes) // (setting.num_ranks - 1) // max(1, layers))
    ranks = link.run("bench.overlap_ranks:cell", problem, setting.repeats, f"{name}, {bits_per_s:.0f}")
    after = link.run("bench.overlap_ranks:alone", problem, 2) if len(sent_bytes) > 1 else None
    cell: dict[str, Any] = {"name": name, **asdict(setting), "operation": operation, "rho": rho, "layers": layers}
    for key in ("seconds", "exposed"):
        kept = {n: [max(turn) for turn in zip(*(rank[key][n] for rank in ranks))] for n in ranks[0][key]}
        cell[key if key == "seconds" else f"{key}_s"] = kept
    whole = statistics.median(cell["seconds"]["compute"])
    parts = [statistics.median(times) for times in _by_part(after)] if after else [1.0]
    cell["compute_s"] = [whole * part / sum(parts) for part in parts]
    cell |= {"sent_bytes": sent_bytes, "sent_s": [8 * sent / bits_per_s for sent in sent_bytes]}
    cell |= {"bits_per_s": bits_per_s, "burst_bytes": link.burst_bytes, "choices": ranks[0]["choices"]}
    cell |= {"law_s": predictions(cell), "took_s": time.perf_counter() - started}
    del cell["rhos"], cell["operations"]
    return cell


def _by_part(ranks: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Seconds of each part by repeat, the slowest rank's."""
    repeats = [[max(part) for part in zip(*turn)] for turn in zip(*(rank["seconds"] for rank in ranks))]
    return [list(part) for part in zip(*repeats)]


def _chosen(settings: Sequence[Setting], args: argparse.Namespace) -> Iterator[Setting]:
    """The settings that the arguments leave, with what they change."""
    for setting in settings:
        operations = tuple(o for o in setting.operations if not args.only or o in args.only)
        rhos = tuple(rho for rho in setting.rhos if not args.rho or rho in args.rho)
        wanted = args.mode in ("both", setting.mode) and (not args.ranks or setting.num_ranks in args.ranks)
        if wanted and operations and rhos:
            repeats = args.repeats or setting.repeats
            yield replace(
                setting, operations=operations, rhos=rhos, repeats=repeats, longer=setting.longer * args.longer
            )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overlap", description=__doc__.splitlines()[0])
    parser.add_argument("--emulate", action="store_true", required=True, help="on an emulated link; needs root")
    parser.add_argument("--quick", action="store_true", help="few repeats and ratios: does it run")
    parser.add_argument("--mode", choices=["schedule", "real", "both"], default="both")
    parser.add_argument("--ranks", type=int, nargs="+", help="only these numbers of ranks")
    parser.add_argument("--rho", type=float, nargs="+", help="only these ratios")
    parser.add_argument("--only", nargs="+", metavar="OPERATION", choices=list(OPERATIONS))
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--longer", type=float, default=1.0, help="times that sleeping computes are longer")
    parser.add_argument("--tolerance", type=float, default=0.05, help="of the link's rate; more is no result")
    parser.add_argument("--json", type=Path, help="with a filter the other cells in the file stay")
    parser.add_argument("--plot", type=Path, help="measured against the law")
    args = parser.parse_args(arguments)
    if unavailable():
        print(f"python -m bench.overlap: {unavailable()}", file=sys.stderr)
        raise SystemExit(2)
    if args.plot and find_spec("matplotlib") is None:
        parser.error('a plot needs matplotlib: pip install "stretto[bench]"')
    is_part = bool(args.only or args.ranks or args.rho or args.mode != "both")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces go and what was measured stays
    measured, started, complete = {}, time.perf_counter(), False
    try:
        for setting in _chosen(QUICK if args.quick else FULL, args):
            for cell in cells(setting, args.tolerance):
                measured[cell["name"]] = cell
                print(f"{table(cell)}\n  {time.perf_counter() - started:.0f} s so far", flush=True)
        complete = True
    except LinkError as error:
        print(f"python -m bench.overlap: {error}", file=sys.stderr)
    finally:
        everything = merged(args.json if is_part else None, measured)
        found = claims(everything.values())
        for claim in found:
            met = "met    " if claim["met"] else "NOT MET"
            print(f"  {met}  {claim['what']}: {claim['value']:.3f}, target {claim['target']:.2f}")
        write(args.json, {"quick": args.quick, "complete": complete, "claims": found}, measured, is_part)
        if args.plot and everything:
            plot(everything, args.plot)
    if not complete:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
