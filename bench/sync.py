"""Training over ranks on an emulated link: per step, coalesced, late; seconds a step, seconds blocked, and the law.

    sudo python -m bench.sync --emulate [--quick] [--only CELL ...] [--json FILE]

Forward and backward of a 9 M-parameter FLUX transformer are timed first; then ranks train with blocks that sleep as
long, in proportion, and with gradients that are really made and sent (`bench.sync_ranks`). The rate of the link is
set so that one reduction, a reduce-scatter to the owners, takes rho times a forward. Every way runs once a repeat;
the slowest rank counts. The hazard is anything else that runs on the machine: quiet it first. Source: LeanGRPO
(arXiv 2609.03528), its ablation of synchronisation; the law of late reduction is this library's.
"""

import argparse
import signal
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.intervals import bootstrap, median_ratio
from bench.link import Link, LinkError, unavailable
from bench.parts import write_part
from bench.setting import TINY, Probe, Size, make_batches, make_policy, without_gc
from bench.sync_law import law
from bench.sync_ranks import WAYS, WORK, Problem

FORWARD_S = 0.06
REWARD_FORWARDS = 2.0
SHRINK = {"full": 16, "lora": 1}
LATE, COALESCED, NATIVE = "reweight, late", "reweight, coalesced", "native, coalesced"
PER_STEP = tuple(way.label for way in WAYS if way.is_per_step)
BOTH = (COALESCED, LATE)
ASLEEP = tuple(way.label for way in WAYS if not way.computes)
EXPOSED, SPEED = 0.05, 1.83
RATE_TOLERANCE = 0.04


@dataclass(frozen=True)
class Cell:
    """One link and one tuning. rho: seconds of one reduction over seconds of one forward; rounds: samples a rank."""

    num_ranks: int
    tuning: str
    rho: float = 0.8
    rounds: int = 1
    labels: tuple[str, ...] = tuple(way.label for way in WAYS)

    @property
    def name(self):
        rounds = f", {self.rounds} rounds" if self.rounds > 1 else ""
        return f"{self.num_ranks} ranks, {self.tuning}, {self.rho} F{rounds}"


CELLS = (
    Cell(4, "full"),
    Cell(4, "lora", labels=ASLEEP),
    Cell(2, "full"),
    Cell(2, "lora", labels=ASLEEP),
    Cell(4, "full", rounds=2, labels=BOTH),
    Cell(4, "full", 3.0, labels=BOTH),
    Cell(4, "full", 4.5, labels=BOTH),
)


def timed_model(tuning, size, repeats):
    """Seconds of a real forward without gradient, of one with, and of its backward; elements that train."""
    policy = make_policy(size, tuning)
    probe = Probe(policy, make_batches(size, 1, 1, (0,))[0])
    probe.run()
    with without_gc():
        found = [probe.run() for _ in range(repeats)]
    forward_s, traced_s, backward_s = (statistics.median(part) for part in zip(*found))
    elements = sum(p.numel() for p in policy.parameters.values())
    return {"forward_s": forward_s, "traced_s": traced_s, "backward_s": backward_s, "elements": elements}


def problem_of(cell, model, forward_s):
    """What the ranks are given: the model's seconds so much longer that its forward takes `forward_s`."""
    longer = forward_s / model["forward_s"]
    matrix, start = torch.ones(WORK, WORK), time.perf_counter()
    for _ in range(100):
        matrix @ matrix
    product_s = (time.perf_counter() - start) / 100
    return Problem(
        forward_s=forward_s,
        traced_s=longer * model["traced_s"],
        backward_s=longer * model["backward_s"],
        reward_s=REWARD_FORWARDS * forward_s,
        elements=model["elements"] // SHRINK[cell.tuning],
        products=max(1, round(REWARD_FORWARDS * forward_s / product_s)),
        rounds=cell.rounds,
    )


def measure(cell, model, repeats, forward_s, tolerance):
    """Seconds of every way over repeats, the slowest rank's, beside what the law says."""
    problem, started = problem_of(cell, model, forward_s), time.perf_counter()
    sent_bytes = 4 * problem.elements * (cell.num_ranks - 1) // cell.num_ranks
    message_bytes = sent_bytes // (cell.num_ranks - 1) // problem.num_blocks
    rate = 8 * sent_bytes / (cell.rho * problem.forward_s)
    with Link(cell.num_ranks, rate, message_bytes, tolerance=tolerance) as link:
        reduction_s = _set_rate(link, problem, cell.rho * problem.forward_s, sent_bytes, message_bytes, tolerance)
        ranks = link.run("bench.sync_ranks:cell", asdict(problem), list(cell.labels), repeats)
        rate, burst_bytes = link.bits_per_s, link.burst_bytes
    seconds = {
        label: {
            key: [max(rank[label][i][key] for rank in ranks) for i in range(repeats)] for key in ranks[0][label][0]
        }
        for label in cell.labels
    }
    result = {"name": cell.name, **asdict(cell), "model": model, "problem": asdict(problem), "repeats": repeats}
    result |= {"reduction_s": reduction_s, "rho_measured": reduction_s / problem.forward_s}
    result |= {"sent_bytes": sent_bytes, "bits_per_s": rate, "burst_bytes": burst_bytes, "seconds": seconds}
    result["law_s"] = _laws(problem, result["rho_measured"], cell.labels)
    return result | {"took_s": time.perf_counter() - started, "claims": claims(result)}


def _set_rate(link, problem, should_s, sent_bytes, message_bytes, tolerance):
    """Let one reduction alone take `should_s`, whatever its messages cost besides their bytes; what it takes."""
    for tries_left in reversed(range(6)):
        ranks = link.run("bench.sync_ranks:reduction_alone", asdict(problem), 9)
        took_s = statistics.median(map(max, zip(*ranks)))
        if abs(took_s / should_s - 1) < (RATE_TOLERANCE if tries_left else tolerance):
            return took_s
        bytes_s = 8 * sent_bytes / link.bits_per_s + should_s - took_s
        link.set_rate(8 * sent_bytes / max(bytes_s, should_s / 4), message_bytes)
    raise LinkError(f"one reduction takes {1e3 * took_s:.1f} ms, not {1e3 * should_s:.1f}; quiet the machine")


def _laws(problem, rho, labels):
    return {way.label: law(way, problem, rho) for way in WAYS if way.label in labels}


def _reached(problem, over, target):
    """The least rho, in hundredths up to 10, where the law makes late `target` times faster than a way."""
    for rho in (hundredth / 100 for hundredth in range(1001)):
        laws = _laws(problem, rho, (over, LATE))
        if laws[over]["step"] >= target * laws[LATE]["step"]:
            return rho
    return None


def claims(result):
    """What a cell can say about the targets."""
    seconds, laws = result["seconds"], result["law_s"]
    found = []
    if laws[LATE]["blocked"] == 0:
        late, coalesced = seconds[LATE]["blocked"], seconds[COALESCED]["blocked"]
        share = bootstrap(median_ratio(late, coalesced), len(late))
        what = "blocked for gradients, late / coalesced"
        found.append({"what": what, **share.as_dict(), "target": EXPOSED, "met": share.low <= EXPOSED})
    if result["num_ranks"] == 4 and result["tuning"] == "full" and PER_STEP[0] in seconds:
        for over in (*PER_STEP, NATIVE):
            ratio = bootstrap(median_ratio(seconds[over]["step"], seconds[LATE]["step"]), result["repeats"])
            target = None if over == NATIVE else SPEED
            claim = {"what": f"{over} / {LATE}", **ratio.as_dict(), "law": laws[over]["step"] / laws[LATE]["step"]}
            claim |= {"target": target, "met": target is None or ratio.reaches(target)}
            found.append(claim | {"from_rho": target and _reached(Problem(**result["problem"]), over, target)})
    return found


def table(result):
    """A cell as text."""
    problem, first = result["problem"], next(iter(result["seconds"].values()))["step"]
    times = ", ".join(f"{key[:-2]} {1e3 * problem[key]:.0f}" for key in ("forward_s", "traced_s", "backward_s"))
    lines = [
        f"\n{result['name']}: {times}, reward {1e3 * problem['reward_s']:.0f} ms; "
        f"a reduction {1e3 * result['reduction_s']:.1f} ms at {result['bits_per_s'] / 1e6:.0f} Mbit/s; "
        f"{result['repeats']} repeats, {result['took_s']:.0f} s",
        f"  {'ms, medians':<46}{'step':>8}{'law':>8}{'faster':>8}{'blocked':>9}{'law':>7}{'published':>11}{'law':>6}"
        f"{'gathered':>10}",
    ]
    for label, by_key in result["seconds"].items():
        step, blocked, published, gathered = (1e3 * statistics.median(values) for values in by_key.values())
        predicted = {key: 1e3 * value for key, value in result["law_s"][label].items()}
        lines.append(
            f"  {label:<46}{step:>8.0f}{predicted['step']:>8.0f}{1e3 * statistics.median(first) / step:>8.2f}"
            f"{blocked:>9.1f}{predicted['blocked']:>7.1f}{published:>11.1f}{predicted['published']:>6.1f}{gathered:>10.1f}"
        )
    for claim in result["claims"]:
        target = "" if claim["target"] is None else f", target {claim['target']:.2f}"
        law_says = f", law {claim['law']:.3f}" if "law" in claim else ""
        interval = f"{claim['value']:.3f} [{claim['low']:.3f}, {claim['high']:.3f}]"
        reached = f", which the law reaches from {claim['from_rho']:.2f} F" if claim.get("from_rho") else ""
        met = "met    " if claim["met"] else "NOT MET"
        lines.append(f"  {met}  {claim['what']}: {interval}{law_says}{target}{reached}")
    return "\n".join(lines)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m bench.sync", description=__doc__.splitlines()[0])
    parser.add_argument("--emulate", action="store_true", required=True, help="on an emulated link; needs root")
    parser.add_argument("--quick", action="store_true", help="a tiny model, short sleeps, one repeat: does it run")
    parser.add_argument("--only", nargs="+", metavar="CELL", choices=[cell.name for cell in CELLS])
    parser.add_argument("--repeats", type=int, default=0, help="5, or 1 with --quick")
    parser.add_argument("--tolerance", type=float, default=0.15, help="of the link's rate; more is no result")
    parser.add_argument("--json", type=Path, help="write the result; with --only the other cells in the file stay")
    args = parser.parse_args(arguments)
    if unavailable():
        print(f"python -m bench.sync: {unavailable()}", file=sys.stderr)
        raise SystemExit(2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces go
    torch.set_num_threads(1)
    chosen = [cell for cell in CELLS if not args.only or cell.name in args.only]
    size, forward_s = (TINY, FORWARD_S / 4) if args.quick else (Size(), FORWARD_S)
    models = {tuning: timed_model(tuning, size, 3 if args.quick else 15) for tuning in {c.tuning for c in chosen}}
    results = {}
    try:
        for cell in chosen:
            repeats = args.repeats or (1 if args.quick else 5)
            results[cell.name] = measure(cell, models[cell.tuning], repeats, forward_s, args.tolerance)
            print(table(results[cell.name]), flush=True)
    except LinkError as error:
        print(f"python -m bench.sync: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    finally:
        if results:
            write_part(args.json, "sync", {"quick": args.quick}, results, is_part=bool(args.only))


if __name__ == "__main__":
    main()
