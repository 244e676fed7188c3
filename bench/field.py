"""The field: seconds and bytes of every schedule over widths, tokens, trained steps and samples a forward.

    python -m bench.field [--quick] [--json FILE] [--only lora|full]

At each point every schedule makes the gradient of the same prompt group; the fastest wins, and schedules within 3 %
of it share the win. Bytes are what a schedule holds between rollout and update plus the graph of its largest
backward, both counted; the graphs of retain and hybrid are among what they hold. The hazard is reading seconds across
points: they were measured at different minutes, only the ratios within a point are interleaved.
"""

import argparse
import datetime
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.parts import write_part
from bench.setting import TINY, Contender, Size, Turn, make_policy, without_gc
from stretto.policy.work import KeptBytes

__all__ = ["CONTENDERS", "Point", "measure", "points"]

NUM_STEPS = 5
TIE = 1.03
CONTENDERS = [
    Contender("native", "native"),
    Contender("native, replay all", "native", 0),
    Contender("retain", "retain"),
    Contender("reweight", "reweight"),
    Contender("two_sum", "two_sum"),
    Contender("hybrid", "hybrid"),
]


@dataclass(frozen=True)
class Point:
    """One place of the field. num_samples: M; rows: samples a forward."""

    method: str
    size: Size
    trained: int
    rows: int

    @property
    def name(self) -> str:
        """As the results call it."""
        width, tokens = self.size.heads * self.size.head_dim, self.size.image_side**2
        return f"{self.method}, width {width}, {tokens} tokens, |S| {self.trained}, {self.rows} a forward"

    @property
    def num_samples(self) -> int:
        """A prompt group: one forward's rows, and at least two."""
        return max(2, self.rows)


def points(quick: bool) -> Iterator[Point]:
    """Width x image tokens x |S| x samples a forward, for LoRA and for full fine-tuning."""
    if quick:
        for method, rows in itertools.product(("lora", "full"), (1, 2)):
            yield Point(method, TINY, NUM_STEPS, rows)
        return
    for method, heads, side in itertools.product(("lora", "full"), (1, 2, 4), (4, 8, 12)):
        for trained, rows in itertools.product((1, NUM_STEPS), (1, 4)):
            yield Point(method, replace(Size(), heads=heads, image_side=side), trained, rows)


def measure(point: Point, repeats: int) -> dict[str, Any]:
    """Seconds of each repeat and bytes of each schedule at a point, and who wins."""
    policy = make_policy(point.size, point.method, NUM_STEPS)
    steps = tuple(range(point.trained))
    turns = [Turn(policy, point.size, c, point.num_samples, point.rows, steps) for c in CONTENDERS]
    for turn in turns:
        turn.run()
    seconds: dict[str, list[float]] = {turn.label: [] for turn in turns}
    with without_gc():
        for repeat in range(repeats):
            shift = repeat % len(turns)
            for turn in [*turns[shift:], *turns[:shift]]:
                seconds[turn.label].append(turn.run())
    medians = {label: statistics.median(values) for label, values in seconds.items()}
    best = min(medians.values())
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "method": point.method,
        "width": point.size.heads * point.size.head_dim,
        "tokens": point.size.image_side**2,
        "trained": point.trained,
        "num_steps": NUM_STEPS,
        "rows": point.rows,
        "num_samples": point.num_samples,
        "size": asdict(point.size),
        "parameters": sum(p.numel() for p in policy.module.parameters()),
        "seconds": seconds,
        "bytes": {turn.label: _bytes(turn, point) for turn in turns},
        "winners": sorted(
            (label for label, s in medians.items() if s <= TIE * best), key=lambda label: medians[label]
        ),
    }


def line(name: str, result: dict[str, Any]) -> str:
    """A point as text: native's seconds, every schedule's gain over it, and bytes."""
    seconds = {label: statistics.median(values) for label, values in result["seconds"].items()}
    gains = "  ".join(
        f"{label} {seconds['native'] / s:.2f} ({result['bytes'][label] / 1e6:.0f} MB)" for label, s in seconds.items()
    )
    return f"{name}: {seconds['native']:.3f} s  {gains}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.field", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few points of a tiny model: does it run")
    parser.add_argument("--json", type=Path, help="write the result")
    parser.add_argument(
        "--only", choices=["lora", "full"], help="half of the field; the other half in the file stays"
    )
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    started, results = time.perf_counter(), {}
    for point in points(args.quick):
        if args.only in (None, point.method):
            results[point.name] = measure(point, args.repeats)
            print(line(point.name, results[point.name]), flush=True)
    print(f"\n{time.perf_counter() - started:.0f} s")
    write_part(args.json, "field", {"quick": args.quick}, results, is_part=args.only is not None)


def _bytes(turn: Turn, point: Point) -> int:
    """Held between rollout and update, plus the largest graph where it is not among what is held."""
    rows = point.rows
    if turn.label == "native, replay all":
        rows = point.num_samples * point.trained
    graph = 0 if turn.label in ("retain", "hybrid") else _graph_bytes(turn, rows)
    return turn.schedule.held_bytes + graph


def _graph_bytes(turn: Turn, rows: int) -> int:
    """What a forward of `rows` rows keeps for its backward."""
    policy, batch = turn.policy, turn.batches[0]
    repeats = -(-rows // len(batch.samples))
    latents = policy.noise.initial(batch.samples * repeats)[:rows]
    condition = {name: torch.cat([value] * repeats)[:rows] for name, value in batch.condition.items()}
    weights = [*policy.module.parameters(), *policy.module.buffers()]
    with KeptBytes(weights) as kept, torch.enable_grad():
        policy.forward(latents, torch.zeros(rows, dtype=torch.int64), condition)
    return kept.total


if __name__ == "__main__":
    main()
