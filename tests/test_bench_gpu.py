"""`bench.gpu` runs from end to end on the host, and says why it does not where there is no device."""

import json
from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.gpu_checks import BOUNDS, CHECKS, SCHEDULES
from bench.gpu_ranks import OPERATIONS


def test_a_dry_run_checks_and_times_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu.json"
    gpu.main(["--dry-run", "--json", str(file)])
    report = json.loads(file.read_text())
    (world,) = report["worlds"].values()
    assert report["dry_run"]
    assert len(world["checks"]) == len(CHECKS) * len(BOUNDS)
    assert all(error <= 1 for error in world["checks"].values())
    assert [name.split(",")[0] for name in world["cells"]] == list(OPERATIONS)
    for cell in world["cells"].values():
        assert set(cell["seconds"]) == {"compute only", "messages", "ideal", *SCHEDULES}
        assert all(value > 0 for values in cell["seconds"].values() for value in values)
    assert "compute only" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_the_bench_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main([])
    assert ended.value.code == 2
    assert "--dry-run" in capsys.readouterr().err


def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"rank . of 2 over gloo: AttributeError"):
        gpu.run("gloo", 2, {**gpu.DRY, "dtype": "no dtype"})
