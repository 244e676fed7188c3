"""Sequences that a plan splits: whose rows lie where when they are gathered, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.overlap.row_counts import RowCount, Rows
from tests.overlap import row_cases
from tests.ranks import Ranks


@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=3), st.integers(1, 9))
def test_gathered_rows_are_every_ranks_part_of_every_sequence(totals: list[int], world_size: int) -> None:
    counts = [RowCount(str(number)) for number in range(len(totals))]
    for count, total in zip(counts, totals):
        count.total = total
    rows = Rows(tuple(counts))
    sequences = torch.arange(sum(totals)).split(totals)
    parts = [[*sequence.chunk(world_size), *[sequence[:0]] * world_size] for sequence in sequences]
    ranks = [torch.cat([part[rank] for part in parts]) for rank in range(world_size)]
    assert rows.sizes(world_size) == [len(one) for one in ranks]
    assert rows.total == sum(totals)
    assert torch.equal(rows.gathered_order(world_size, torch.device("cpu")), torch.cat(ranks))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_two_sequences_equal_one_process(ranks: Ranks, num_ranks: int) -> None:
    for lengths in ((7, 5), (2, 9)):
        ranks.run(num_ranks, row_cases.trained, lengths)


def test_wrong_rows_are_refused(ranks: Ranks) -> None:
    ranks.run(2, row_cases.refused)
