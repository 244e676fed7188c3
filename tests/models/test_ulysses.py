"""FLUX, the digits and Wan of diffusers, their sequences split over ranks, equal one process."""

from typing import Any

import pytest

from tests.models import ulysses_cases
from tests.ranks import Ranks

FLUX = {"family": "flux", "heads": 5, "batch": 2, "grid": (1, 2, 3), "text": 5, "dtype": "float64", "tuning": "full"}
WAN = {**FLUX, "family": "wan", "grid": (3, 1, 3)}


@pytest.fixture(scope="module", autouse=True)
def imported(ranks: Ranks) -> None:
    """diffusers and peft on every rank, before any rank waits for another."""
    ranks.run(4, ulysses_cases.imported, timeout_s=240)


def case(of: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**of, **changes}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("family", [FLUX, WAN], ids=["flux", "wan"])
def test_velocity_and_summed_gradients_are_those_of_one_process(
    ranks: Ranks, family: dict[str, Any], num_ranks: int
) -> None:
    ranks.run(num_ranks, ulysses_cases.trained, family)
    if num_ranks > 1:
        lora = case(family, tuning="lora", checkpointed=num_ranks == 3, batch=1)
        ranks.run(num_ranks, ulysses_cases.trained, lora)
    if num_ranks == 2:
        ranks.run(num_ranks, ulysses_cases.trained, case(family, dtype="float32", num_subslices=2, checkpointed=True))


@pytest.mark.parametrize("family", [FLUX, WAN], ids=["flux", "wan"])
def test_a_rank_may_have_no_token_at_all(ranks: Ranks, family: dict[str, Any]) -> None:
    few = case(family, grid=(1, 1, 2), text=1)
    ranks.run(4, ulysses_cases.trained, few)
    ranks.run(4, ulysses_cases.trained, case(few, tuning="lora", split_first=True, checkpointed=True))


@pytest.mark.parametrize("family", [FLUX, WAN], ids=["flux", "wan"])
def test_lora_may_be_injected_after_the_split(ranks: Ranks, family: dict[str, Any]) -> None:
    ranks.run(3, ulysses_cases.trained, case(family, tuning="lora", split_first=True))


@pytest.mark.parametrize("schedule", ["plain", "auto"])
def test_other_schedules_give_the_same(ranks: Ranks, schedule: str) -> None:
    ranks.run(2, ulysses_cases.trained, case(FLUX, schedule=schedule, tuning="lora"))
    ranks.run(2, ulysses_cases.trained, case(WAN, schedule=schedule))


@pytest.mark.parametrize("family", [FLUX, WAN], ids=["flux", "wan"])
def test_a_bf16_base_and_autocast_train_as_closely_as_bf16_allows(ranks: Ranks, family: dict[str, Any]) -> None:
    ranks.run(2, ulysses_cases.in_bf16, case(family, dtype="bfloat16", tuning="lora"), False)
    ranks.run(2, ulysses_cases.in_bf16, case(family, dtype="float32"), True)
    ranks.run(2, ulysses_cases.in_bf16, case(family, dtype="float32", tuning="lora"), True)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("family", [FLUX, WAN], ids=["flux", "wan"])
def test_graphs_that_are_kept_go_backward_in_order(ranks: Ranks, family: dict[str, Any], checkpointed: bool) -> None:
    ranks.run(3, ulysses_cases.retained, case(family, tuning="lora", checkpointed=checkpointed))


@pytest.mark.parametrize(("num_ranks", "tuning", "dtype"), [(2, "lora", "float32"), (3, "full", "float64")])
def test_the_digits_under_guidance_are_those_of_one_process(
    ranks: Ranks, num_ranks: int, tuning: str, dtype: str
) -> None:
    of = {"tuning": tuning, "dtype": dtype, "checkpointed": num_ranks == 2}
    ranks.run(num_ranks, ulysses_cases.guided, of)


@pytest.mark.parametrize("family", [FLUX, WAN], ids=["flux", "wan"])
def test_layers_that_others_patch_or_watch_are_called_whole(ranks: Ranks, family: dict[str, Any]) -> None:
    ranks.run(3, ulysses_cases.called_whole, family)


@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("family", [FLUX, WAN], ids=["flux", "wan"])
def test_tensor_parallelism_may_stand_beside_it(ranks: Ranks, family: dict[str, Any], tuning: str) -> None:
    ranks.run(4, ulysses_cases.beside_tensor_parallel, case(family, heads=6, tuning=tuning))


@pytest.mark.parametrize("family", [FLUX, WAN], ids=["flux", "wan"])
def test_fsdp_may_shard_over_the_same_ranks(ranks: Ranks, family: dict[str, Any]) -> None:
    ranks.run(2, ulysses_cases.beside_fsdp, family)
    ranks.run(2, ulysses_cases.beside_fsdp, case(family, tuning="lora", checkpointed=True))


def test_samples_of_one_forward_keep_their_gradients_apart(ranks: Ranks) -> None:
    ranks.run(2, ulysses_cases.by_sample, case(FLUX))


def test_messages_are_overlapped_in_every_attention_forward_and_backward(ranks: Ranks) -> None:
    lines = set(ranks.run(2, ulysses_cases.reported, FLUX)[0])
    assert {line[2] for line in lines} == {"direct"}
    for way in ("", " backward"):
        assert (f"matmul_all_to_all{way}", "image", "direct", 2) in lines
        assert (f"matmul_all_to_all{way}", "text", "direct", 2) in lines
        assert (f"matmul_all_to_all{way}", "joint", "direct", 2) in lines
        assert sum(line[3] for line in lines if line[0] == f"attention_all_to_all{way}") == 4


@pytest.mark.parametrize("family", [FLUX, WAN], ids=["flux", "wan"])
def test_a_copy_and_a_merged_model_are_split_as_well(ranks: Ranks, family: dict[str, Any]) -> None:
    ranks.run(2, ulysses_cases.copied, case(family, tuning="lora"))


def test_what_cannot_be_split_is_one_clear_line(ranks: Ranks) -> None:
    found = ranks.run(4, ulysses_cases.refused)[0]
    assert found == {
        "rows": "its layers are split with sharded rows; beside parallel.ulysses split them with rows whole",
        "heads": "num_heads=2 cannot be split over 4 ranks; set parallel.ulysses to at most 2 (divisors "
        "of it, 1, 2, give every rank as many)",
        "class": "Linear cannot be split by sequence; FluxTransformer2DModel and WanTransformer3DModel of diffusers "
        "can",
        "twice": "this transformer is split by sequence already",
    }
