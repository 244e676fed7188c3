"""Decoders of transformers under the shipped plans equal the one-process models: logits, loss, every gradient."""

from typing import Any

import pytest

from tests.overlap import decoder_cases
from tests.ranks import Ranks

SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2}
"""On 4 ranks refused, on 3 ranks two ranks share a head with the one between them."""


def case(family: str, sequence: bool, **changes: Any) -> dict[str, Any]:
    return {
        "family": family,
        "sequence": sequence,
        "settings": {},
        "options": {},
        "rows": [5, 8],
        "checkpointed": False,
        **changes,
    }


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_decoder_equals_one_process_with_uneven_rows(
    ranks: Ranks, num_ranks: int, family: str, sequence: bool
) -> None:
    ranks.run(num_ranks, decoder_cases.trained, case(family, sequence))


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("changes", [{"checkpointed": True}, {"options": {"keep_gathered": True}}])
def test_ranks_share_heads_under_checkpointing_and_not(ranks: Ranks, changes: dict[str, Any], sequence: bool) -> None:
    ranks.run(3, decoder_cases.trained, case("qwen3", sequence, settings=SIX_HEADS, **changes))


@pytest.mark.parametrize("checkpointed", [True, False])
@pytest.mark.parametrize("sequence", [True, False])
def test_tied_weights_get_the_gradient_of_both_uses(ranks: Ranks, sequence: bool, checkpointed: bool) -> None:
    settings = {"tie_word_embeddings": True, "num_key_value_heads": 1}
    ranks.run(4, decoder_cases.trained, case("qwen2", sequence, settings=settings, checkpointed=checkpointed))


def test_fewer_rows_than_ranks(ranks: Ranks) -> None:
    ranks.run(4, decoder_cases.trained, case("llama", True, rows=[1, 2, 3]))


@pytest.mark.parametrize("schedule", ["direct", "ring", "plain"])
def test_every_schedule_with_even_rows(ranks: Ranks, schedule: str) -> None:
    options = {"uneven": False, "schedule": schedule, "num_subslices": 2}
    ranks.run(2, decoder_cases.trained, case("llama", True, rows=[4, 6], options=options))


def test_logits_of_the_last_rows_alone(ranks: Ranks) -> None:
    ranks.run(4, decoder_cases.trained, case("llama", True, keep=2))


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_clipping_and_a_step_are_those_of_one_process(ranks: Ranks, num_ranks: int, sequence: bool) -> None:
    ranks.run(num_ranks, decoder_cases.clipped, "qwen3", sequence)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_on_the_meta_device_is_filled_from_a_plain_checkpoint(ranks: Ranks, tied: bool) -> None:
    ranks.run(4, decoder_cases.checkpoints, "qwen3", tied)


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_decoding_with_a_cache_and_fewer_rows_than_ranks(ranks: Ranks, num_ranks: int, sequence: bool) -> None:
    ranks.run(num_ranks, decoder_cases.decoded, "llama", sequence)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_decoding_is_left_plain_where_overlap_would_lose(ranks: Ranks, num_rows: int) -> None:
    for calls in ranks.run(2, decoder_cases.left_plain, num_rows):
        assert {operation for operation, *_ in calls} == {"all_gather_matmul", "matmul_reduce_scatter"}
        assert {schedule for _, schedule, _ in calls} == {"plain"}
        assert sum(count for *_, count in calls) == 2 * (2 * 4 + 1)  # steps; layers, with two pairs each; the head


def test_masks_and_positions_are_of_all_rows(ranks: Ranks) -> None:
    ranks.run(2, decoder_cases.packed_and_masked)


def test_own_rows_may_be_embedded_outside(ranks: Ranks) -> None:
    ranks.run(2, decoder_cases.embedded_outside)


def test_labels_with_the_shipped_loss_and_with_that_of_transformers(ranks: Ranks) -> None:
    ranks.run(2, decoder_cases.labelled)


def test_what_would_be_wrong_in_silence_is_refused(ranks: Ranks) -> None:
    ranks.run(2, decoder_cases.refused)
