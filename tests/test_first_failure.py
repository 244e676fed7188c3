"""Every rank names the same first failure, a killed one too, and ends within the bound."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stretto.first_failure import is_of_a_peer
from stretto.record.signals import Interrupted
from tests import failure_cases as cases
from tests.ranks import Ranks

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.mark.parametrize("culprit", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_every_rank_tells_which_failed_first_in_what_and_why(ranks, culprit):
    outcomes = ranks.run(3, cases.one_raises, culprit, "the rollout")
    line = f"rank {culprit} failed first, in the rollout: lr = -1: take a positive one"
    assert [told for told, _ in outcomes] == [line] * 3
    assert max(seconds for _, seconds in outcomes) < 4.0


@pytest.mark.parametrize(
    ("victims", "busy", "told"),
    [
        ([0], None, "rank 0 is gone (killed, or cut off?), last seen in rollout; rank "),
        ([2], 1, "rank 2 is gone (killed, or cut off?), last seen in rollout; rank "),
        ([1, 3], None, "rank 1 is gone (killed, or cut off?), last seen in rollout, rank 3 is gone (killed, or"),
    ],
)
def test_a_killed_rank_is_found_out_by_the_others_and_a_busy_one_is_not_taken_for_it(ranks, victims, busy, told):
    outcomes = ranks.outcomes(4, cases.some_are_killed, victims, busy)
    assert [outcome.error for outcome in outcomes] == ["died" if rank in victims else "" for rank in range(4)]
    (line,) = {outcome.value for outcome in outcomes if not outcome.error}
    assert line.startswith(told)
    assert " noticed in reduction: RuntimeError: " in line


@pytest.mark.slow
def test_a_rank_that_never_comes_is_not_called_gone(ranks):
    here, late, other = ranks.run(3, cases.nobody_comes)
    assert late is None
    assert here == other
    assert here.endswith("every rank is alive, rank 1 is in reward; where that takes long, raise parallel.timeout_s")
    assert " noticed in reduction: RuntimeError: " in here


@pytest.mark.parametrize(("at_once", "told"), [(True, "rank 0 was stopped by SIGTERM, in rollout"), (False, "")])
def test_a_rank_that_is_stopped_at_once_says_so_before_the_others_miss_it(ranks, at_once, told):
    assert ranks.run(1, cases.stopped, at_once) == [told]


def test_where_the_store_is_gone_each_rank_tells_its_own_side(ranks):
    (line,) = ranks.run(1, cases.hosted_by_a_rank, 0)
    assert line.startswith("rank 0 failed, in setup: lr = -1; which rank failed first is not known")


def test_errors_are_a_peers_by_the_backends_words_alone():
    assert is_of_a_peer(RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed"))
    assert not is_of_a_peer(RuntimeError("a reward's connection closed by peer"))
    assert not is_of_a_peer(ConnectionResetError("gloo/"))
    wrapped = RuntimeError("checkpoint: not saved")
    wrapped.__cause__ = RuntimeError("gloo/transport/tcp/pair.cc")
    assert is_of_a_peer(wrapped)


def torchrun(act, restarts):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command += ["--max-restarts", str(restarts), str(ROOT / "tests" / "failure_cases.py"), act]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, cwd=ROOT)
    return done, time.monotonic() - start


@pytest.mark.slow
def test_under_torchrun_the_job_goes_on_after_a_kill_and_every_survivor_names_the_victim():
    done, _ = torchrun("kill", 1)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("stretto: error: ")]
    assert told
    assert set(told) == {told[0]}
    assert told[0].startswith("stretto: error: rank 1 is gone (killed, or cut off?), last seen in rollout; rank ")
    assert sorted(done.stdout.split("\n")[:3]) == [f"rank {rank} finished attempt 1" for rank in range(3)]


def test_under_torchrun_a_failure_ends_every_rank_with_the_same_line_a_stuck_one_too():
    done, seconds = torchrun("raise", 0)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("stretto: error: ")]
    assert lines == ["stretto: error: rank 1 failed first, in rollout: RuntimeError: a kernel of its own"] * 3
    assert done.stderr.count("in fail") == 1
    assert seconds < 50  # rank 2 would sleep for 60 s


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize(
    ("error", "code"), [(ValueError("lr"), 2), (RuntimeError("a kernel"), 1), (Interrupted(signal.SIGTERM), 143)]
)
def test_a_process_leaves_whatever_hangs_with_a_code_that_says_who_can_mend_it(ranks, error, code, watched):
    (outcome,) = ranks.outcomes(1, cases.leaves, error, watched, timeout_s=20.0)
    assert outcome.traceback == f"exit code {code}"
