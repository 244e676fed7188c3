"""The overlap room on a GPU: everything checked, every schedule timed, in under 8 minutes on one device.

    python -m bench.gpu [--json FILE] [--dry-run]

Two and four ranks share one device through a gloo group, their messages staged on the host; where there are several
devices, a rank each over NCCL too. Beside compute only, messages only and the ideal (compute while the same bytes
move and nobody needs them) stand plain, direct with m = 1, 2, 4, ring and auto, all once in every repeat, for both
operations and their backwards, at widths where the messages take about rho times the product. The hazard: ranks that
share a device share its multiprocessors and its link, and no figure of theirs is one of NCCL. `--dry-run` does all
of it on the host in a few seconds, on tiny shapes: its figures mean nothing.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.gpu_ranks import serve
from bench.record import write_result

PATIENCE_S = 150.0
DEVICE: dict[str, Any] = {
    "cuda": True,
    "scaled": True,
    "rows": 4096,
    "features": 2048,
    "wide": 2048,
    "widest": 1 << 16,
    "rhos": (0.56, 1.0),
    "repeats": 9,
    "cell_s": 8.0,
    "patience_s": 60.0,
}
DRY = {**DEVICE, "cuda": False, "scaled": False, "rows": 8, "features": 4, "wide": 4, "rhos": (1.0,), "repeats": 1}


def worlds(dry_run: bool) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Backend, ranks and setting of each run."""
    if dry_run:
        yield "gloo", 2, {**DRY, "dtype": "float32"}
        return
    yield "gloo", 2, {**DEVICE, "dtype": "float32", "widest": widest(4096 * 4, 2)}
    yield "gloo", 4, {**DEVICE, "dtype": "float32", "widest": widest(4096 * 4, 4), "rhos": (0.56,)}
    if torch.cuda.device_count() > 1:
        num_ranks = min(8, torch.cuda.device_count())
        yield "nccl", num_ranks, {**DEVICE, "dtype": "bfloat16", "rows": 8192, "widest": widest(8192 * 2, 1)}


def widest(column_bytes: int, num_sharing: int) -> int:
    """The most columns of which a device holds 24 times every sharing rank's: outputs, their gradients, copies."""
    total = torch.cuda.get_device_properties(0).total_memory
    return min(DEVICE["widest"], max(DEVICE["wide"], int(total / (24 * column_bytes * num_sharing)) // 256 * 256))


def run(backend: str, num_ranks: int, setting: dict[str, Any]) -> dict[str, Any]:
    """The figures of the first rank, seconds the slowest rank's; `RuntimeError` names the first that failed."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ranks = []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=serve, args=(rank, num_ranks, backend, store.port, setting, theirs), daemon=True
        )
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        figures = _collected([pipe for _, pipe in ranks])
        for process, _ in ranks:
            process.join(20)
        return figures
    finally:
        for process, _ in ranks:
            process.kill()


def _collected(pipes: list[Connection]) -> dict[str, Any]:
    deadline, first, pending = time.monotonic() + PATIENCE_S, pipes[0], list(pipes)
    found: dict[str, Any] = {}
    while pending:
        ready = wait(pending, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"no answer from rank {pipes.index(pending[0])} within {PATIENCE_S:g} s")
        for pipe in [pipe for pipe in pending if pipe in ready]:
            try:
                figures, error = pipe.recv()
            except EOFError:
                raise RuntimeError(f"the process of rank {pipes.index(pipe)} died") from None
            if error:
                raise RuntimeError(error)
            if pipe is first:
                found = figures
            pending.remove(pipe)
    return found


def table(name: str, figures: dict[str, Any]) -> str:
    """Errors over their bounds, then median milliseconds of every contender by cell."""
    lines = [name, "  error over its bound (1 is the bound)"]
    lines += [f"    {check:28} {value:.3f}" for check, value in figures["checks"].items()]
    for cell, measured in figures["cells"].items():
        lines.append(f"  {cell}, width {measured['wide']}: ms, median (least to most)")
        for contender, values in measured["seconds"].items():
            low, middle, high = (value * 1e3 for value in (min(values), statistics.median(values), max(values)))
            lines.append(f"    {contender:14} {middle:9.3f}  ({low:.3f} to {high:.3f})")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every world, print its table, write the JSON; exits with 1 where an error passes its bound."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes on the host: proves the script, no figure"
    )
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print(
            "bench.gpu measures a CUDA device and torch sees none here; --dry-run runs it on the host",
            file=sys.stderr,
        )
        sys.exit(2)
    report: dict[str, Any] = {"dry_run": options.dry_run, "worlds": {}}
    if not options.dry_run:
        report["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    for backend, num_ranks, setting in worlds(options.dry_run):
        name = f"{num_ranks} ranks over {backend}"
        figures = run(backend, num_ranks, setting)
        report["worlds"][name] = {"setting": setting, **figures}
        print(table(name, figures), flush=True)
    write_result(options.json, report)
    if any(not error <= 1 for world in report["worlds"].values() for error in world["checks"].values()):
        print("an error passes its bound", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
