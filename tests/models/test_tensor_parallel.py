"""Adapters whose layers are split over ranks equal one process: velocity, every gradient, norms, state dict."""

from typing import Any

import pytest

from tests.models import tensor_parallel_cases as cases
from tests.ranks import Ranks


def case(family: str, shard_rows: bool, tuning: str = "full", dtype: str = "float64", **more: Any) -> dict[str, Any]:
    return {"family": family, "shard_rows": shard_rows, "tuning": tuning, "dtype": dtype, **more}


SHARDED = [
    case("flux", True),
    case("flux", True, "lora", guidance=3.0, checkpointed=True),
    case("flux", True, "lora", "float32"),
    case("wan", True, checkpointed=True),
    case("wan", True, "lora", guidance=5.0),
    case("wan", True, "full", "float32"),
]
WHOLE = [case("flux", False, "full", "float32"), case("wan", False, "lora", guidance=5.0)]
DIGITS = [case("digits", True, "full", "float32", guidance=2.0), case("digits", False, "lora", checkpointed=True)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_an_adapter_with_sharded_rows_equals_one_process(ranks: Ranks, num_ranks: int) -> None:
    for one in SHARDED if num_ranks > 1 else SHARDED[:1]:
        ranks.run(num_ranks, cases.on_tensor_axis, one)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_an_adapter_with_whole_rows_equals_one_process(ranks: Ranks, num_ranks: int) -> None:
    for one in WHOLE:
        ranks.run(num_ranks, cases.on_tensor_axis, one)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_digits_equal_one_process_and_some_ranks_have_no_text(ranks: Ranks, num_ranks: int) -> None:
    for one in DIGITS:
        ranks.run(num_ranks, cases.on_tensor_axis, one)


@pytest.mark.parametrize("shard_rows", [True, False])
def test_image_to_video_equals_one_process(ranks: Ranks, shard_rows: bool) -> None:
    ranks.run(2, cases.image_to_video, shard_rows)


@pytest.mark.parametrize("family", ["flux", "wan"])
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_tensor_beside_fsdp2_equals_one_process(ranks: Ranks, family: str, tuning: str) -> None:
    for shard_rows in (True, False):
        ranks.run(4, cases.beside_fsdp, case(family, shard_rows, tuning, checkpointed=shard_rows))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_norm_of_mixed_gradients_is_that_of_one_process(ranks: Ranks, num_ranks: int) -> None:
    ranks.run(num_ranks, cases.mixed_norms)


def test_what_cannot_be_split_is_refused(ranks: Ranks) -> None:
    ranks.run(4, cases.refused)
