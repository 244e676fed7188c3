"""A language model over an emulated link: tokens a second, MFU and step time of every way to communicate.

    python -m bench.llm [--quick] [--only tpsp/training up/forward ...] [--json FILE]

Two ranks on two processors, one thread each. For each parallelism, training and forward only, the link gets the rate
at which "plain" has to wait for 0.56 of its compute; then all ways run in turn, repeat after repeat, and what is
reported is the median with a bootstrap interval. "restructured plain", forward only, overlaps nothing either, but has
ours' query-split attention or halves of the batch: what these alone bring is not overlap's. "compute" is a step whose
messages are local copies, "ideal" one beside which as many bytes move that nobody needs. The hazard is a busy
machine: two ranks need both processors.
Needs root and iproute2.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.intervals import bootstrap
from bench.link import Link, LinkError, unavailable
from bench.llm_models import Shape
from bench.parts import write_part

RHO = 0.56
TARGET = 0.90
PAPER = "35.0 to 40.2 %"
NUM_RANKS = 2
WAYS = ("compute", "ideal", "plain", "restructured plain", "slicing 2", "slicing 4", "slicing 8", "ours")
LEFT_OUT = {"training": ("restructured plain",), "dp": ("restructured plain",)}
"""Ways that a mode or a parallelism does without: data parallelism has no other structure."""
SHAPES = {
    "tpsp": Shape(2, 512, 2048, 5504, 3, 16, 16, 8192),
    "tp": Shape(4, 256, 2048, 5504, 3, 16, 16, 8192),
    "up": Shape(2, 2048, 512, 1408, 6, 8, 8, 1024),
    "dp": Shape(4, 512, 512, 1408, 8, 8, 8, 1024),
}
LEAST_MESSAGE = {"tpsp": 2, "tp": 4, "up": 8, "dp": 8}
"""What part of all tokens' activations: own rows; a half's other rows; a half's own rows' other heads; a bucket."""
MODES = ("training", "forward")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a small model, few repeats: do the ways run, not how fast"
    )
    parser.add_argument("--only", nargs="+", metavar="CASE", help="the other cases in the JSON file stay")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    known = [*(f"{p}/{m}" for p in SHAPES for m in MODES), "decode"]
    only = options.only or known
    wrong = [case for case in only if case not in known]
    if wrong or unavailable():
        print(f"bench.llm: {f'{wrong[0]!r} is not one of {known}' if wrong else unavailable()}", file=sys.stderr)
        return 2
    repeats = 2 if options.quick else options.repeats
    figures: dict[str, Any] = {"rho": RHO, "num_ranks": NUM_RANKS, "repeats": repeats, "cases": {}}
    try:
        with Link(NUM_RANKS, tolerance=1.0 if options.quick else 0.05) as link:
            for case in only:
                if case == "decode":
                    figures["decode"] = run_decode(link)
                else:
                    figures["cases"][case] = run_case(link, case, repeats, options.ways, quick=options.quick)
                held = write(options.json, figures, is_part=options.only is not None)
    except LinkError as error:
        print(f"bench.llm: {error}", file=sys.stderr)
        return 1
    for text, claim in held.items():
        print(f"{text}: {'holds' if claim['holds'] else 'does not hold'}")
    return 0


def write(path: Path | None, figures: dict[str, Any], *, is_part: bool) -> dict[str, Any]:
    """The claims of all cases, written with them; where only some were run the file's others stay."""
    before = json.loads(path.read_text()) if is_part and path is not None and path.exists() else {}
    figures = {key: before[key] for key in ("decode",) if key in before} | figures
    cases = figures.pop("cases")
    figures["claims"] = claims({**before.get("cases", {}), **cases}, figures.get("decode"))
    write_part(path, "llm", figures, cases, is_part)
    return figures["claims"]


def run_case(link: Link, case: str, repeats: int, ways: Sequence[str], *, quick: bool) -> dict[str, Any]:
    parallel, mode = case.split("/")
    shape, training = SHAPES[parallel], mode == "training"
    if quick:
        shape = replace(shape, hidden=256, intermediate=704, layers=2, heads=4, kv_heads=4, vocabulary=1024)
    num_steps = 1 if training or quick else 2
    set_rate(link, 2e10, parallel)
    (num_parameters, *_) = link.run("bench.llm_ranks:make", parallel, asdict(shape))
    num_bytes = max(link.run("bench.llm_ranks:bytes_of_a_step", training))
    rate = min(link.run("bench.llm_ranks:matrix_rate", asdict(shape)))

    met: set[str] = set()

    def seconds(way: str) -> float:
        warm = way not in met
        met.add(way)
        return max(link.run("bench.llm_ranks:measure", way, training, num_steps, num_bytes, warm))

    computes = [seconds("compute") for _ in range(3)]
    bits_per_s, exposed_bits = 8 * num_bytes / (RHO * statistics.median(computes)), []
    for _ in range(1 if quick else 4):
        set_rate(link, bits_per_s, parallel)
        computes.append(seconds("compute"))
        exposed_bits.append((seconds("plain") - computes[-1]) * bits_per_s)
        rho = statistics.median(exposed_bits) / (statistics.median(computes) * bits_per_s)
        print(f"{case}: {num_bytes / 1e6:.1f} MB a step at {bits_per_s / 1e6:.0f} Mbit/s, rho {rho:.3f}", flush=True)
        bits_per_s *= min(1.5, max(0.67, rho / RHO))
    set_rate(link, bits_per_s, parallel)
    print(f"{case}: measured at {bits_per_s / 1e6:.0f} Mbit/s", flush=True)
    link.run("bench.llm_ranks:forget")
    met.clear()
    ways = [way for way in ways if way not in (*LEFT_OUT.get(mode, ()), *LEFT_OUT.get(parallel, ()))]
    times: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats):
        begin = time.monotonic()
        for turn in range(len(ways)):
            way = ways[(repeat + turn) % len(ways)]
            times[way].append(seconds(way))
        told = "  ".join(f"{way} {times[way][-1] * 1e3:.0f}" for way in ways)
        print(f"{case} {repeat + 1}/{repeats}: {told} ms  ({time.monotonic() - begin:.0f} s)", flush=True)
    after = min(link.run("bench.llm_ranks:matrix_rate", asdict(shape)))
    result = {
        "shape": asdict(shape),
        "parameters_of_a_rank": num_parameters,
        "sent_bytes_of_a_rank": num_bytes,
        "bits_per_s": link.bits_per_s,
        "matrix_flops_per_s": max(rate, after),
        "seconds": times,
    }
    result["ways"] = summary(shape, training, times, result["matrix_flops_per_s"])
    result |= removed(times)
    print_table(case, result)
    return result


def set_rate(link: Link, bits_per_s: float, parallel: str) -> None:
    """A burst is at most 2 % of the least message."""
    shape = SHAPES[parallel]
    link.set_rate(bits_per_s, shape.tokens * shape.hidden * 4 // LEAST_MESSAGE[parallel])


def summary(shape: Shape, training: bool, times: dict[str, list[float]], rate: float) -> dict[str, Any]:
    found = {}
    for way, seconds in times.items():
        middle = bootstrap(lambda repeats, s=seconds: statistics.median(s[i] for i in repeats), len(seconds))
        found[way] = {
            "step_s": middle.as_dict(),
            "tokens_per_s": shape.tokens / middle.value,
            "mfu": shape.flops(training) / (middle.value * NUM_RANKS * rate),
        }
    return found


def removed(times: dict[str, list[float]]) -> dict[str, Any]:
    """Of medians over the same repeats: the overhead removed, plain's rho, and ours against plain and slicing."""

    def over(statistic: Any) -> dict[str, float]:
        def of(repeats: Sequence[int]) -> float:
            return statistic({way: statistics.median(s[i] for i in repeats) for way, s in times.items()})

        return bootstrap(of, len(times["plain"])).as_dict()

    slicing = [way for way in times if way.startswith("slicing")]
    found = {"rho": over(lambda s: s["plain"] / s["compute"] - 1)}
    for name, base in (("removed_of_plain_minus_ideal", "ideal"), ("removed_of_plain_minus_compute", "compute")):
        found[name] = over(lambda s, b=base: (s["plain"] - s["ours"]) / (s["plain"] - s[b]))
        for way in slicing:
            found[f"{name}, {way}"] = over(lambda s, b=base, w=way: (s["plain"] - s[w]) / (s["plain"] - s[b]))
    found["shorter_than_plain"] = over(lambda s: 1 - s["ours"] / s["plain"])
    if slicing:
        found["of_best_slicing"] = over(lambda s: s["ours"] / min(s[way] for way in slicing))
    return found


def run_decode(link: Link) -> dict[str, Any]:
    """One row a step under "plain" and "auto": what the law takes, and seconds a token."""
    set_rate(link, 4e8, "tpsp")
    found = {}
    for schedule in ("plain", "auto"):
        link.run("bench.llm_ranks:forget")
        results = link.run("bench.llm_ranks:decode", asdict(SHAPES["tpsp"]), schedule)
        found[schedule] = {
            "s_per_token": max(result["s_per_token"] for result in results),
            "calls": results[0]["calls"],
        }
        print(f"decode, {schedule}: {found[schedule]}", flush=True)
    return found


def claims(cases: dict[str, Any], decode: dict[str, Any] | None = None) -> dict[str, Any]:
    found = {}
    if decode is not None:
        calls = decode["auto"]["calls"]
        share = calls.get("plain", 0) / max(1, sum(calls.values()))
        found["decode: the law leaves a row a step plain"] = {"figure": share, "target": 0.9, "holds": share >= 0.9}
    for case, result in cases.items():
        value = result["removed_of_plain_minus_ideal"]
        found[f"{case}: at least {TARGET:.0%} of (plain - ideal) is removed"] = {
            "figure": value,
            "target": TARGET,
            "holds": value["high"] >= TARGET,
        }
        if "of_best_slicing" in result:
            value = result["of_best_slicing"]
            found[f"{case}: a step takes less than with the best slicing"] = {
                "figure": value,
                "target": 1.0,
                "holds": value["value"] < 1.0,
            }
    return found


def print_table(case: str, result: dict[str, Any]) -> None:
    print(f"\n{case}: rho {result['rho']['value']:.3f}, matrix rate {result['matrix_flops_per_s'] / 1e9:.1f} Gflop/s")
    print(f"{'way':<20}{'step ms':>9}{'interval':>19}{'tokens/s':>10}{'MFU %':>7}{'removed %':>11}")
    plain, ideal = (result["ways"][way]["step_s"]["value"] for way in ("plain", "ideal"))
    for way, found in result["ways"].items():
        step = found["step_s"]
        share = (plain - step["value"]) / (plain - ideal)
        interval = f"{step['low'] * 1e3:.0f} to {step['high'] * 1e3:.0f}"
        numbers = f"{step['value'] * 1e3:>9.1f}{interval:>19}{found['tokens_per_s']:>10.0f}{found['mfu'] * 100:>7.1f}"
        print(f"{way:<20}{numbers}{share * 100:>11.1f}")
    shorter = result["shorter_than_plain"]
    print(
        f"ours is {shorter['value']:.1%} shorter than plain ({shorter['low']:.1%} to {shorter['high']:.1%}); "
        f"the paper has {PAPER} end to end\n",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
