"""metrics.jsonl and the screen: one line an iteration, none torn, none twice."""

import errno
import io
import json
import os
import resource

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.record.metrics import Metrics, read_metrics
from stretto.record.trackers import Bar, Lines, TensorBoard, open_trackers, say
from tests.record.processes import child, end_of, kill_at_every_step, left_as_it_was


def write(path, iterations, from_iteration=0):
    with Metrics(path, from_iteration) as metrics:
        for iteration in iterations:
            metrics.write({"iteration": iteration, "reward": iteration / 7})


def iterations_in(path):
    return [line["iteration"] for line in read_metrics(path)]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.integers(0, 9), st.integers(0, 9), st.binary(max_size=20).filter(lambda torn: b"\n" not in torn))
def test_a_resumed_file_is_that_of_a_run_that_never_stopped(tmp_path, reached, from_iteration, torn):
    path, never_stopped = tmp_path / "metrics.jsonl", tmp_path / "never_stopped.jsonl"
    for file in (path, never_stopped):
        file.unlink(missing_ok=True)
    from_iteration = min(from_iteration, reached)
    write(path, range(reached))
    with path.open("ab") as file:
        file.write(torn)
    write(path, range(from_iteration, 12), from_iteration)
    write(never_stopped, range(12))
    assert path.read_bytes() == never_stopped.read_bytes()


def test_numbers_of_any_kind_are_written_and_what_is_not_finite_is_null(tmp_path):
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        metrics.write({"iteration": 0, "norm": torch.tensor(2.0), "kl": float("nan"), "share": [0.5, float("inf")]})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"iteration": 0, "norm": 2.0, "kl": None, "share": [0.5, None]}
    ]


def test_a_bad_line_before_the_last_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0}\n{"itera\n{"iteration": 2}\n')
    with pytest.raises(ValueError, match="line 2: not a line of metrics"):
        Metrics(tmp_path / "metrics.jsonl", 3)


def test_a_kill_before_any_step_of_going_on_loses_no_line_that_was_to_stay(tmp_path):
    path = tmp_path / "metrics.jsonl"

    def prepare():
        path.unlink(missing_ok=True)
        write(path, range(6))
        with path.open("ab") as file:
            file.write(b'{"iteration": 6, "rew')

    def look():
        assert iterations_in(path) in ([0, 1, 2, 3, 4, 5], [0, 1, 2], [0, 1, 2, 3])

    assert kill_at_every_step(prepare, lambda: write(path, [3], 3), look) >= 4
    assert iterations_in(path) == [0, 1, 2, 3]


def test_a_file_that_may_not_grow_keeps_its_whole_lines_and_the_error_names_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(3))

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match=r"metrics\.jsonl") as caught:
            write(path, [3], 3)
        assert caught.value.errno == errno.EFBIG

    with left_as_it_was(tmp_path):
        assert end_of(child(work)) == 0


def test_off_a_terminal_there_is_a_plain_line_an_iteration(tmp_path, capsys):
    with open_trackers(tmp_path, iterations=100, shown=["reward", "kl", "time/update"]) as trackers:
        trackers.say("ratio = 1 by design")
        trackers.write({"iteration": 6, "reward": 0.25, "time": {"update": 1.5}})
    assert capsys.readouterr().out == "ratio = 1 by design\n  7/100  reward 0.25  time/update 1.5\n"
    assert iterations_in(tmp_path / "metrics.jsonl") == [6]


def test_where_stdout_is_closed_the_file_is_written_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    with open_trackers(tmp_path, iterations=1, shown=["reward"]) as trackers:
        trackers.say("nobody hears")
        trackers.write({"iteration": 0, "reward": 0.25})
    assert iterations_in(tmp_path / "metrics.jsonl") == [0]


def test_a_full_stdout_is_named():
    full = open("/dev/full", "w")  # noqa: SIM115 - closing it would fail on the text once more
    with pytest.raises(OSError, match="No space left on device: 'stdout'"):
        say("lost", full)
    os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    full.close()


def test_on_a_terminal_there_is_a_bar_that_goes_on_where_the_run_does():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    bar = Bar(100, ["reward"], from_iteration=40, stream=stream)
    bar.write({"iteration": 40, "reward": 0.25})
    bar.say("a note")
    bar.close()
    assert "41/100" in stream.getvalue()
    assert "reward 0.25" in stream.getvalue()
    assert "a note\n" in stream.getvalue()


def test_lines_are_flushed_to_a_stream_of_ones_own():
    stream = io.StringIO()
    Lines(10, ["reward"], stream).write({"iteration": 9, "reward": None})
    assert stream.getvalue() == "10/10  \n"


def test_tensorboard_has_every_number_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for from_iteration, values in ((0, [1.0, 2.0, 3.0]), (1, [20.0, 30.0])):
        writer = TensorBoard(tmp_path, from_iteration)
        for iteration, value in enumerate(values, start=from_iteration):
            writer.write({"iteration": iteration, "reward": value, "share": {"step": [0.5]}})
        writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(0, 1.0), (1, 20.0), (2, 30.0)]
    assert events.Tags()["scalars"] == ["reward", "share/step/0"]


def test_without_the_extra_tensorboard_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r'pip install "stretto\[tensorboard\]"'):
        open_trackers(tmp_path, iterations=1, shown=[], tensorboard=True)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_line_of_metrics_is_one_line_of_json(tmp_path):
    write(tmp_path / "metrics.jsonl", [0])
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"iteration": 0, "reward": 0.0}
