"""What is small and summed over a group is exact, the same on every rank, announced, and in the report."""

import pytest
import torch

from tests.overlap import group_sum_cases
from tests.ranks import Ranks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_sums_are_exact_and_the_same_bits_on_every_rank(ranks: Ranks, num_ranks: int, dtype: torch.dtype) -> None:
    for shape in [(2, 3), (1,), (0, 4), (3, 7001)]:
        results = ranks.run(num_ranks, group_sum_cases.added, shape, dtype)
        assert all(result == results[0] for result in results)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_gradients_are_summed_in_one_message_before_they_are_rounded(ranks: Ranks, num_ranks: int) -> None:
    ranks.run(num_ranks, group_sum_cases.summed_gradients)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gradients_of_norms_are_summed_in_float32_and_reported(ranks: Ranks, num_ranks: int) -> None:
    assert ranks.run(num_ranks, group_sum_cases.norm_gradients) == [["replicated gradients"]] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_product_of_a_backward_is_in_the_trace(ranks: Ranks, num_ranks: int) -> None:
    for found, expected in ranks.run(num_ranks, group_sum_cases.products_of_kept_inputs):
        assert found == expected
