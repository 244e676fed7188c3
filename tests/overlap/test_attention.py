"""Sequence-parallel and query-split attention equal the whole layer by one process, outputs and gradients."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.overlap import split_heads
from tests.overlap import attention_cases
from tests.overlap.examples import few
from tests.ranks import Ranks

WORLDS = [1, 2, 3, 4, 5, 8]


@st.composite
def cases(draw: st.DrawFn, num_ranks: int) -> dict[str, Any]:
    kv_heads = num_ranks + draw(st.integers(0, 3))
    rows = draw(st.lists(st.integers(0, 4), min_size=num_ranks, max_size=num_ranks).filter(any))
    return {
        "rows": rows,
        "batch": draw(st.integers(1, 2)),
        "heads": kv_heads * draw(st.integers(1, 2)),
        "kv_heads": kv_heads,
        "fused": draw(st.booleans()),
        "causal": draw(st.booleans()),
        "mask": draw(st.sampled_from(["none", "added", "bool", "keys"])),
        "by_hand": draw(st.booleans()),
        "schedule": draw(st.sampled_from(["direct", "direct", "plain"])),
        "num_subslices": draw(st.sampled_from([1, 2, 4])),
        "seed": draw(st.integers(0, 99)),
    }


@pytest.mark.parametrize("num_ranks", WORLDS)
@pytest.mark.parametrize("layer", ["ulysses", "query_split"])
def test_attention_equals_one_process(ranks: Ranks, num_ranks: int, layer: str) -> None:
    @few(num_ranks, 10)
    @given(cases(num_ranks))
    def check(case: dict[str, Any]) -> None:
        if layer == "query_split" and case["schedule"] == "direct" and case["seed"] % 2:
            case["schedule"] = "ring"
        ranks.run(num_ranks, getattr(attention_cases, layer), case)

    check()


def test_attention_goes_backward_once_and_needs_no_weight_gradients(ranks: Ranks) -> None:
    ranks.run(3, attention_cases.frozen_weights, group_timeout_s=10)


def test_attention_works_under_activation_checkpointing(ranks: Ranks) -> None:
    ranks.run(3, attention_cases.checkpointed)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_heads_are_split_evenly_and_every_rank_has_its_own_keys(world_size: int) -> None:
    heads, kv_heads = split_heads(30, world_size, 15)
    assert sum(heads) == 30
    assert sum(kv_heads) == 15
    assert [2 * count for count in kv_heads] == heads
    assert max(kv_heads) - min(kv_heads) <= 1


def test_too_few_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="num_kv_heads=2 cannot be split over 4 ranks; use at most 2 ranks"):
        split_heads(8, 4, 2)
    with pytest.raises(ValueError, match="num_heads=3 cannot be split over 4 ranks"):
        split_heads(3, 4)
    with pytest.raises(ValueError, match="num_kv_heads=4 does not divide num_heads=6"):
        split_heads(6, 2, 4)
