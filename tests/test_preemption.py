"""SIGTERM to a job over ranks: with all of them alive it ends in a checkpoint, with one of them dead in none."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stretto.record import checkpoint
from stretto.record.metrics import read_metrics
from tests.test_ranks import ROOT, overrides

WITHIN_S = 25.0
"""What a rank may take to call the roll and end (13 s), and a slow machine beside it; torchrun kills after 30 s."""


@contextmanager
def job(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A digits run over two ranks that would go on for long and saves nothing by itself; two iterations are done."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    settings = {"run__iterations": 10_000, "checkpoint__every": 0, "evaluation__every": 0, "prompts__samples": 2}
    words = ["-m", "stretto", "train", str(ROOT / "recipes/digits.toml"), *overrides(folder, **settings)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*torchrun, *words], env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 120
            while not (folder / "metrics.jsonl").is_file() or len(read_metrics(folder / "metrics.jsonl")) < 2:
                assert process.poll() is None, process.communicate()[1]
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield process
        finally:
            process.kill()


def rank_of(process: subprocess.Popen[str], rank: int) -> int:
    """The number of a rank's process."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_child = f"\nPPid:\t{process.pid}\n" in (path / "status").read_text()
            if is_child and f"RANK={rank}".encode() in (path / "environ").read_bytes().split(b"\0"):
                return int(path.name)
        except OSError:
            continue
    raise AssertionError(f"no rank {rank}")


def test_a_job_that_is_preempted_leaves_a_checkpoint_of_its_last_iteration(tmp_path: Path) -> None:
    with job(tmp_path / "run") as process:
        process.send_signal(signal.SIGTERM)  # torchrun sends it on to its ranks
        _, said = process.communicate(timeout=60)
    assert said.count("SIGTERM: a checkpoint at the end of this iteration") == 2, said
    lines = read_metrics(tmp_path / "run/metrics.jsonl")
    newest = checkpoint.newest_whole(tmp_path / "run/checkpoints")
    assert newest is not None
    assert (newest.iteration, newest.world_size, newest.notes) == (len(lines), 2, [])
    assert said.count("stretto: stopped by SIGTERM; a run goes on with --resume auto") == 2, said


def test_the_survivors_of_a_dead_rank_are_told_to_stop_and_save_nothing(tmp_path: Path) -> None:
    with job(tmp_path / "run") as process:
        os.kill(rank_of(process, 1), signal.SIGKILL)  # and torchrun sends SIGTERM to rank 0
        start = time.monotonic()
        _, said = process.communicate(timeout=60)
    assert time.monotonic() - start < WITHIN_S
    assert process.returncode == 1
    assert "stretto: error: rank 1 is gone (" in said, said
    assert checkpoint.newest(tmp_path / "run/checkpoints") == []
