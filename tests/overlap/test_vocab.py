"""A vocabulary in parts: embedding, logits and a loss that never gathers them, beside one process."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.overlap import vocab_cases
from tests.overlap.examples import few
from tests.ranks import Ranks

cases = st.fixed_dictionaries(
    {
        "sequence": st.booleans(),
        "tied": st.booleans(),
        "bias": st.booleans(),
        "head": st.sampled_from(["vocab", "column"]),
        "padding": st.sampled_from([None, 0, 2]),
        "vocabulary": st.integers(3, 14),
        "rows": st.integers(1, 7),
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "seed": st.integers(0, 99),
    }
)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8])
def test_vocabulary_and_its_loss_equal_one_process(ranks: Ranks, num_ranks: int) -> None:
    @few(num_ranks, 8)
    @given(cases)
    def check(case: dict[str, Any]) -> None:
        ranks.run(num_ranks, vocab_cases.embedded, case)

    check()


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_only_rows_that_were_looked_up_travel(ranks: Ranks, num_ranks: int) -> None:
    rows = 4 * vocab_cases.WIDTH * 2 * (num_ranks - 1)  # two tokens of every other rank, float32
    assert ranks.run(num_ranks, vocab_cases.looked_up) == [(rows, rows)] * num_ranks


@pytest.mark.parametrize("how", ["as many of each, equally far", "another shape", "another dtype", "a row more"])
def test_different_tokens_are_refused_on_every_rank_at_once(ranks: Ranks, how: str) -> None:
    ranks.run(2, vocab_cases.different_tokens, how, timeout_s=10)


@pytest.mark.parametrize("sequence", [True, False])
def test_tokens_may_change_once_they_were_looked_up(ranks: Ranks, sequence: bool) -> None:
    ranks.run(2, vocab_cases.tokens_that_change, sequence)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_entropies_of_16_bit_logits_are_summed_in_float32(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks.run(3, vocab_cases.entropies_in, dtype)


def test_rows_whose_targets_are_ignored_count_nothing_whatever_is_in_them(ranks: Ranks) -> None:
    ranks.run(2, vocab_cases.rows_that_count_nothing)


def test_bad_targets_are_refused_on_every_rank(ranks: Ranks) -> None:
    ranks.run(3, vocab_cases.bad_targets)
