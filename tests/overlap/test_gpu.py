"""The operations on a CUDA device: ranks that share one through gloo, and NCCL where there is one for each."""

from typing import Any

import pytest
import torch
from hypothesis import given

from tests.overlap import gpu_cases, test_attention, test_gradients, test_matmul, test_modules
from tests.overlap.examples import few
from tests.ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
products = pytest.mark.parametrize("operation", ["column", "row", "all_reduce", "replicate", "weight_gather"])
both = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def without_reference(case: dict[str, Any]) -> dict[str, Any]:
    """gloo has not every collective of the reference for a device's tensors."""
    return {**case, "schedule": "direct"} if case["schedule"] == "reference" else case


@products
@both
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_product_equals_one_process(ranks: Ranks, num_ranks: int, dtype: torch.dtype, operation: str) -> None:
    @few(num_ranks, 12)
    @given(test_matmul.cases(num_ranks))
    def check(case: dict[str, Any]) -> None:
        ranks.run(num_ranks, gpu_cases.shared, "matmul", operation, dtype, without_reference(case))

    check()


@products
def test_no_buffer_is_read_after_its_release(ranks: Ranks, operation: str) -> None:
    @few(2, 8)
    @given(test_matmul.cases(2))
    def check(case: dict[str, Any]) -> None:
        ranks.run(2, gpu_cases.poisoned, torch.float64, operation, without_reference(case))

    check()


@both
@pytest.mark.parametrize("layer", ["ulysses", "query_split"])
def test_attention_equals_one_process(ranks: Ranks, dtype: torch.dtype, layer: str) -> None:
    @few(2, 8)
    @given(test_attention.cases(2, 2))
    def check(case: dict[str, Any]) -> None:
        ranks.run(2, gpu_cases.shared, "attention", layer, dtype, without_reference(case))

    check()


@pytest.mark.parametrize("way", ["summed", "sharded", "late_bound", "two_sums"])
def test_reduced_gradients_equal_one_process(ranks: Ranks, way: str) -> None:
    @few(2, 4)
    @given(test_gradients.cases)
    def check(case: dict[str, Any]) -> None:
        ranks.run(2, gpu_cases.shared, "gradient", way, torch.float64, case)

    check()


def test_the_hook_of_ddp_averages(ranks: Ranks) -> None:
    ranks.run(2, gpu_cases.shared, "gradient", "hook", torch.float64, {"seed": 1})


def test_a_backward_on_a_side_stream_is_reduced(ranks: Ranks) -> None:
    ranks.run(2, gpu_cases.reducer_on_a_side_stream)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_parallel_model_equals_the_plain_one(ranks: Ranks, num_ranks: int) -> None:
    @few(num_ranks, 5)
    @given(test_modules.cases)
    def check(case: dict[str, Any]) -> None:
        ranks.run(num_ranks, gpu_cases.shared, "module", "trained", torch.float64, case)

    check()


@pytest.mark.parametrize("case", ["one_gather_for_siblings", "with_data_parallel"])
def test_parallel_modules_equal_one_process(ranks: Ranks, case: str) -> None:
    ranks.run(4, gpu_cases.shared, "module", case, torch.float64)


def test_a_transfer_may_be_awaited_on_another_stream(ranks: Ranks) -> None:
    ranks.run(2, gpu_cases.other_stream)


def test_a_trace_has_the_times_of_the_device(ranks: Ranks) -> None:
    for found in ranks.run(2, gpu_cases.traced):
        assert found == (True, True, True)


def test_the_automatic_choice_is_the_same_on_every_rank(ranks: Ranks) -> None:
    assert len({str(choices) for choices in ranks.run(2, gpu_cases.automatic)}) == 1


@products
@both
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_product_over_nccl_equals_one_process(ranks: Ranks, dtype: torch.dtype, operation: str) -> None:
    num_ranks = min(4, torch.cuda.device_count())

    @few(num_ranks, 8)
    @given(test_matmul.cases(num_ranks))
    def check(case: dict[str, Any]) -> None:
        ranks.run(num_ranks, gpu_cases.each_its_own, operation, dtype, without_reference(case))

    check()
