"""peft's LoRA on a parallel model equals it on one process: outputs, every gradient, checkpoints."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.overlap import lora_cases
from tests.overlap.examples import few
from tests.ranks import Ranks

cases = st.fixed_dictionaries(
    {
        "sequence": st.booleans(),
        "rows": st.integers(1, 9),
        "schedule": st.sampled_from(["direct", "ring", "plain"]),
        "num_subslices": st.sampled_from([1, 2]),
        "checkpointed": st.booleans(),
        "active": st.sampled_from(["default", "second", ["default", "second"]]),
        "disabled": st.sampled_from([False, False, False, True]),
        "trainable_base": st.booleans(),
        "peft_first": st.sampled_from([True, True, False]),
        "prefixed": st.booleans(),
        "dropout": st.sampled_from([0.0, 0.3]),
        "seed": st.integers(0, 99),
    }
)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_an_adapted_parallel_model_equals_one_process(ranks: Ranks, num_ranks: int) -> None:
    @few(num_ranks, 9)
    @given(cases)
    def check(case: dict[str, Any]) -> None:
        ranks.run(num_ranks, lora_cases.trained, case)

    check()


def test_adapters_ride_on_the_communication_of_their_base_layers(ranks: Ranks) -> None:
    layers, directions, norms, whole_adapters, float32_in_row_layers = 4, 2, 2, 8, 8
    num_calls = layers * directions + norms + whole_adapters  # the gradients of the last two are summed apart
    assert ranks.run(2, lora_cases.num_calls, torch.float64) == [num_calls] * 2
    assert ranks.run(2, lora_cases.num_calls, torch.bfloat16) == [num_calls + float32_in_row_layers] * 2


def test_adapters_are_sharded_as_their_base_layers(ranks: Ranks) -> None:
    ranks.run(2, lora_cases.layouts)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_saved_adapter_is_that_of_one_process_and_back(ranks: Ranks, num_ranks: int) -> None:
    ranks.run(num_ranks, lora_cases.checkpoints)


def test_adapters_merge_on_the_shards(ranks: Ranks) -> None:
    ranks.run(3, lora_cases.merged_after)


def test_what_cannot_be_parallel_is_refused_and_changes_nothing(ranks: Ranks) -> None:
    ranks.run(2, lora_cases.refusals)


@pytest.mark.parametrize("sequence", [True, False])
def test_an_adapted_llama_equals_one_process(ranks: Ranks, sequence: bool) -> None:
    ranks.run(4, lora_cases.llama, sequence, timeout_s=120)
