"""Speed of the schedules, interleaved, beside native and beside the ceiling that the model itself allows.

    python -m bench.schedules [--quick] [--json FILE] [--threads N] [--repeats N] [--only CASE ...]

One process, one thread by default. In every repeat each contender runs once, in an order that rotates, and before
each of them F0 (a forward without gradient), F1 (one with) and B (its backward) are timed. The ceiling is what lean
schedules could gain if nothing but these took time: (T*F0 + |S|(F1+B)) / ((T-|S|)*F0 + |S|(F1+B)). Nothing is
decoded or judged in the timing: rewards are made up. The hazard is another process on the machine: quiet it first.
"""

import argparse
import datetime
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench.intervals import Interval, bootstrap, median_ratio
from bench.parts import write_part
from bench.setting import TINY, Contender, Probe, Size, Turn, make_policy, without_gc

__all__ = ["CASES", "Case", "measure"]

SHARE = 0.95
QUICK_STEPS = 4
RACE = 2
REPLAY = "native, replay"
LEAN = [Contender("retain", "retain"), Contender("reweight", "reweight")]
OTHERS = [Contender("two_sum", "two_sum"), Contender("hybrid", "hybrid")]


@dataclass(frozen=True)
class Case:
    """One comparison: native, native with its best replay, and the lean contenders.

    trained: |S|, of `num_steps`; the steps are consecutive. targets: contender -> what native/contender is to reach.
    """

    name: str
    method: str
    targets: dict[str, float] = field(default_factory=dict)
    contenders: tuple[Contender, ...] = (*LEAN, *OTHERS)
    num_steps: int = 10
    trained: int = 10
    num_samples: int = 2
    rows: int = 1
    checkpointing: bool = False

    @property
    def steps(self) -> tuple[int, ...]:
        """The trained steps."""
        first = (self.num_steps - self.trained) // 4
        return tuple(range(first, first + self.trained))


BATCHED = (*LEAN, Contender("reweight, one by one", "reweight", rows=1), Contender("two_sum", "two_sum"))
CASES = [
    Case("lora, 10 of 10", "lora", {"retain": 1.40, "reweight": 1.40}),
    Case("full, 10 of 10", "full", {"retain": 1.25, "reweight": 1.25}),
    Case("lora, 2 of 10", "lora", {"retain": 1.08, "reweight": 1.08}, trained=2),
    Case("lora, 10 of 10, 4 a forward", "lora", {"reweight": 1.35}, BATCHED, num_samples=4, rows=4),
    Case("lora, 10 of 10, checkpointing", "lora", {"retain": 0.0, "reweight": 0.0}, tuple(LEAN), checkpointing=True),
    Case("full, 10 of 10, checkpointing", "full", {"retain": 0.0, "reweight": 0.0}, tuple(LEAN), checkpointing=True),
]
"""A target of 0 asks for the share of the ceiling alone. The default is what `auto` takes: the faster of reweight and
native with replay, by the best of the first RACE turns of each."""


def measure(case: Case, size: Size, repeats: int) -> dict[str, Any]:
    """Run a case; everything that was measured and what follows from it, as plain data."""
    policy = make_policy(size, case.method, case.num_steps, case.checkpointing)

    def turn(contender: Contender) -> Turn:
        return Turn(policy, size, contender, case.num_samples, case.rows, case.steps)

    native = turn(Contender("native", "native"))
    native.run()
    replay, tried = _best_replay(case, turn)
    turns = [native, replay, *(turn(contender) for contender in case.contenders)]
    warm_up, errors = _warm_up(turns)
    probe = Probe(policy, native.batches[0])
    probe.run()
    seconds: dict[str, list[float]] = {t.label: [] for t in turns}
    probed: list[tuple[float, float, float]] = []
    with without_gc():
        for repeat in range(repeats):
            shift = repeat % len(turns)
            seen = []
            for t in [*turns[shift:], *turns[:shift]]:
                seen.append(probe.run())
                seconds[t.label].append(t.run())
            native.clear()
            probed.append(tuple(statistics.median(values) for values in zip(*seen)))  # type: ignore[arg-type]
    measured = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "setting": {**asdict(size), **{k: v for k, v in asdict(case).items() if k not in ("contenders", "targets")}},
        "parameters": sum(p.numel() for p in policy.module.parameters()),
        "trained_parameters": sum(p.numel() for p in policy.parameters.values()),
        "replay_tried_s": tried,
        "warm_up_s": warm_up,
        "gradient_error": errors,
        "seconds": seconds,
        "probes_s": {name: [p[i] for p in probed] for i, name in enumerate(("F0", "F1", "B"))},
    }
    return measured | judge(case, measured)


def judge(case: Case, measured: dict[str, Any]) -> dict[str, Any]:
    """Ratios with intervals, the ceiling, shares of it, and the verdict of every target."""
    seconds, probes = measured["seconds"], measured["probes_s"]
    repeats = len(probes["F0"])

    def ceiling(chosen: Sequence[int]) -> float:
        f0, f1, b = (statistics.median(probes[name][i] for i in chosen) for name in ("F0", "F1", "B"))
        lean = (case.num_steps - case.trained) * f0 + case.trained * (f1 + b)
        return (case.num_steps * f0 + case.trained * (f1 + b)) / lean

    ratios, shares, verdicts = {}, {}, []
    for label in seconds:
        ratio = median_ratio(seconds["native"], seconds[label])
        ratios[label] = bootstrap(ratio, repeats)
        shares[label] = bootstrap(lambda chosen, ratio=ratio: ratio(chosen) / ceiling(chosen), repeats)
    for label, target in case.targets.items():
        if target:
            verdicts.append(_verdict(f"native / {label}", ratios[label], target))
        verdicts.append(_verdict(f"{label}: share of the ceiling", shares[label], SHARE))
    default = min((REPLAY, "reweight"), key=lambda label: min(seconds[label][:RACE]))
    against_replay = bootstrap(median_ratio(seconds[REPLAY], seconds[default]), repeats)
    verdicts.append(_verdict(f"{REPLAY} / the default, which the race makes {default}", against_replay, 1.0))
    return {
        "ceiling": bootstrap(ceiling, repeats).as_dict(),
        "ratios": {label: interval.as_dict() for label, interval in ratios.items()},
        "shares": {label: interval.as_dict() for label, interval in shares.items()},
        "fastest": min(seconds, key=lambda label: statistics.median(seconds[label])),
        "verdicts": verdicts,
    }


def table(name: str, result: dict[str, Any]) -> str:
    """A case as text: plain, ours and the ideal side by side, with spread."""
    ceiling = result["ceiling"]
    probes = ", ".join(f"{k} {1e3 * statistics.median(v):.1f} ms" for k, v in result["probes_s"].items())
    lines = [
        f"\n{name}: {len(result['probes_s']['F0'])} repeats; {probes}",
        f"  {'':<24}{'seconds':>9}{'to':>9}{'native/x':>10}   95 % interval{'of the ceiling':>16}",
    ]
    for label, values in result["seconds"].items():
        ratio, share = result["ratios"][label], result["shares"][label]
        of_ceiling = "" if label.startswith("native") else f"{share['value']:>16.3f}"
        lines.append(
            f"  {label:<24}{statistics.median(values):>9.3f}{max(values):>9.3f}{ratio['value']:>10.3f}"
            f"   {ratio['low']:.3f} .. {ratio['high']:.3f}{of_ceiling}"
        )
    lines.append(f"  {'ceiling':<42}{ceiling['value']:>10.3f}   {ceiling['low']:.3f} .. {ceiling['high']:.3f}")
    for verdict in result["verdicts"]:
        lines.append(
            f"  {'met    ' if verdict['met'] else 'NOT MET'}  {verdict['what']} {verdict['value']:.3f} "
            f"[{verdict['low']:.3f}, {verdict['high']:.3f}], target {verdict['target']:.2f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.schedules", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model and few repeats: does it run")
    parser.add_argument("--json", type=Path, help="write the result; with --only the other cases in the file stay")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=0, help="9, or 2 with --quick")
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=[case.name for case in CASES])
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    started, results = time.perf_counter(), {}
    for case in CASES:
        if args.only and case.name not in args.only:
            continue
        if args.quick:
            case = replace(case, num_steps=QUICK_STEPS, trained=max(1, case.trained * QUICK_STEPS // case.num_steps))
        results[case.name] = measure(case, TINY if args.quick else Size(), args.repeats or (2 if args.quick else 9))
        print(table(case.name, results[case.name]), flush=True)
    print(f"\n{time.perf_counter() - started:.0f} s")
    write_part(args.json, "schedules", {"quick": args.quick}, results, is_part=bool(args.only))


def _best_replay(case: Case, turn: Any) -> tuple[Turn, dict[str, float]]:
    """Native with the fastest of a few replays: all rows at once, or some (0 stands for all)."""
    everything = case.num_samples * case.trained
    sizes = [size for size in (2, 4, 10) if case.rows < size < everything] + [0]
    candidates = {size: turn(Contender(REPLAY, "native", size)) for size in sizes}
    seconds = {size: candidate.run() for size, candidate in candidates.items()}
    best = min(seconds, key=lambda size: seconds[size])
    return candidates[best], {str(size): s for size, s in seconds.items()}


def _warm_up(turns: Sequence[Turn]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each contender's first turn, and its gradient's relative L2 distance from native's.

    A contender that makes another gradient is a fault, not a result.
    """
    seconds, errors = {}, {}
    for t in turns:
        seconds[t.label] = t.run()
        if t is turns[0]:
            truth = t.gradient()
        errors[t.label] = float((t.gradient() - truth).norm() / truth.norm())
        assert errors[t.label] < 1e-5, f"{t.label} made another gradient: {errors}"
    return seconds, errors


def _verdict(what: str, interval: Interval, target: float) -> dict[str, Any]:
    return {"what": what, **interval.as_dict(), "target": target, "met": interval.reaches(target)}


if __name__ == "__main__":
    main()
