"""Memory of the schedules: bytes held, counted exactly, and the peak resident set of a process, as |S| and M grow.

    python -m bench.memory [--quick] [--json FILE]

Every row comes from a process of its own, forked before anything ran. Held are the storages, each counted once,
that exist when a rollout ends and did not before the first: what autograd saved, seen by saved-tensor hooks that
also see it freed, and every tensor that a Python object reaches. The hazard of the resident set is the
allocator, which rounds up and keeps: it stands beside the count and decides nothing.
"""

import argparse
import gc
import multiprocessing
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.record import write_result
from bench.setting import TINY, Contender, Size, Turn, made_up, make_policy
from stretto.policy import Batch, Policy
from stretto.record.memory import peak_bytes

__all__ = ["LiveBytes", "measure", "verdicts"]

CONTENDERS = [
    Contender("native", "native"),
    Contender("native, replay all", "native", 0),
    Contender("retain", "retain"),
    Contender("reweight", "reweight"),
    Contender("two_sum", "two_sum"),
    Contender("hybrid", "hybrid"),
]
NUM_STEPS, STEPS, SAMPLES, FACTOR = 8, 2, 2, 4
SHAPES = {"base": (STEPS, SAMPLES), "|S| x 4": (STEPS * FACTOR, SAMPLES), "M x 4": (STEPS, SAMPLES * FACTOR)}
MAY_GROW, MAY_GROW_BYTES, MAY_MISS = 0.05, 20e6, 0.10


class LiveBytes:
    """What autograd keeps at this moment: bytes of unique storages, and the most they were; weights do not count."""

    def __init__(self, excluded: Sequence[Tensor]) -> None:
        self.bytes = self.peak = 0
        self._excluded = {t.untyped_storage().data_ptr() for t in excluded}
        self._uses: Counter[int] = Counter()
        self._context = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    @property
    def storages(self) -> set[int]:
        """Addresses of the storages that are kept."""
        return {pointer for pointer, uses in self._uses.items() if uses}

    def __enter__(self) -> "LiveBytes":
        self._context.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._context.__exit__(*exc)

    def _pack(self, tensor: Tensor) -> Any:
        kept = _Kept(tensor)
        storage = tensor.untyped_storage()
        pointer, size = storage.data_ptr(), storage.nbytes()
        if pointer and pointer not in self._excluded:
            if not self._uses[pointer]:
                self.bytes += size
                self.peak = max(self.peak, self.bytes)
            self._uses[pointer] += 1
            weakref.finalize(kept, self._free, pointer, size)
        return kept

    def _free(self, pointer: int, size: int) -> None:
        self._uses[pointer] -= 1
        if not self._uses[pointer]:
            self.bytes -= size


class _Kept:
    """A tensor that autograd saved; freed with the graph."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def measure(policy: Policy, size: Size, contender: Contender, trained: int, num_samples: int) -> dict[str, Any]:
    """Two turns in this process, one sample a forward: the first for the resident set, the second counted.

    held: the most bytes at the end of a rollout, before and after its reward is known. graphs, gradients: what of it
    autograd saved, and the rest. graph_peak: the most that autograd kept at a time, update included. reported:
    `held_bytes` of the schedule. one_forward: bytes that one forward with gradient keeps. peak_resident: of the first
    turn, above what was there before it.
    """
    weights = [*policy.module.parameters(), *policy.module.buffers()]
    live, before, seen = LiveBytes(weights), {}, []

    def look(batch: Batch, latents: Tensor) -> Tensor:
        if before:
            seen.append(_held(before, live))
        return made_up(batch, latents)

    turn = Turn(policy, size, contender, num_samples, 1, tuple(range(trained)), score=look)
    with peak_bytes(policy.device) as peak:
        turn.run()
    turn.clear()
    batch = turn.batches[0]
    with LiveBytes(weights) as one, torch.enable_grad():
        velocity = policy.forward(policy.noise.initial(batch.samples), torch.tensor([0]), batch.condition)
        one_forward = one.bytes
        del velocity
    gc.collect()
    before |= _reachable()
    gc.freeze()  # what is there already is not looked at again
    with live:
        trajectories = []
        for batch in turn.batches:
            trajectories.append(turn.roll(batch))
            seen.append(_held(before, live))
        turn.update(trajectories)
    most = max(seen, key=sum)
    return {
        "held": sum(most),
        "graphs": most[0],
        "gradients": most[1],
        "graph_peak": live.peak,
        "reported": turn.schedule.held_bytes,
        "one_forward": one_forward,
        "peak_resident": peak.value,
    }


def verdicts(method: str, rows: dict[str, dict[str, dict[str, int]]], gradient: int) -> list[dict[str, Any]]:
    """What grows when |S| or M is multiplied, and retain against its prediction.

    rows: contender -> shape -> measured; gradient: bytes of one full gradient.
    """
    result = []
    for name in ("reweight", "two_sum"):
        base = rows[name]["base"]
        for shape in ("|S| x 4", "M x 4"):
            grown = rows[name][shape]
            added = grown["held"] + grown["graph_peak"] - base["held"] - base["graph_peak"]
            share = added / (base["held"] + base["graph_peak"])
            note = ""
            if name == "reweight" and shape == "M x 4":
                note = (
                    f"one gradient of {gradient / 1e6:.1f} MB a sample in flight, by definition; two_sum has no such"
                )
            result.append(
                {
                    "what": f"{method}: {shape} adds to {name}",
                    "bytes": added,
                    "share": share,
                    "met": added <= MAY_GROW_BYTES or share <= MAY_GROW,
                    "note": note,
                }
            )
    for shape, (trained, num_samples) in SHAPES.items():
        row = rows["retain"][shape]
        predicted = row["one_forward"] * trained * num_samples
        share = row["graphs"] / predicted - 1
        note = f"one forward's {row['one_forward'] / 1e6:.1f} MB * {trained} * {num_samples}"
        result.append(
            {
                "what": f"{method}: {shape}, retain beyond its prediction",
                "bytes": row["graphs"] - predicted,
                "share": share,
                "met": abs(share) <= MAY_MISS,
                "note": note,
            }
        )
    return result


def table(method: str, result: dict[str, Any]) -> str:
    """A method's rows and verdicts as text, in MB."""
    lines = [
        f"\n{method}, MB; one sample a forward; graph peak and peak resident include the update",
        f"  {'':<20}{'':<10}{'held':>9}{'graphs':>9}{'gradients':>11}{'graph peak':>12}{'peak resident':>15}",
    ]
    for name, shapes in result["rows"].items():
        for shape, row in shapes.items():
            peak = "-" if row["peak_resident"] is None else f"{row['peak_resident'] / 1e6:.1f}"
            lines.append(
                f"  {name:<20}{shape:<10}{row['held'] / 1e6:>9.1f}{row['graphs'] / 1e6:>9.1f}"
                f"{row['gradients'] / 1e6:>11.1f}{row['graph_peak'] / 1e6:>12.1f}{peak:>15}"
            )
    for verdict in result["verdicts"]:
        lines.append(
            f"  {'met    ' if verdict['met'] else 'NOT MET'}  {verdict['what']} {verdict['bytes'] / 1e6:.1f} MB "
            f"({verdict['share']:+.1%})  {verdict['note']}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model: does it run")
    parser.add_argument("--json", type=Path, help="write the result")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    size, cases = TINY if args.quick else Size(), {}
    for method in ("lora", "full"):
        policy = make_policy(size, method, NUM_STEPS)
        rows: dict[str, Any] = {}
        for contender in CONTENDERS:
            for shape, (trained, num_samples) in SHAPES.items():
                row = _apart(measure, policy, size, contender, trained, num_samples)
                rows.setdefault(contender.label, {})[shape] = row
        gradient = sum(p.numel() * p.element_size() for p in policy.parameters.values())
        cases[method] = {"gradient_bytes": gradient, "rows": rows, "verdicts": verdicts(method, rows, gradient)}
        print(table(method, cases[method]), flush=True)
    write_result(args.json, {"quick": args.quick, "cases": cases})


def _apart(function: Any, *arguments: Any) -> dict[str, Any]:
    """`function(*arguments)` in a forked process, whose memory starts where this one's is and dies with it."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=lambda: theirs.send(function(*arguments)))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"{function.__name__} ended with exit code {process.exitcode}") from None
    finally:
        process.join()


def _held(before: dict[int, int], live: LiveBytes) -> tuple[int, int]:
    """Bytes of the graphs that are kept, and of the tensors beside them that were not there before."""
    gc.collect()
    saved = live.storages
    return live.bytes, sum(n for pointer, n in _reachable().items() if pointer not in before and pointer not in saved)


def _reachable() -> dict[int, int]:
    """Address -> bytes of the storage of every tensor that Python's collector knows."""
    kinds = (Tensor, torch.nn.Parameter)  # and not the fake tensors that a compiler left behind
    storages = [t.untyped_storage() for t in gc.get_objects() if type(t) in kinds and t.device.type != "meta"]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


if __name__ == "__main__":
    main()
