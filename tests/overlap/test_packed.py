"""Row layers whose input comes in blocks: who owns and uses which columns, and what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.overlap.packed import PackedColumns
from tests.overlap import packed_cases
from tests.ranks import Ranks


@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 64))
def test_every_column_is_used_once_and_comes_from_its_owner(blocks: list[int], world_size: int) -> None:
    columns = PackedColumns(tuple(blocks), world_size)
    used = [columns.used(rank) for rank in range(world_size)]
    assert sorted(column for one in used for column in one) == list(range(sum(blocks)))
    for user in range(0, world_size, 7):
        found: dict[int, int] = {}
        for owner in range(world_size):
            places = columns.placed(owner, user)
            sent = [columns.owned(owner).start + place for place in columns.sent(owner, user)]
            found |= dict(zip(places, sent, strict=True))
        assert [found[place] for place in range(len(used[user]))] == used[user]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_a_packed_row_layer_equals_one_process(ranks: Ranks, num_ranks: int) -> None:
    for sequence in (True, False):
        ranks.run(num_ranks, packed_cases.trained, sequence)


def test_wrong_proportions_are_refused(ranks: Ranks) -> None:
    ranks.run(2, packed_cases.refusals)
