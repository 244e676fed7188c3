"""Every operation is exact when its messages are staged as a device's are, buffers poisoned on release.

What needs no device of the CUDA path is proved here; the rest is in `test_gpu`.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given

from stretto.overlap import moments, tracing
from stretto.overlap.wires import Direct
from tests.overlap import test_attention, test_gradients, test_matmul, wire_cases
from tests.overlap.examples import few
from tests.ranks import Ranks

two_and_three = pytest.mark.parametrize("num_ranks", [2, 3])


@two_and_three
@pytest.mark.parametrize("operation", ["column", "row", "all_reduce", "replicate", "weight_gather"])
def test_a_product_is_exact_when_staged(ranks: Ranks, num_ranks: int, operation: str) -> None:
    @few(num_ranks, 12)
    @given(test_matmul.cases(num_ranks))
    def check(case: dict[str, Any]) -> None:
        ranks.run(num_ranks, wire_cases.run_staged, operation, case)

    check()


@two_and_three
@pytest.mark.parametrize("operation", ["ulysses", "query_split"])
def test_attention_is_exact_when_staged(ranks: Ranks, num_ranks: int, operation: str) -> None:
    @few(num_ranks, 8)
    @given(test_attention.cases(num_ranks, num_ranks))
    def check(case: dict[str, Any]) -> None:
        ranks.run(num_ranks, wire_cases.run_staged, operation, case)

    check()


def test_a_send_is_posted_before_its_product_is_done_and_leaves_after(ranks: Ranks) -> None:
    for posted_s, arrived in ranks.run(2, wire_cases.sends_wait_for_their_product):
        assert posted_s < 5
        assert arrived


def test_a_rank_that_fails_ends_the_others_when_staged(ranks: Ranks) -> None:
    for kind, seconds in ranks.run(3, wire_cases.run_staged, "fail_and_stay", 1):
        assert kind == "PeerError"
        assert seconds < 6


@two_and_three
def test_a_group_without_host_messages_gets_a_companion(ranks: Ranks, num_ranks: int) -> None:
    for rank, said in enumerate(ranks.run(num_ranks, wire_cases.companion)):
        assert len(said) == (rank == 0)
        assert all("is not overlapped" in text for text in said)


def test_headers_beside_a_devices_tensors_are_the_hosts(ranks: Ranks) -> None:
    assert ranks.run(1, wire_cases.words_of_devices) == [["cpu", "cpu", "cuda:0"]]


@two_and_three
def test_staged_messages_can_be_traced(ranks: Ranks, num_ranks: int) -> None:
    assert all(ranks.run(num_ranks, wire_cases.traced_with_wires))


def test_a_backend_that_batches_gets_one_batch_receives_first() -> None:
    backend = mock.Mock(supports_coalescing=True)
    a, b = torch.zeros(1), torch.ones(1)
    (work,) = Direct(backend, 0, 3).post([("receiving from", a, 1), ("sending to", b, 2)])
    assert [call[0] for call in backend.method_calls] == ["_start_coalescing", "recv", "send", "_end_coalescing"]
    assert backend.recv.call_args.args == ([a], 1, 0)
    assert backend.send.call_args.args == ([b], 2, 0)
    assert work is backend._end_coalescing.return_value


class Event:
    """An event that a device reaches at a known time."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms, self.device, self.waited = at_ms, torch.device("cuda", 0), False

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, later: "Event") -> float:
        assert self.waited
        return later.at_ms - self.at_ms


def test_events_become_seconds_of_the_hosts_clock_when_a_trace_closes() -> None:
    with mock.patch.object(moments, "_zero", return_value=(Event(500.0), 100.0)), tracing.trace() as recorded:
        tracing.stamp("product", "on a device", Event(200.0), Event(450.0), "call 0", "an operation")
        tracing.stamp("wait", "on the host", 99.0, 99.5, "call 0", "an operation")
    device, host = recorded.spans
    assert (device.start_s, device.end_s) == pytest.approx((99.7, 99.95))
    assert (host.start_s, host.end_s) == (99.0, 99.5)
    assert not recorded.stamped


@pytest.mark.parametrize("operation", ["summed", "sharded", "late_bound"])
def test_gradients_are_reduced_exactly_when_staged(ranks: Ranks, operation: str) -> None:
    @few(2, 6)
    @given(test_gradients.cases)
    def check(case: dict[str, Any]) -> None:
        ranks.run(2, wire_cases.run_staged, operation, case)

    check()
