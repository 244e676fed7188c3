"""Long runs: no deadlock under random pauses, several groups at once, no buffer used after its release."""

import pytest

from tests.overlap import sequence_cases
from tests.ranks import Ranks


@pytest.mark.parametrize(("num_ranks", "num_sequences"), [(2, 70), (3, 70), (4, 50), (8, 10)])
def test_random_sequences_with_random_pauses_neither_hang_nor_err(
    ranks: Ranks, num_ranks: int, num_sequences: int
) -> None:
    ranks.run(num_ranks, sequence_cases.random_sequences, 1000 * num_ranks, num_sequences, timeout_s=240)


def test_operations_of_two_groups_interleave(ranks: Ranks) -> None:
    ranks.run(4, sequence_cases.two_groups, 5)


def test_two_models_share_a_group(ranks: Ranks) -> None:
    ranks.run(3, sequence_cases.two_models, 5)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_no_buffer_is_read_after_its_release(ranks: Ranks, num_ranks: int) -> None:
    ranks.run(num_ranks, sequence_cases.poisoned, 100, 20)


def test_every_transfer_is_waited_for_once(ranks: Ranks) -> None:
    ranks.run(3, sequence_cases.buffers_of_transfers)


@pytest.mark.parametrize("num_subslices", [1, 2, 4])
def test_a_scatter_has_no_more_in_flight_than_documented(ranks: Ranks, num_subslices: int) -> None:
    slice_elements = 8 * 2
    one_subslice = slice_elements // num_subslices
    for most in ranks.run(4, sequence_cases.most_in_flight, "ring", num_subslices):
        assert most == 2 * slice_elements
    for most in ranks.run(4, sequence_cases.most_in_flight, "direct", num_subslices):
        assert most == 2 * (2 * slice_elements + one_subslice)


def test_the_state_of_a_group_goes_with_it(ranks: Ranks) -> None:
    ranks.run(2, sequence_cases.state_goes_with_its_group)
