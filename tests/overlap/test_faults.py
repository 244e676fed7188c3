"""A peer that disagrees or dies ends in an error that names it, on every rank, never in a hang."""

import re

import pytest

from tests.overlap import fault_cases
from tests.ranks import Ranks

DISAGREEMENTS = {
    "rows": "'shape'",
    "longer": "'shape'",
    "features": "'shape'",
    "num_subslices": "'num_subslices'",
    "schedule": "'schedule'",
    "plain": "'schedule'",
    "gradients": "'gradients'",
    "no_grad": "'gradients'",
    "keep_gathered": "'keep_gathered'",
    "sizes": "'lane'",
    "dtype": "'dtype'",
    "operation": "'operation'",
    "total": "'shape'",
}
REFUSALS = {
    "k": r"weight of shape \(2, 5\) must be \(out_features, 3\)",
    "weight of 3 dimensions": r"must be \(out_features, 3\)",
    "x of 1 dimension": "at least 2 dimensions",
    "feature dim": "dim=1 is not a row dimension",
    "far dim": "dim=4 is not a row dimension",
    "dtype": "weight is torch.float64 and x is torch.float32",
    "integers": "x is torch.int64",
    "bias": r"bias of shape \(3,\) must be \(2,\)",
    "biases": "1 biases for 2 weights",
    "no weight": "at least one weight",
    "one weight": r"takes a sequence of them, \[weight\]",
    "schedule": "schedule='circle'",
    "num_subslices": "num_subslices=0",
    "sizes": r"sizes\[\d\]=1 but this rank's slice has 4 rows",
    "too few sizes": r"sizes=\[\] must be \d row counts",
    "sizes by name": "sizes='guess'",
    "total": r"add up to \d rows, but there are 4",
    "exchange": "a scatter knows all its rows",
    "a dim by name": "dim='rows' must be an int",
    "no group": "must be a torch.distributed.ProcessGroup",
}


def same_first_fault(texts: list[str]) -> str:
    """The first fault that all ranks name."""
    first = {text.split("; seen here")[0].split("; this group is dead")[0] for text in texts}
    assert len(first) == 1, texts
    return first.pop()


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("how", DISAGREEMENTS)
def test_ranks_that_disagree_all_name_the_same_fault_and_the_group_is_dead(
    ranks: Ranks, how: str, num_ranks: int
) -> None:
    results = ranks.run(num_ranks, fault_cases.disagree, how, 1)
    assert [kind for kind, _, _ in results] == ["PeerError"] * num_ranks, results
    fault = same_first_fault([text for _, text, _ in results])
    assert DISAGREEMENTS[how] in fault
    assert "rank" in fault
    assert all("this group is dead" in after for _, _, after in results)


@pytest.mark.parametrize("how", REFUSALS)
def test_a_wrong_input_is_refused_on_every_rank_and_the_group_lives(ranks: Ranks, how: str) -> None:
    for kind, text, lives in ranks.run(2, fault_cases.refuse, how):
        assert kind == "ValueError"
        assert lives

        assert re.search(REFUSALS[how], text), text


def test_a_refusal_on_one_rank_is_the_first_cause_for_those_who_waited(ranks: Ranks) -> None:
    results = ranks.run(3, fault_cases.refuse_on_one, 1)
    assert results[1][0] == "ValueError"
    for rank in (0, 2):
        kind, text, _ = results[rank]
        assert kind == "PeerError"
        assert text.startswith("rank 1 of 3, all_gather_matmul, call 0: weight of shape (2, 7)")


def test_a_fault_reaches_ranks_that_did_not_meet_it_at_once(ranks: Ranks) -> None:
    """Rank 0 waits for rank 1, which met the fault, hung up and stays: neither its exit nor the timeout ends that."""
    for kind, seconds in ranks.run(3, fault_cases.fail_and_stay, 1):
        assert kind == "PeerError"
        assert seconds < 6


def test_a_rank_that_never_comes_ends_the_call_at_the_timeout_of_the_group(ranks: Ranks) -> None:
    kind, text, seconds = ranks.run(2, fault_cases.never_come, 1)[0]
    assert kind == "PeerError"
    assert "receiving from rank 1 " in text
    assert float(seconds) < 8


def test_ranks_at_different_calls_are_told_so_or_why(ranks: Ranks) -> None:
    """Whoever notices first names the numbers of the calls, or the refusal that made them differ."""
    results = ranks.run(3, fault_cases.one_call_more, 2)
    fault = same_first_fault([text for _, text, _ in results])
    assert "['call'] differ" in fault or "rank 2 of 3, all_gather_matmul, call 0: sizes='guess'" in fault


@pytest.mark.parametrize(
    ("what", "shape"),
    [
        ("all_gather_matmul", "(4, 1, 3)"),
        ("all_gather_matmul backward", "(4, 1, 3)"),
        ("matmul_all_to_all", "(4, 1, 2)"),
        ("attention_all_to_all backward", "(4, 1, 2)"),
        ("features_rms_norms", "(4,)"),
        ("features_rms_norms backward", "(4,)"),
        ("replicated gradients", "(6,)"),
        ("gradient reduction", "(3,)"),
    ],
)
def test_a_dead_peer_is_named_with_operation_and_shape(ranks: Ranks, what: str, shape: str) -> None:
    outcomes = ranks.outcomes(3, fault_cases.die, 1, what)
    assert outcomes[1].error == "died"
    texts = [outcomes[rank].value[1] for rank in (0, 2)]
    fault = same_first_fault(texts)
    assert " rank 1 (" in fault
    assert shape in fault
    assert what in fault


def test_a_rank_that_dies_in_a_first_call_is_missed_by_all_at_once(ranks: Ranks) -> None:
    """Rank 0 has heard from it and waits for rank 1 alone, who comes later and finds it dead."""
    outcomes = ranks.outcomes(3, fault_cases.die_while_another_is_awaited, 2, 1)
    assert outcomes[2].error == "died"
    for rank in (0, 1):
        kind, seconds = outcomes[rank].value
        assert kind == "PeerError"
        assert float(seconds) < 3


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_two_groups_first_calls_in_two_threads_do_not_wait_for_each_other(ranks: Ranks, num_ranks: int) -> None:
    ranks.run(num_ranks, fault_cases.open_two_at_once)


def test_an_error_of_one_rank_in_the_middle_of_a_call_reaches_all(ranks: Ranks) -> None:
    results = ranks.run(3, fault_cases.fail_between_products, 1)
    assert [kind for kind, _, _ in results] == ["PeerError"] * 3
    assert "MemoryError: no room for a product" in same_first_fault([text for _, text, _ in results])


def test_a_rank_outside_the_group_is_told_so(ranks: Ranks) -> None:
    results = ranks.run(2, fault_cases.stranger)
    assert results[0] == ("", "")
    assert results[1][0] == "ValueError"
    assert "not in the group" in results[1][1]


def test_headers_can_be_left_out(ranks: Ranks) -> None:
    ranks.run(2, fault_cases.unchecked)


def test_ranks_may_read_different_gradients_of_one_backward(ranks: Ranks) -> None:
    ranks.run(2, fault_cases.ask_for_one_gradient, 1)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_sum_that_was_lost_is_not_handed_out_when_it_is_waited_for_again(ranks: Ranks, num_ranks: int) -> None:
    for first, again in ranks.run(num_ranks, fault_cases.wait_twice):
        assert first[0] == again[0] == "PeerError"
        assert "lost on the way" in again[1]
