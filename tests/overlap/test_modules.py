"""A parallel model equals the plain one: outputs, gradients, checkpoints, clip norm, and beside torch's."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.overlap import module_cases
from tests.overlap.examples import few
from tests.ranks import Ranks

WORLDS = [1, 2, 3, 4, 5, 8]
cases = st.fixed_dictionaries(
    {
        "sequence": st.booleans(),
        "rows": st.integers(1, 9),
        "schedule": st.sampled_from(["direct", "ring", "plain"]),
        "num_subslices": st.sampled_from([1, 2]),
        "keep_gathered": st.booleans(),
        "checkpointed": st.booleans(),
        "seed": st.integers(0, 99),
    }
)


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_a_parallel_model_equals_the_plain_one(ranks: Ranks, num_ranks: int) -> None:
    @few(num_ranks, 5)
    @given(cases)
    def check(case: dict[str, Any]) -> None:
        ranks.run(num_ranks, module_cases.trained, case)

    check()


def test_siblings_share_one_gather_forward_and_backward(ranks: Ranks) -> None:
    layers, gather_and_scatter, directions, norms = 2, 2, 2, 2
    num_calls = layers * gather_and_scatter * directions + norms
    assert ranks.run(2, module_cases.one_gather_for_siblings) == [num_calls] * 2


def test_siblings_share_nothing_if_their_input_or_a_weight_changed_in_between(ranks: Ranks) -> None:
    ranks.run(2, module_cases.a_changed_input)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_checkpoints_of_plain_and_parallel_load_in_each_other(ranks: Ranks, num_ranks: int) -> None:
    ranks.run(num_ranks, module_cases.state_dicts)


def test_a_model_on_the_meta_device_is_made_parallel_before_it_is_filled(ranks: Ranks) -> None:
    ranks.run(3, module_cases.meta_construction)


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_styles_work_beside_those_of_torch_with_the_exact_clip_norm(
    ranks: Ranks, num_ranks: int, mixed: bool
) -> None:
    ranks.run(num_ranks, module_cases.beside_torch_styles, mixed)


def test_tensor_and_data_parallel_compose(ranks: Ranks) -> None:
    ranks.run(4, module_cases.with_data_parallel)


def test_layers_can_be_built_by_hand_and_frozen(ranks: Ranks) -> None:
    ranks.run(2, module_cases.built_by_hand)


@pytest.mark.slow
def test_layers_can_be_compiled_around(ranks: Ranks) -> None:
    ranks.run(2, module_cases.compiled_around, timeout_s=180)


def test_wrong_plans_are_refused_and_change_nothing(ranks: Ranks) -> None:
    ranks.run(2, module_cases.refused_plans)


@pytest.mark.parametrize("sequence", [True, False])
def test_layers_compute_in_the_dtype_of_autocast(ranks: Ranks, sequence: bool) -> None:
    ranks.run(3, module_cases.under_autocast, sequence)
