"""A rank ends with its own exit code, whatever gloo's threads do meanwhile."""

import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from bench import gpu_ranks, sums
from stretto import leaving

ROOT = Path(__file__).parent.parent


def leave(how):
    """Rank 0's exit code and what it said, where it leaves in the middle of a sum."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    words = [sys.executable, str(ROOT / "tests/leaving_cases.py")]
    ranks = [subprocess.Popen([*words, str(rank), str(store.port), how], **pipes) for rank in range(2)]
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    return ranks[0].returncode, said[0]


def test_a_rank_that_leaves_by_our_end_is_not_aborted_and_says_all_it_had_to_say():
    """By the interpreter's end it is: `leave("the interpreter's")` gives -6 (torch 2.13, Python 3.11)."""
    assert leave("ours") == (3, "unflushed")


class Left(BaseException):
    """In place of the process's end."""


@pytest.fixture
def rank_0_of_1(monkeypatch):
    """This process as torchrun starts one; its end raises `Left`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", **address}.items():
        monkeypatch.setenv(name, value)

    def leave(code):
        raise Left(code)

    for module in (leaving, gpu_ranks, sums):
        monkeypatch.setattr(module, "end_process", leave)


@pytest.mark.parametrize(("program", "words", "code"), [("llm.py", ["--steps", "0"], 2), ("own_model.py", [], 0)])
def test_an_example_that_is_a_rank_ends_as_one(rank_0_of_1, monkeypatch, program, words, code):
    monkeypatch.setattr(sys, "argv", [program, *words])
    monkeypatch.syspath_prepend(ROOT / "examples")
    with pytest.raises(Left, match=str(code)):
        runpy.run_path(str(ROOT / "examples" / program), run_name="__main__")


def test_a_benchs_ranks_end_as_ranks(rank_0_of_1, tmp_path):
    with pytest.raises(Left, match="0"):
        sums.one_rank(1, "bfloat16", str(tmp_path), 0)
    told = []
    with pytest.raises(Left, match="0"):
        gpu_ranks.serve(0, 1, "gloo", 0, {}, SimpleNamespace(send=told.append))
    assert "rank 0 of 1 over gloo: KeyError" in told[0][1]
