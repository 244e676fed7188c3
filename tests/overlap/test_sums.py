"""How sums are kept: in one fixed order, in float32, rounded once; the ring's in the dtype of the wire."""

import pytest
import torch

from tests.overlap import sum_cases
from tests.ranks import Ranks

SIXTEEN_BIT = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@SIXTEEN_BIT
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_direct_sum_is_the_documented_one_bit_for_bit(ranks: Ranks, num_ranks: int, dtype: torch.dtype) -> None:
    ranks.run(num_ranks, sum_cases.direct_sum_in_fixed_order, dtype)


@SIXTEEN_BIT
def test_direct_is_nearer_to_float64_than_the_ring(ranks: Ranks, dtype: torch.dtype) -> None:
    ring = ranks.run(8, sum_cases.relative_error, "ring", dtype)[0]
    direct = ranks.run(8, sum_cases.relative_error, "direct", dtype)[0]
    rounding = torch.finfo(dtype).eps / 2
    assert direct < 0.8 * ring
    assert direct < rounding


@pytest.mark.parametrize("schedule", ["direct", "ring"])
def test_two_runs_are_bitwise_equal(ranks: Ranks, schedule: str) -> None:
    ranks.run(3, sum_cases.twice, schedule)


@pytest.mark.parametrize("num_subslices", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["direct", "ring", "plain"])
def test_a_bias_has_the_same_gradient_on_every_rank(ranks: Ranks, schedule: str, num_subslices: int) -> None:
    ranks.run(3, sum_cases.bias_gradients, schedule, num_subslices)


@SIXTEEN_BIT
def test_weight_gradients_are_summed_over_slices_in_float32(ranks: Ranks, dtype: torch.dtype) -> None:
    for error in ranks.run(4, sum_cases.sixteen_bit_gradients, dtype):
        assert error < 2
