"""The emulated link carries what it is set to and leaves nothing behind. Needs root and iproute2."""

import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench import namespaces
from bench.link import Link, LinkError, unavailable
from stretto.overlap.p2p import peers_of
from stretto.overlap.wires import HOST

needs_a_link = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "available")
ROOT = Path(__file__).resolve().parents[1]


def named(pid):
    return sorted(path.name for path in Path("/run/netns").glob(f"stretto-{pid}-*"))


def slowest(link, num_bytes):
    return min(max(link.run("bench.link:bare_transfer", num_bytes)) for _ in range(3))


@pytest.fixture(scope="module")
def link():
    with Link(2, tolerance=1.0) as made:
        yield made


@needs_a_link
def test_ten_megabytes_at_a_hundred_megabit_take_four_fifths_of_a_second(link):
    link.set_rate(1e8, message_bytes=10_000_000)
    assert link.burst_bytes == 200_000
    assert 0.76 <= max(link.run("bench.link:bare_transfer", 10_000_000)) <= 1.2


@needs_a_link
def test_the_rate_changes_between_runs(link):
    link.set_rate(1e8, message_bytes=1_000_000)
    slow = slowest(link, 2_500_000)
    link.set_rate(4e8, message_bytes=1_000_000)
    fast = slowest(link, 2_500_000)
    assert slow >= 0.19
    assert 0.047 <= fast <= 0.5 * slow


@needs_a_link
def test_a_burst_is_two_percent_of_a_message_and_at_least_a_frame(link):
    link.set_rate(1e9, message_bytes=4_000_000)
    assert link.burst_bytes == 80_000
    link.set_rate(1e9, message_bytes=1000)
    assert link.burst_bytes == 9014


@needs_a_link
def test_a_rank_cannot_reach_the_other_but_through_its_interface(link):
    assert link.run("tests.test_link:interfaces") == [["eth0 up", "lo down"]] * 2


def interfaces():
    states = []
    with socket.socket() as probe:
        for name in ("eth0", "lo"):
            packed = fcntl.ioctl(probe, 0x8913, struct.pack("256s", name.encode()))  # SIOCGIFFLAGS
            states.append(f"{name} {'up' if struct.unpack('16xH', packed[:18])[0] & 1 else 'down'}")
    return states


@needs_a_link
def test_threads_that_move_bytes_take_no_processor_from_the_one_that_computes(link):
    for mine, of_the_world, of_two_groups in link.run("tests.test_link:policies"):
        assert mine == os.SCHED_OTHER
        assert 0 < of_the_world.count(os.SCHED_BATCH) < of_two_groups.count(os.SCHED_BATCH)


def policies():
    def of_all():
        return [os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")]

    before = of_all()
    group = dist.new_group()
    dist.barrier(group)
    return os.sched_getscheduler(0), before, of_all()


def fail_on_one(rank):
    if dist.get_rank() == rank:
        raise ArithmeticError("no such sum")
    dist.barrier()


def die_on_one(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@needs_a_link
@pytest.mark.parametrize(
    ("task", "told"), [("fail_on_one", "rank 1 of 2 failed .*no such sum"), ("die_on_one", "exit code -9")]
)
def test_a_rank_that_fails_or_is_killed_is_named_and_nothing_is_left(task, told):
    before = named(os.getpid())
    with Link(2, tolerance=1.0) as link:
        assert len(named(os.getpid())) == len(before) + 3
        with pytest.raises(LinkError, match=f"(?s){told}"):
            link.run(f"tests.test_link:{task}", 1, timeout_s=30)
        assert named(os.getpid()) == before
        with pytest.raises(LinkError, match="closed"):
            link.run(f"tests.test_link:{task}", 1)
    assert named(os.getpid()) == before


RUN = """
import sys, time
from bench.link import Link
if __name__ == "__main__":
    with Link(2, tolerance=1.0) as link:
        print("up", flush=True)
        time.sleep(60)
"""


def start(script):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, str(script)], env=environment, cwd=ROOT, **piped)


@needs_a_link
def test_an_interrupt_removes_the_namespaces_and_a_kill_leaves_them_to_the_next_run(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(RUN)
    runs = {number: start(script) for number in (signal.SIGINT, signal.SIGKILL)}
    for run in runs.values():
        assert run.stdout.readline() == b"up\n"
        assert len(named(run.pid)) == 3
    for number, run in runs.items():
        run.send_signal(number)
    told = {number: run.communicate(timeout=30)[1] for number, run in runs.items()}
    interrupted, killed = (run.pid for run in runs.values())
    assert told[signal.SIGINT].count(b"KeyboardInterrupt") == 1  # the ranks say nothing
    assert named(interrupted) == []
    assert len(named(killed)) == 3
    assert len([name for name in namespaces.remove_leftovers() if f"-{killed}-" in name]) == 3
    assert named(killed) == []


def test_who_is_not_root_or_has_no_iproute2_is_told_so(monkeypatch):
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: f"/sbin/{tool}")
    assert "needs root" in namespaces.unavailable()
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None)
    with pytest.raises(LinkError, match="no ip and no tc"):
        Link(2)


def trade(num_bytes):
    group, other = dist.group.WORLD, 1 - dist.get_rank()
    out, into = torch.zeros(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
    with peers_of(group).call("gradient reduction") as call:
        dist.barrier()
        time.sleep(0.02 * other)  # so that the first one's receive is known where its peer's send is posted
        start = time.monotonic()
        call.wait(call.post([(out, other)], [(into, other)]))
    return time.monotonic() - start


@needs_a_link
def test_two_ranks_that_trade_use_both_directions_of_the_link_at_once(link):
    link.set_rate(1e8, message_bytes=1_000_000)
    assert min(max(link.run("tests.test_link:trade", 1_000_000)) for _ in range(5)) < 0.13  # 0.16 one by one


def told_beside_a_payload(num_bytes):
    """Seconds that words take while a payload of the same group is on its way."""
    group, other = dist.group.WORLD, 1 - dist.get_rank()
    with peers_of(group).call("gradient reduction") as call:
        for size in (1, num_bytes):
            out, into = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
            word, answer = torch.zeros(1), torch.empty(1)
            dist.barrier()
            call.post([(out, other)], [(into, other)])
            start = time.monotonic()
            call.wait(call.tell([(word, other)], [(answer, other)], HOST))
            taken = time.monotonic() - start
    return taken


@needs_a_link
def test_words_do_not_wait_behind_a_payload(link):
    link.set_rate(2e7, message_bytes=2_000_000)
    assert max(link.run("tests.test_link:told_beside_a_payload", 2_000_000)) < 0.3  # the payload takes 0.8 s


@needs_a_link
def test_nothing_is_sent_again_where_acknowledgements_wait_behind_messages(link):
    before = link.run("tests.test_link:sent_again")
    link.set_rate(2e6, message_bytes=100_000)
    link.run("bench.link:bare_transfer", 400_000)  # 1.6 s, 0.5 of them queued; TCP would wait for 0.2
    assert link.run("tests.test_link:sent_again") == before


def sent_again():
    names, values = (
        line.split()[1:] for line in Path("/proc/self/net/snmp").read_text().splitlines() if "Tcp:" in line
    )
    return int(values[names.index("RetransSegs")])
