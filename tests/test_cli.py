"""The command line: what it imports, what it says, what it returns."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path

import pytest

import stretto
from stretto.cli import main
from stretto.record.signals import Interrupted
from stretto.record.trackers import Trackers

RECIPE = """
[run]
folder = "run"
iterations = 100000
[prompts]
per_iteration = 1
samples = 2
[sampling]
steps = 2
[evaluation]
every = 0
[schedule]
name = "retain"
[[rewards]]
name = "brightness"
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return "recipe.toml"


@pytest.fixture
def trained(monkeypatch):
    """trained(effect): put a `train` in place that calls `effect(config)`, or raises it."""

    def put(effect):
        def train(config):
            if isinstance(effect, BaseException):
                raise effect
            effect(config)

        module = types.ModuleType("stretto.train")
        module.train = train
        monkeypatch.setitem(sys.modules, "stretto.train", module)

    return put


ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}


def run(*words):
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)


PROBE = """
import contextlib, io, sys
from stretto.cli import main

def loaded(words):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(SystemExit):
            main(words.split())
    heavy = ("torch", "numpy", "PIL", "diffusers", "transformers", "peft")
    return " ".join(name for name in heavy if name in sys.modules)

for words in sys.argv[1:]:
    print(words, "->", loaded(words))
"""


def test_help_and_errors_load_no_torch_and_env_loads_no_diffusers(recipe):
    Path("bad.toml").write_text("[run]\nx = 1")
    Path("empty.txt").touch()
    light = [
        "",
        "--help",
        "train --help",
        "check --help",
        "sample --help",
        "env --help",
        "sing",
        "train none.toml",
        "train bad.toml --sampling.stps 3",
        "check bad.toml",
        f"train {recipe} --prompts.file empty.txt",
        "sample none",
    ]
    probed = run(sys.executable, "-c", PROBE, *light, "env")
    *told, env = probed.stdout.splitlines()
    assert told == [f"{words} -> " for words in light]
    assert env in ("env -> torch", "env -> torch numpy")


def test_a_bad_recipe_ends_a_real_process_with_one_line_and_code_2(recipe):
    ended = run(sys.executable, "-m", "stretto", "train", recipe, "--prompts.samples", "1")
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr == (
        "stretto: error: recipe.toml: prompts.samples = 1: a prompt group needs at least 2 samples\n"
    )
    assert os.listdir() == ["recipe.toml"]


def test_torchrun_runs_the_module():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    ended = run(*torchrun, "-m", "stretto", "env", "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["packages"]["torch"]


@pytest.mark.parametrize("verb", ["check", "sample"])
def test_verbs_of_one_process_are_refused_under_torchrun(recipe, monkeypatch, capsys, verb):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([verb, recipe]) == 2
    assert capsys.readouterr().err.startswith(f"stretto: error: WORLD_SIZE = 2: stretto {verb} runs on one process")


def test_sizes_that_are_not_the_ranks_are_refused(recipe, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", recipe, "--parallel.shard", "3"]) == 2
    assert "shard 3 x ulysses 1 x tensor 1 are 3 ranks, and there are 2; start 3" in capsys.readouterr().err


def test_overrides_and_resume_reach_the_loop(recipe, trained):
    configs = []
    trained(configs.append)
    words = [
        "--sampling.steps",
        "4",
        "--resume",
        "auto",
        "--trained_steps.rule=list",
        "--trained_steps.steps",
        "0",
        "2",
    ]
    assert main(["train", recipe, *words]) == 0
    assert configs[0].sampling.steps == 4
    assert configs[0].run.resume == "auto"
    assert configs[0].trained_steps.steps == [0, 2]


@pytest.mark.parametrize(
    ("error", "told", "code"),
    [
        (ValueError("reward digits: nan"), "stretto: error: reward digits: nan", 2),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/checkpoints/iteration-00000020"),
            "stretto: error: run/checkpoints/iteration-00000020: No space left on device",
            2,
        ),
        (
            ModuleNotFoundError("No module named 'peft.tuners'", name="peft.tuners"),
            'stretto: error: peft is not installed: pip install "stretto[train]"',
            2,
        ),
    ],
    ids=["value", "full disk", "missing extra"],
)
def test_what_the_user_can_mend_is_one_line_and_a_code(recipe, trained, capsys, error, told, code):
    trained(error)
    assert main(["train", recipe]) == code
    assert capsys.readouterr().err.strip() == told


@pytest.mark.parametrize(
    ("error", "name", "code"),
    [
        (KeyboardInterrupt, "SIGINT", 130),
        (lambda: Interrupted(signal.SIGINT), "SIGINT", 130),
        (lambda: Interrupted(signal.SIGTERM), "SIGTERM", 143),
    ],
    ids=["Ctrl-C", "SIGINT", "SIGTERM"],
)
def test_a_stopped_run_is_told_to_go_on_where_there_is_a_checkpoint(recipe, trained, capsys, error, name, code):
    trained(error())
    assert main(["train", recipe]) == code
    none_yet = "there is no checkpoint yet, so the run begins anew with --resume auto"
    assert capsys.readouterr().err == f"stretto: stopped by {name}; {none_yet}\n"
    Path("run/checkpoints/iteration-00000020").mkdir(parents=True)
    trained(error())
    assert main(["train", recipe]) == code
    assert capsys.readouterr().err == f"stretto: stopped by {name}; a run goes on with --resume auto\n"


@pytest.mark.parametrize(
    "error", [RuntimeError("ours"), AssertionError("ours"), ModuleNotFoundError("No module named 'x'", name="x")]
)
def test_what_is_our_own_fault_keeps_its_traceback(recipe, trained, error):
    trained(error)
    with pytest.raises(type(error)):
        main(["train", recipe])


def test_a_traceback_is_shown_on_request(recipe, trained, capsys, monkeypatch):
    monkeypatch.setenv("STRETTO_TRACEBACK", "1")
    trained(ValueError("nan"))
    assert main(["train", recipe]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("stretto: error: nan\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "the following arguments are required: VERB; stretto --help shows what there is"),
        (["sing"], "argument VERB: invalid choice: 'sing'"),
        (["train"], "the following arguments are required: RECIPE.toml; stretto train --help"),
        (["train", "--sampling.steps", "4", "recipe.toml"], "the following arguments are required: RECIPE.toml"),
        (["train", "recipe.toml", "--resume", "yes"], "argument --resume: invalid choice: 'yes'"),
        (["train", "recipe.toml", "--restart"], "unrecognized arguments: --restart"),
        (["train", "none.toml"], "none.toml: there is no such file (looked for /"),
        (["env", "--run.seed", "1"], "--run.seed: stretto env takes no settings"),
        (["sample", "none"], "none: there is no such run folder or recipe"),
        (["sample", "recipe.toml", "--samples", "0"], "argument --samples: 0 is not a count of at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_one_line_and_code_2(recipe, capsys, words, told):
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"stretto: error: {told}")


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"stretto {stretto.__version__}\n"


def test_a_warning_of_ours_is_one_line_and_those_of_others_keep_their_place(recipe, trained, capsys):
    def warn(config):
        warnings.warn_explicit("ours\nin two lines", UserWarning, stretto.__file__, 3)
        warnings.warn_explicit("theirs", UserWarning, "their_rewards.py", 3)

    trained(warn)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        former = warnings.showwarning
        assert main(["train", recipe]) == 0
        assert warnings.showwarning is former
    assert [str(warning.message) for warning in shown] == ["theirs"]
    assert capsys.readouterr().err == "stretto: note: ours in two lines\n"


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("none/check.json", "there is no folder none; make it or name another"),
        (".", "is a folder; name a file in it"),
    ],
)
def test_a_json_target_that_cannot_be_written_is_told_before_the_work(recipe, capsys, monkeypatch, target, told):
    monkeypatch.setitem(sys.modules, "stretto.check", None)
    assert main(["check", recipe, "--json", target]) == 2
    assert capsys.readouterr().err == f"stretto: error: --json {target}: {told}\n"


@pytest.mark.parametrize("said", ["stretto.cli._tell('a line')", "stretto.first_failure._end('a line', 2)"])
def test_an_error_is_one_write_so_that_ranks_do_not_mix_their_lines(said):
    """A pipe of packets keeps writes apart; torchrun starts its ranks with `-u`."""
    read, write = os.pipe2(os.O_DIRECT)
    command = [sys.executable, "-u", "-c", f"import stretto.cli, stretto.first_failure; {said}"]
    subprocess.run(command, stderr=write, timeout=60)
    os.close(write)
    assert os.read(read, 4096).endswith(b"a line\n")
    os.close(read)


def test_a_closed_stdout_or_stderr_is_no_error(recipe):
    command = f"{sys.executable} -m stretto"
    ended = run("sh", "-c", f"{command} train --help >&-; echo $?; {command} train none.toml >&- 2>&-; echo $?")
    assert (ended.stdout, ended.stderr) == ("0\n2\n", "")


def test_a_full_stdout_is_named():
    ended = run("sh", "-c", f"{sys.executable} -m stretto env --json > /dev/full")
    assert (ended.returncode, ended.stderr) == (2, "stretto: error: stdout: No space left on device\n")


def test_env_prints_text_and_json(capsys):
    assert main(["env"]) == 0
    assert "diffusers " in capsys.readouterr().out
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["packages"]["torch"]


def test_a_reader_that_goes_away_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "stretto", "train", "--help"]
    ended = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, env=ENVIRONMENT, timeout=60)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.fixture
def running(recipe):
    """A real run of many iterations, in ./run, that has finished its first."""
    words = [sys.executable, "-m", "stretto", "train", recipe]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, env=ENVIRONMENT, **pipes)
    try:
        metrics = Path("run/metrics.jsonl")
        deadline = time.monotonic() + 90
        while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
            assert time.monotonic() < deadline, "no iteration in 90 s"
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_folder_in_use_is_refused_and_a_signal_ends_its_run_with_a_checkpoint(recipe, running, capsys):
    assert main(["train", recipe, "--resume", "auto"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"stretto: error: run is in use by process {running.pid}; wait for it, stop it, or name")
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert "Traceback" not in err
    done = len(Path("run/metrics.jsonl").read_text().splitlines())
    assert Path(f"run/checkpoints/iteration-{done:08d}").is_dir()


def test_trackers_close_all_their_writers():
    class Writer:
        is_open = True

        def close(self):
            self.is_open = False

    writers = [Writer(), Writer()]
    with Trackers(*writers):
        pass
    assert not any(writer.is_open for writer in writers)
