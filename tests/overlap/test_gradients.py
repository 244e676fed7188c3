"""Reduced gradients equal those of one process with all data, whenever their weights become known."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stretto.overlap import GradientReducer
from tests.overlap import gradient_cases, gradient_fault_cases, gradient_order_cases, published_cases
from tests.overlap.examples import few
from tests.ranks import Ranks

WORLDS = [1, 2, 3, 4, 5, 8]
cases = st.fixed_dictionaries(
    {
        "bucket_bytes": st.sampled_from([1, 200, 1 << 20]),
        "last": st.sampled_from([(), ("first",), ("first", "out"), ("shared",)]),
        "average": st.booleans(),
        "seed": st.integers(0, 99),
    }
)


@pytest.mark.parametrize("num_ranks", WORLDS)
@pytest.mark.parametrize("way", ["summed", "sharded", "late_bound", "two_sums"])
def test_reduced_gradients_equal_one_process(ranks: Ranks, num_ranks: int, way: str) -> None:
    @few(num_ranks, 4)
    @given(cases)
    def check(case: dict[str, Any]) -> None:
        ranks.run(num_ranks, getattr(gradient_cases, way), case)

    check()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_hook_of_ddp_averages(ranks: Ranks, num_ranks: int) -> None:
    ranks.run(num_ranks, gradient_cases.hook, {"seed": 1})


def test_buckets_leave_during_backward_and_the_last_weight_leaves_slice_by_slice(ranks: Ranks) -> None:
    for rank, (events, sent) in enumerate(ranks.run(3, gradient_order_cases.order_of_events)):
        last = events.index("the last ordinary gradient")
        assert "sent" in events[:last]
        assert events.index("own rows") > last
        rows_of_peer = [2, 2, 1][(rank + 1) % 3], [2, 2, 1][(rank + 2) % 3]
        slices = [("sent", 3 * rows) for rows in rows_of_peer]
        assert any(sent[i : i + 2] == slices for i in range(len(sent)))


def test_units_await_the_parameters_that_they_read_inside_of_submodules(ranks: Ranks) -> None:
    ranks.run(2, gradient_cases.units)


def test_ranks_with_different_models_are_told_so(ranks: Ranks) -> None:
    for kind, text in ranks.run(2, gradient_fault_cases.different_models):
        assert kind == "PeerError"
        assert "gradient reduction" in text
        assert "'shape'" in text


def test_late_bound_gradients_are_not_awaited_before_their_weights_come(ranks: Ranks) -> None:
    assert min(ranks.run(2, gradient_order_cases.blocked_in_finish, False)) > 0.15
    assert max(ranks.run(2, gradient_order_cases.blocked_in_finish, True)) < 0.1


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(("sharded", "late_bound"), [(True, False), (False, True), (False, False)])
def test_of_two_ranks_a_bucket_is_awaited_behind_the_sends_of_the_next(
    ranks: Ranks, num_ranks: int, sharded: bool, late_bound: bool
) -> None:
    for order in ranks.run(num_ranks, gradient_order_cases.order_of_sends_and_landings, sharded, late_bound):
        backward = order[: len(order) // 2]
        assert order == 2 * backward
        assert backward.count("s") == backward.count("l") > 3
        most = max(backward[:end].count("s") - backward[:end].count("l") for end in range(len(backward)))
        assert most == (2 if num_ranks == 2 and (sharded or late_bound) else 1), order


def test_requests_out_of_order_are_refused(ranks: Ranks) -> None:
    ranks.run(2, gradient_fault_cases.misuse)


def test_gradients_that_come_after_their_bucket_left_are_refused(ranks: Ranks) -> None:
    ranks.run(2, gradient_fault_cases.gradients_after_their_bucket_left)


def test_a_state_dict_waits_for_published_parameters(ranks: Ranks) -> None:
    ranks.run(2, gradient_cases.saved_while_published)


def test_parameters_are_new_when_they_are_published_not_when_they_arrive(ranks: Ranks) -> None:
    ranks.run(2, gradient_cases.stale_once_published)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_what_the_owners_hold_is_whole_again_bit_for_bit(ranks: Ranks, num_ranks: int) -> None:
    for bucket_bytes in (1, 200, 1 << 20):
        ranks.run(num_ranks, published_cases.whole_and_back, bucket_bytes)


def test_a_sliced_layer_works_in_autocast(ranks: Ranks) -> None:
    ranks.run(2, gradient_cases.in_autocast)


def test_own_rows_that_failed_are_made_by_the_next_finish(ranks: Ranks) -> None:
    ranks.run(2, gradient_fault_cases.own_rows_that_fail_once)


def test_a_gradient_that_left_takes_no_memory_where_its_shard_alone_comes_back(ranks: Ranks) -> None:
    assert ranks.run(2, gradient_order_cases.gradients_that_left) == [[True, False]] * 2


@pytest.mark.parametrize("late_bound", [False, True])
def test_a_reducer_closed_within_a_backward_leaves_nothing_under_way(ranks: Ranks, late_bound: bool) -> None:
    assert ranks.run(2, gradient_fault_cases.closed_within_a_backward, late_bound) == [True, True]


def test_a_reducer_gives_the_module_back_after_a_fault(ranks: Ranks) -> None:
    for said, still_hooked in ranks.run(2, gradient_fault_cases.closed_after_a_fault):
        assert "somebody died" in said
        assert not still_hooked


def test_wrong_requests_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be a torch.distributed.ProcessGroup"):
        GradientReducer(nn.Linear(2, 2), None)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_last_gradient_leaves_no_tail_where_its_own_rows_come_last(ranks: Ranks, num_ranks: int) -> None:
    whole = min(ranks.run(num_ranks, gradient_order_cases.exposed_on_a_slow_link, False))
    sliced = max(ranks.run(num_ranks, gradient_order_cases.exposed_on_a_slow_link, True))
    assert whole > 0.9 * 0.1 * (num_ranks - 1)
    assert sliced < 0.03, "a slice's message takes less than a slice's product"
