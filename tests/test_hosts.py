"""A run over several hosts is the run of one host, and a cut link ends it on every host. Needs root and iproute2."""

import time
from pathlib import Path
from typing import Any

import pytest

from bench.namespaces import unavailable
from tests import rank_cases
from tests.hosts import ROOT, Hosts
from tests.ranks import Ranks
from tests.test_ranks import compare_metrics, overrides

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "available")

RECIPE = str(ROOT / "recipes/digits.toml")
TIMEOUT_S = 8
SHORT = {"evaluation__every": 0, "parallel__timeout_s": TIMEOUT_S}
BOUND_S = TIMEOUT_S + 10 + 6
"""A rank waits `parallel.timeout_s`, then takes at most 10 s to tell why; the rest is a busy machine's."""


def on_one_host(ranks: Ranks, num_ranks: int, folder: Path) -> list[dict[str, Any]]:
    ranks.run(num_ranks, rank_cases.trained, RECIPE, overrides(folder, **SHORT), timeout_s=120)
    return rank_cases.metrics_of(folder)


def train_command(folder: Path, **settings: Any) -> list[str]:
    return ["-m", "stretto", "train", RECIPE, *overrides(folder, **(SHORT | settings))]


def wait_for(hosts: Hosts, metrics: Path, num_lines: int) -> None:
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < num_lines:
        assert not hosts.has_ended, hosts.said()
        assert time.monotonic() < deadline, hosts.said()
        time.sleep(0.05)


def cut_in_the_middle(num_hosts: int, folder: Path) -> None:
    """The last host is cut off after two iterations: every process ends in time, and says what it knows."""
    lost = num_hosts - 1
    with Hosts(num_hosts) as hosts:
        hosts.start(train_command(folder, run__iterations=10_000))
        wait_for(hosts, folder / "metrics.jsonl", 2)
        hosts.cut(lost)
        cut_at_s = time.monotonic()
        while hosts.num_living > num_hosts:
            assert time.monotonic() - cut_at_s < BOUND_S, hosts.said()
            time.sleep(0.1)
        ended = hosts.wait(timeout_s=60)
        assert hosts.num_living == 0
    assert all(host.code != 0 for host in ended)
    assert all(len(host.errors) == 1 for host in ended), [host.said for host in ended]
    for host in ended[:-1]:
        assert host.errors[0].startswith(f"rank {lost} is gone (killed, or cut off?), last seen in ")
        assert " noticed in " in host.errors[0]
        assert f"Timed out waiting {TIMEOUT_S}000ms" in host.errors[0]  # and not the kernel, which gives up later
    assert ended[lost].errors[0].startswith(f"rank {lost} failed, in ")
    assert "which rank failed first is not known, for the job's store " in ended[lost].errors[0]


def test_a_run_over_two_hosts_is_that_of_one_until_a_link_is_cut_and_then_ends_on_both(
    ranks: Ranks, tmp_path: Path
) -> None:
    cut_in_the_middle(2, tmp_path / "hosts")
    ours = rank_cases.metrics_of(tmp_path / "hosts")
    compare_metrics(ours[:2], on_one_host(ranks, 2, tmp_path / "host"))


@pytest.mark.slow
def test_a_cut_link_ends_a_run_over_four_hosts(tmp_path: Path) -> None:
    cut_in_the_middle(4, tmp_path / "hosts")


@pytest.mark.slow
@pytest.mark.parametrize(("num_hosts", "num_ranks"), [(2, 1), (2, 2), (4, 1)])
def test_a_run_over_hosts_ends_with_the_metrics_of_one_host(
    ranks: Ranks, tmp_path: Path, num_hosts: int, num_ranks: int
) -> None:
    with Hosts(num_hosts) as hosts:
        hosts.start(train_command(tmp_path / "hosts", parallel__timeout_s=60), num_ranks)
        ended = hosts.wait(timeout_s=300)
        assert hosts.num_living == 0
    assert [host.code for host in ended] == [0] * num_hosts, [host.said for host in ended]
    ours = rank_cases.metrics_of(tmp_path / "hosts")
    compare_metrics(ours, on_one_host(ranks, num_hosts * num_ranks, tmp_path / "host"))
