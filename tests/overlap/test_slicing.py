"""The slicing that the library is compared with computes the same."""

import pytest

from tests.overlap import slicing_cases
from tests.ranks import Ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("operation", ["block", "whole_rows", "ulysses", "query_split"])
def test_slicing_gives_the_plain_outputs_and_gradients(ranks: Ranks, num_ranks: int, operation: str) -> None:
    for k in (1, 2, 4):
        ranks.run(num_ranks, slicing_cases.compare, operation, k)
