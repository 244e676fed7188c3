"""The overlap room on an emulated link: every schedule beside compute alone, the ideal, plain, slicing, the law.

    sudo python -m bench.overlap --emulate [--quick] [--mode schedule|real|both] [--json FILE] [--plot FILE]

In "schedule" mode every matrix product is a sleep, so that the cores of one machine are not what is measured; in
"real" mode it is a product. The rate of the link is set from the compute measured just before, so that T_comm is
rho times it; T_comm of the law is what the messages of a rank take at that rate. All contenders run once in every
repeat. Cells that sleep are measured side by side, cells that compute one by one. The hazard is anything else that
runs on the machine: quiet it first. Source: section 3 of the schedules.
"""

import argparse
import signal
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.link import LinkError, unavailable
from bench.overlap_cases import OPERATIONS
from bench.overlap_cells import OTHERS, TARGETED, Setting, one_by_one, side_by_side
from bench.overlap_claims import claims
from bench.overlap_report import merged, plot, table, write

RHOS = (0.3, 0.56, 0.75, 1.0, 1.5)
FULL = (
    Setting("schedule", 2, RHOS, 2),
    Setting("schedule", 4, RHOS, 2),
    Setting("schedule", 8, RHOS, 2),
    Setting("real", 2, (0.3, 0.56, 0.75), 9, TARGETED),
    Setting("real", 2, (1.0, 1.5), 3, TARGETED),
    Setting("real", 2, (0.56,), 3, OTHERS),
    Setting("real", 4, (0.56,), 2, TARGETED),
)
QUICK = (
    Setting("schedule", 2, (0.56, 1.0), 2, TARGETED, longer=0.4),
    Setting("schedule", 2, (0.56,), 2, OTHERS, longer=0.4),
    Setting("schedule", 4, (0.56,), 2, TARGETED[:2], longer=0.4),
    Setting("schedule", 8, (0.56,), 2, TARGETED[:2], longer=0.4),
    Setting("real", 2, (0.56,), 3, TARGETED[:2]),
)


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


def _cells(settings: Sequence[Setting], tolerance: float) -> Generator[dict[str, Any]]:
    """Those that sleep first, then the others."""
    yield from side_by_side([setting for setting in settings if setting.mode == "schedule"], tolerance)
    for setting in settings:
        if setting.mode == "real":
            yield from one_by_one(setting, tolerance)


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
        chosen = list(_chosen(QUICK if args.quick else FULL, args))
        with closing(_cells(chosen, args.tolerance)) as cells:
            for cell in cells:
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
