"""A job whose ranks are killed goes on by itself and ends as one that nobody disturbed."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import rank_cases
from tests.ranks import Ranks
from tests.test_ranks import ROOT, overrides

PHASES = ["rollout", "backward", "gather_rewards", "update", "reduction", "optimizer", "checkpoint"]
SETTINGS = {"run__iterations": 4, "prompts__samples": 3, "schedule__name": "reweight"}


def disturbed(folder: Path, kills: list[tuple[str, int, int]], **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run the digits job on two ranks of torchrun, killed as planned."""
    marks = folder.with_name(f"{folder.name}-kills")
    marks.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [str(ROOT / "tests/killed.py"), "train", str(ROOT / "recipes/digits.toml")]
    environment = os.environ | {
        "KILLS": json.dumps(kills),
        "KILLED": str(marks),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run(
        [*torchrun, "--max-restarts", str(len(kills)), *words, *overrides(folder, **{**SETTINGS, **settings})],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120 + 60 * len(kills),
        check=False,
    )
    assert len(list(marks.iterdir())) == len(kills), ended.stderr[-3000:]
    return ended


def undisturbed(ranks: Ranks, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    words = overrides(folder, **{**SETTINGS, **settings})
    ranks.run(2, rank_cases.trained, str(ROOT / "recipes/digits.toml"), words, timeout_s=120)
    return rank_cases.metrics_of(folder)


def test_a_job_that_is_killed_three_times_ends_as_one_that_was_not(ranks: Ranks, tmp_path: Path) -> None:
    kills = [("backward", 1, 3), ("reduction", 0, 2), ("checkpoint", 1, 1)]
    ended = disturbed(tmp_path / "killed", kills)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "rank 1 is gone (killed, or cut off?), last seen in" in ended.stderr
    assert rank_cases.metrics_of(tmp_path / "killed") == undisturbed(ranks, tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["reweight", "retain"])
def test_a_job_that_is_killed_twenty_times_at_random_loses_nothing(
    ranks: Ranks, tmp_path: Path, schedule: str
) -> None:
    draw = random.Random(f"kills {schedule}")
    kills = [(draw.choice(PHASES), draw.randrange(2), draw.randint(1, 3)) for _ in range(20)]
    settings = {"schedule__name": schedule, "run__iterations": 30}
    kills = [(phase, rank, 1 if phase in ("reduction", "optimizer", "checkpoint") else n) for phase, rank, n in kills]
    ended = disturbed(tmp_path / "killed", kills, **settings)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert rank_cases.metrics_of(tmp_path / "killed") == undisturbed(ranks, tmp_path / "whole", **settings)
