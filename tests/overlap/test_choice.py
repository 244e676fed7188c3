"""The law chooses once for each shape, the same on every rank; what is not overlapped is said; traces tell all."""

import re
from pathlib import Path

import pytest

from tests.overlap import choice_cases
from tests.ranks import Ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_shape_is_measured_once_forward_and_backward(ranks: Ranks, num_ranks: int) -> None:
    results = ranks.run(num_ranks, choice_cases.measured_once)
    for operations, (first, second, shorter, again), _ in results:
        assert operations == [
            "all_gather_matmul",
            "matmul_reduce_scatter",
            "matmul_reduce_scatter backward",
            "all_gather_matmul backward",
        ]
        assert first > 5 * second
        assert second == again
        assert shorter <= first / 5
    assert len({str(choices) for _, _, choices in results}) == 1


def test_the_choice_is_plain_where_cutting_costs_more_than_it_hides_and_is_said_once(ranks: Ranks) -> None:
    seconds = {("plain", 1): (0.11, 0.01), ("direct", 1): (0.15, 0.0), ("direct", 2): (0.2, 0.0)}
    seconds["direct", 4] = (0.3, 0.1)
    for rank, (schedule, _, said, table, _) in enumerate(ranks.run(2, choice_cases.measured_as, seconds)):
        assert schedule == "plain"
        assert len(said) == (rank == 0)
        assert all("all_gather_matmul (a layer) is not overlapped: the law predicts a loss" in text for text in said)
        assert "a layer" in table
        assert "the law predicts a loss" in table


def test_the_choice_is_the_number_of_subslices_that_the_law_predicts_to_be_fastest(ranks: Ranks) -> None:
    seconds = {("plain", 1): (0.18, 0.08), ("direct", 1): (0.1, 0.0), ("direct", 2): (0.11, 0.01)}
    seconds["direct", 4] = (0.12, 0.0)
    for schedule, num_subslices, said, table, _ in ranks.run(2, choice_cases.measured_as, seconds):
        assert (schedule, num_subslices, said) == ("direct", 2, [])
        assert "5.000" in table.splitlines()[1], "0.08 + 0.1 / (2 * 2) - 0.1 s are exposed by the law"


@pytest.mark.parametrize(
    ("noise", "num_noisy", "num_subslices", "num_trials"), [(0.0, 100, 1, 3), (0.2, 100, 2, 9), (0.2, 3, 1, 4)]
)
def test_ways_that_differ_as_trials_of_one_way_do_count_as_equally_long_and_are_tried_again(
    ranks: Ranks, noise: float, num_noisy: int, num_subslices: int, num_trials: int
) -> None:
    seconds = {("plain", 1): (0.18, 0.08), ("direct", 1): (0.1, 0.0), ("direct", 2): (0.13, 0.0)}
    seconds["direct", 4] = (0.14, 0.0)  # 0.13 s in one piece or two by the law; 0.105 if pieces cost nothing
    for schedule, taken, _, _, trials in ranks.run(2, choice_cases.measured_as, seconds, noise, num_noisy):
        assert (schedule, taken, trials) == ("direct", num_subslices, num_trials)


def test_a_rank_without_a_product_makes_no_trial_differ(ranks: Ranks) -> None:
    assert ranks.run(2, choice_cases.empty_products, 0.1, 1e-4) == [("direct", 4)] * 2


def test_products_that_take_no_time_can_be_tried(ranks: Ranks) -> None:
    for schedule, _ in ranks.run(2, choice_cases.empty_products, 0.0, 0.0):
        assert schedule == "plain"


def test_a_choice_that_was_slower_than_plain_when_it_was_tried_is_not_believed(ranks: Ranks) -> None:
    seconds = {("plain", 1): (0.002, 0.001), ("direct", 1): (0.004, 0.003), ("direct", 2): (0.006, 0.004)}
    seconds["direct", 4] = (0.01, 0.006)
    for rank, (schedule, _, said, table, _) in enumerate(ranks.run(2, choice_cases.measured_as, seconds)):
        assert schedule == "plain"
        assert re.search(r" 1\.000 +when it was tried", table), table  # all of plain's messages are exposed
        assert len(said) == (rank == 0)
        assert all("when it was tried it took 4 ms, plain 2" in text for text in said)


@pytest.mark.parametrize("reducer", [False, True])
def test_one_rank_is_told_once_that_there_is_nothing_to_overlap(ranks: Ranks, reducer: bool) -> None:
    ((said, table),) = ranks.run(1, choice_cases.said_once, reducer)
    assert len(said) == 1
    assert "one rank" in said[0]
    assert table.endswith("\none rank: there is nothing to overlap")


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_measure_different_times_choose_the_same(ranks: Ranks, num_ranks: int) -> None:
    assert {different for _, different in ranks.run(num_ranks, choice_cases.disagreeing_times)} == {1}


def test_nothing_is_measured_where_deterministic_algorithms_are_asked_for(ranks: Ranks) -> None:
    for choices in ranks.run(2, choice_cases.deterministic):
        assert set(choices) == {("direct", 1)}


def test_the_backward_of_a_column_layer_without_sequence_sharding_is_measured(ranks: Ranks) -> None:
    assert ranks.run(3, choice_cases.replicate_is_measured) == [["replicate_matmul backward"]] * 3
    assert ranks.run(2, choice_cases.replicate_is_measured) == [[]] * 2  # of two ranks all is under way at once


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_trace_shows_products_beside_transfers(ranks: Ranks, num_ranks: int, tmp_path: Path) -> None:
    results = ranks.run(num_ranks, choice_cases.traced, str(tmp_path), "direct")
    for found in results:
        assert found["beside"]
        assert found["events"]
        assert found["products"] == 2 * (num_ranks - 1) + 1  # the own slice is not cut
        assert found["payloads"] == 4 * (num_ranks - 1)
        assert found["operations"] == ["all_gather_matmul", "all_gather_matmul backward"]
        assert found["exposed"]
        assert found["sums"]
        assert found["equal"]
        assert found["record"] == ("all_gather_matmul", "direct", 1)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_no_product_of_a_trace_holds_another(ranks: Ranks, num_ranks: int) -> None:
    for products_and_waits, lasted in ranks.run(num_ranks, choice_cases.products_of_a_backward):
        assert 0 < products_and_waits < lasted


def test_a_trace_of_plain_shows_no_product_beside_a_transfer(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(2, choice_cases.traced, str(tmp_path), "plain"):
        assert found["products"] == 1
        assert not found["beside"]


def test_traces_nest(ranks: Ranks) -> None:
    assert ranks.run(2, choice_cases.nested_traces) == [[True, False]] * 2


def test_what_is_drawn_while_a_shape_is_measured_is_drawn_again(ranks: Ranks) -> None:
    assert ranks.run(2, choice_cases.drawn_in_trials) == [(True, True)] * 2


def test_the_reducer_tells_how_long_it_was_blocked(ranks: Ranks) -> None:
    (_, _, table), (mine, reported, _) = ranks.run(2, choice_cases.reducer_exposed)
    assert mine == pytest.approx(reported)
    assert 0.04 < mine < 5
    assert "gradient reduction" in table
