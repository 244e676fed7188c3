"""Adapters whose layers are split over ranks equal one process: velocity, every gradient, norms, state dict."""

from typing import Any

import pytest

from tests.models import tensor_parallel_cases as cases
from tests.ranks import Ranks


def case(family: str, shard_rows: bool, tuning: str = "full", dtype: str = "float64", **more: Any) -> dict[str, Any]:
    return {"family": family, "shard_rows": shard_rows, "tuning": tuning, "dtype": dtype, **more}


CASES = {
    1: [case("flux", True)],
    2: [
        case("flux", True, checkpointed=True),
        case("wan", True, "lora", guidance=5.0),
        case("digits", False, "lora", checkpointed=True),
        case("wan", False, "full", "float32"),
    ],
    3: [
        case("flux", True, "lora", guidance=3.0, checkpointed=True),
        case("wan", True, checkpointed=True),
        case("flux", False, "full", "float32"),
    ],
    4: [
        case("flux", True, "full", "float32"),
        case("wan", True, "full", "float32"),
        case("digits", True, "full", "float32", guidance=2.0),
    ],
}
"""By ranks. Of the digits' two text tokens four ranks have one, one, none and none."""


@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=[pytest.mark.slow] if n == 3 else []) for n in CASES])
def test_a_split_adapter_equals_one_process(ranks: Ranks, num_ranks: int) -> None:
    for one in CASES[num_ranks]:
        ranks.run(num_ranks, cases.on_tensor_axis, one, timeout_s=120)


@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_in_16_bits_a_split_adapter_is_as_near_to_float32_as_a_whole_one(ranks: Ranks, how: str) -> None:
    for family, shard_rows in (("flux", True), ("wan", True), ("flux", False)):
        ranks.run(2, cases.in_16_bits, case(family, shard_rows, "lora", "float32"), how, timeout_s=120)


@pytest.mark.parametrize("shard_rows", [True, False])
def test_image_to_video_equals_one_process(ranks: Ranks, shard_rows: bool) -> None:
    ranks.run(2, cases.image_to_video, shard_rows, timeout_s=120)


@pytest.mark.parametrize(("family", "shard_rows"), [("flux", True), ("wan", True), ("flux", False)])
@pytest.mark.parametrize("tuning", [pytest.param("full", marks=pytest.mark.slow), "lora"])
def test_tensor_beside_fsdp2_equals_one_process(ranks: Ranks, family: str, tuning: str, shard_rows: bool) -> None:
    ranks.run(4, cases.beside_fsdp, case(family, shard_rows, tuning, checkpointed=tuning == "lora"), timeout_s=120)


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_tensor_beside_late_reduction_equals_one_process(ranks: Ranks, family: str) -> None:
    tuning = "lora" if family == "flux" else "full"
    ranks.run(4, cases.beside_late_reduction, case(family, True, tuning), timeout_s=120)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_norm_of_mixed_gradients_is_that_of_one_process(ranks: Ranks, num_ranks: int) -> None:
    ranks.run(num_ranks, cases.mixed_norms, timeout_s=120)


def test_what_cannot_be_split_is_refused(ranks: Ranks) -> None:
    ranks.run(4, cases.refused, timeout_s=120)
