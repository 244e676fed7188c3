"""Gradients of a sharded model equal those of one process, whenever and however often they are reduced."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.overlap import fsdp_cases
from tests.overlap.examples import few
from tests.ranks import Ranks

cases = st.fixed_dictionaries(
    {
        "hold": st.sampled_from(["late", "coalesced"]),
        "send": st.sampled_from(["last", "every"]),
        "tuning": st.sampled_from(["full", "part"]),
        "dtype": st.sampled_from(["float64", "float32"]),
        "folded": st.booleans(),
        "given_up": st.booleans(),
        "reshard": st.booleans(),
        "seed": st.integers(0, 99),
    }
)
CASE = {"tuning": "full", "dtype": "float64", "folded": False, "given_up": False, "reshard": True, "seed": 1}


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_weighted_sharded_gradients_equal_one_process(ranks: Ranks, num_ranks: int) -> None:
    @few(num_ranks, 5)
    @given(cases)
    def check(case: dict[str, Any]) -> None:
        ranks.run(num_ranks, fsdp_cases.weighted, case)

    check()


@pytest.mark.parametrize("hold", ["late", "coalesced"])
@pytest.mark.parametrize("folded", [False, True])
def test_copies_of_a_sharded_model_are_summed_when_weights_are_known(ranks: Ranks, hold: str, folded: bool) -> None:
    case = {**CASE, "hold": hold, "send": "last", "copies": 2, "folded": folded}
    for counts in ranks.run(4, fsdp_cases.weighted, case):
        assert counts["all_reduce"] == counts["modules"]


@pytest.mark.parametrize(
    ("hold", "send", "sent"),
    [("coalesced", "last", 4), ("late", "last", 4 * (2 + 1)), ("late", "every", 3 * (2 * 3 + 1) + (2 + 1))],
)
def test_an_iteration_sends_what_it_says(ranks: Ranks, hold: str, send: str, sent: int) -> None:
    """Two rounds of three steps and a term aside, four modules, one of which never runs and leaves once a sample."""
    for counts in ranks.run(2, fsdp_cases.weighted, {**CASE, "hold": hold, "send": send}):
        assert counts["modules"] == 4
        assert counts["sent"] == sent
        assert counts["reduce_scatter_single"] == 0
        assert counts["all_gather_single"] > 0


@pytest.mark.parametrize("tuning", ["full", "part"])
def test_gradients_whose_weights_are_known_are_reduced_once(ranks: Ranks, tuning: str) -> None:
    for counts in ranks.run(3, fsdp_cases.known_before, tuning):
        assert counts["reduce_scatter_single"] == 0
        assert counts["sent"] == (4 if tuning == "full" else 3)
        assert counts["own"] == (3 if tuning == "full" else 2)


def test_no_backward_counts_as_zeros(ranks: Ranks) -> None:
    ranks.run(2, fsdp_cases.idle)


def test_pieces_are_not_awaited_before_their_weights_come(ranks: Ranks) -> None:
    for ended, exposed in ranks.run(2, fsdp_cases.blocked_before_settle):
        assert ended < 0.5
        assert exposed > 0.5


def test_what_would_be_lost_in_silence_is_refused(ranks: Ranks) -> None:
    ranks.run(3, fsdp_cases.misuse)


def test_one_rank_has_no_reduction(ranks: Ranks) -> None:
    ranks.run(1, fsdp_cases.alone)
