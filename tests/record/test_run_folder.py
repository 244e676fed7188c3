"""The run folder: one process at a time, one run, nothing overwritten."""

import contextlib
import os
import time

import pytest

from stretto.record.run_folder import RunFolder
from tests.record.processes import child, end_of, kill


@pytest.fixture
def holder(tmp_path):
    """holder(work): the number of a child that holds the run folder, did `work()` and waits to be killed."""
    alive = []

    def start(work=lambda: None):
        def hold():
            _folder = RunFolder.open(tmp_path / "run", "auto")
            work()
            (tmp_path / "ready").touch()
            time.sleep(60)

        alive.append(child(hold))
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        return alive[-1]

    yield start
    for number in alive:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            kill(number)


def test_a_folder_in_use_is_refused_with_the_number_of_its_process(tmp_path, holder):
    number = holder()
    with pytest.raises(ValueError, match=f"run is in use by process {number}; wait for it, stop it, or name another"):
        RunFolder.open(tmp_path / "run", "auto")


def test_the_lock_of_a_killed_process_is_no_obstacle(tmp_path, holder):
    kill(holder())
    with RunFolder.open(tmp_path / "run", "auto") as folder:
        assert (folder.path / ".lock").read_text() == f"{os.getpid()}\n"


def test_a_worker_that_outlives_a_killed_process_does_not_hold_its_lock(tmp_path, holder):
    orphan = tmp_path / "orphan"

    def fork_a_worker():
        number = child(lambda: time.sleep(60))
        orphan.write_text(str(number))

    kill(holder(fork_a_worker))
    try:
        os.kill(int(orphan.read_text()), 0)
        RunFolder.open(tmp_path / "run", "auto").close()
    finally:
        os.kill(int(orphan.read_text()), 9)


def test_a_second_opening_in_the_same_process_is_refused_and_closing_lets_go(tmp_path):
    with RunFolder.open(tmp_path / "run"), pytest.raises(ValueError, match="in use"):
        RunFolder.open(tmp_path / "run")
    RunFolder.open(tmp_path / "run").close()


def test_a_fork_does_not_take_the_lock_from_its_parent(tmp_path):
    with RunFolder.open(tmp_path / "run"):
        assert end_of(child(lambda: None)) == 0
        with pytest.raises(ValueError, match="in use"):
            RunFolder.open(tmp_path / "run")


@pytest.mark.parametrize("record", ["metrics.jsonl", "checkpoints/iteration-00000001"])
def test_a_fresh_start_over_a_run_is_refused_with_the_ways_out(tmp_path, record):
    (tmp_path / record).parent.mkdir(exist_ok=True)
    (tmp_path / record).write_text("{}\n")
    with pytest.raises(ValueError, match=r"already holds a run; go on with it \(--resume auto\), name another"):
        RunFolder.open(tmp_path)
    RunFolder.open(tmp_path, "auto").close()
    assert (tmp_path / record).read_text() == "{}\n"


def test_a_start_that_failed_before_its_first_iteration_may_be_repeated(tmp_path):
    with RunFolder.open(tmp_path / "run") as folder:
        folder.write_config("a = 1\n")
        folder.metrics.touch()
    RunFolder.open(tmp_path / "run").close()


def test_a_start_that_wrote_nothing_leaves_no_folder_but_touches_none_that_was_there(tmp_path):
    RunFolder.open(tmp_path / "new").close()
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    RunFolder.open(tmp_path / "old").close()
    assert (tmp_path / "old").is_dir()


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is or lies in a file; name a folder"):
        RunFolder.open(tmp_path / "file" / "run")


def test_a_config_that_differs_steps_aside(tmp_path):
    with RunFolder.open(tmp_path) as folder:
        for text in ("a", "a", "b", "b", "c"):
            folder.write_config(text)
            folder.write_environment("{}")
    files = {path.name: path.read_text() for path in tmp_path.iterdir() if path.name != ".lock"}
    assert files == {"config.1.toml": "a", "config.2.toml": "b", "config.toml": "c", "env.json": "{}"}


def test_a_start_that_only_resumes_leaves_no_config_behind_and_is_not_kept_as_resuming(tmp_path):
    text = '[run]\nfolder = "x"\nresume = "{}"\n'
    for resumes in ("auto", "no", "auto"):
        with RunFolder.open(tmp_path, "auto") as folder:
            folder.write_config(text.format(resumes))
    assert (tmp_path / "config.toml").read_text() == text.format("no")
    assert not (tmp_path / "config.1.toml").exists()


def test_a_config_kept_as_resuming_is_not_another_for_that(tmp_path):
    (tmp_path / "config.toml").write_text('resume = "auto"\n')
    with RunFolder.open(tmp_path) as folder:
        folder.write_config('resume = "no"\n')
    assert not (tmp_path / "config.1.toml").exists()
