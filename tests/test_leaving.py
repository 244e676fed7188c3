"""A rank ends with its own exit code, whatever gloo's threads do meanwhile."""

import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

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
