"""Buffers are as many as `Scatter` and `gather` say, for ring and direct, however many ranks there are."""

import pytest

from tests.overlap import memory_cases
from tests.ranks import Ranks


@pytest.mark.parametrize("num_ranks", [3, 5, 8])
def test_a_ring_scatter_holds_one_slice_each_way_and_a_direct_one_its_window(ranks: Ranks, num_ranks: int) -> None:
    for m in (1, 4):
        ring = ranks.run(num_ranks, memory_cases.scatter_peak, "ring", m)
        direct = ranks.run(num_ranks, memory_cases.scatter_peak, "direct", m)
        assert ring == [2.0] * num_ranks
        assert direct == [2 * min(num_ranks - 1, 2 + 1 / m)] * num_ranks


@pytest.mark.parametrize("schedule", ["ring", "direct"])
@pytest.mark.parametrize("num_ranks", [3, 8])
def test_a_gather_holds_two_arriving_slices(ranks: Ranks, schedule: str, num_ranks: int) -> None:
    for m in (1, 4):
        peaks = ranks.run(num_ranks, memory_cases.gather_peak, schedule, m)
        assert max(peaks) <= 2 + 1 / m
