"""Every product equals the problem solved by one process: outputs, every gradient, float64, 1e-12."""

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.overlap import matmul_cases
from tests.overlap.examples import few
from tests.overlap.sequence_cases import random_case
from tests.ranks import Ranks

WORLDS = [1, 2, 3, 4, 5, 8]
several_worlds = pytest.mark.parametrize("num_ranks", WORLDS)


@st.composite
def cases(draw: st.DrawFn, num_ranks: int) -> dict[str, Any]:
    """One call: even, uneven or empty slices; 2-D to 4-D inputs; every schedule and choice of gradients."""
    even = draw(st.booleans())
    size = draw(st.integers(0, 4))
    rows = [size] * num_ranks if even else draw(st.lists(st.integers(0, 5), min_size=num_ranks, max_size=num_ranks))
    inner = draw(st.sampled_from([(), (2,), (3, 2)]))
    widths = st.lists(st.integers(1, 3), min_size=num_ranks, max_size=num_ranks)
    return {
        "rows": rows,
        "inner": inner,
        "dim": draw(st.integers(0, len(inner))),
        "k": draw(st.integers(1, 4)),
        "features": draw(st.lists(widths, min_size=1, max_size=3)),
        "bias": draw(st.booleans()),
        "needs": draw(st.sampled_from([(1, 1, 1), (1, 1, 0), (1, 0, 0), (0, 1, 1), (0, 0, 1), (1, 0, 1), (0, 0, 0)])),
        "sizes": draw(st.sampled_from(["equal", "given", "exchange"] if even else ["given", "exchange"])),
        "schedule": draw(st.sampled_from(["direct", "ring", "direct", "ring", "plain", "auto", "reference"])),
        "num_subslices": draw(st.sampled_from([1, 2, 4])),
        "keep_gathered": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


@several_worlds
@pytest.mark.parametrize("operation", ["column", "row", "all_reduce", "replicate", "weight_gather"])
def test_a_product_equals_one_process(ranks: Ranks, num_ranks: int, operation: str) -> None:
    @few(num_ranks, 36)
    @given(cases(num_ranks))
    def check(case: dict[str, Any]) -> None:
        ranks.run(num_ranks, getattr(matmul_cases, operation), case)

    check()


@several_worlds
@pytest.mark.parametrize("operation", ["column", "row", "all_reduce", "replicate", "weight_gather"])
def test_every_schedule_and_cut_of_uneven_slices_equals_one_process(
    ranks: Ranks, num_ranks: int, operation: str
) -> None:
    rows = [(2 + 3 * rank) % 5 for rank in range(num_ranks)]
    for schedule in ("direct", "ring"):
        for num_subslices in (1, 2, 4):
            case = random_case(Random(num_subslices), num_ranks)
            case |= {"rows": rows, "schedule": schedule, "num_subslices": num_subslices}
            ranks.run(num_ranks, getattr(matmul_cases, operation), case)


@pytest.mark.parametrize("operation", ["gather", "scatter"])
@pytest.mark.parametrize("needs", [(1, 1, 1), (1, 0, 1), (0, 1, 1)])
def test_a_gradient_that_nobody_needs_costs_no_product(
    ranks: Ranks, operation: str, needs: tuple[int, int, int]
) -> None:
    products = 3 * (needs[0] + needs[1])  # of three slices
    assert ranks.run(3, matmul_cases.backward_products, operation, needs) == [products] * 3


@pytest.mark.parametrize("schedule", ["direct", "plain"])
@pytest.mark.parametrize("operation", ["gather", "replicate"])
def test_a_float32_weight_shares_the_gather_of_16_bit_rows(ranks: Ranks, operation: str, schedule: str) -> None:
    ranks.run(2, matmul_cases.wider, operation, schedule)


@pytest.mark.parametrize(
    ("num_ranks", "schedule", "keep_gathered", "num_products"),
    [
        (2, "direct", True, 1),
        (3, "direct", True, 1),
        (4, "direct", True, 4),
        (2, "ring", True, 2),
        (2, "direct", False, 2),
    ],
)
def test_a_kept_input_meets_the_gradient_in_one_product_where_no_send_waits_for_it(
    ranks: Ranks, num_ranks: int, schedule: str, keep_gathered: bool, num_products: int
) -> None:
    found = ranks.run(num_ranks, matmul_cases.weight_products, schedule, keep_gathered)
    assert found == [num_products] * num_ranks


@pytest.mark.parametrize("schedule", ["auto", "direct", "plain"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sums_of_one_half_are_awaited_after_the_other_halfs_backward(
    ranks: Ranks, num_ranks: int, schedule: str
) -> None:
    for order in ranks.run(num_ranks, matmul_cases.halves_backward, schedule):
        assert order[:2] == ["output 1", "output 0"]
        assert sorted(order[2:]) == ["input 0", "input 1"]


def test_the_order_of_backwards_calls_is_the_same_whatever_a_ranks_autograd_did_before(ranks: Ranks) -> None:
    ranks.run(2, matmul_cases.in_a_new_thread, 1000)
