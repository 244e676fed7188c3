"""Sequence-parallel and query-split attention equal the whole layer by one process, outputs and gradients."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.overlap import repeat_kv_heads, split_heads
from tests.overlap import attention_cases, attention_start_cases
from tests.overlap.examples import few
from tests.ranks import Ranks

WORLDS = [1, 2, 3, 4, 5, 8]
REFUSALS = {
    "features": "features=(1, 2) add up to 3, but the weight has 4",
    "splits": "2 splits of features for 1 weights",
    "heads": "but q has 1 heads",
    "bias": "a bias without a weight",
    "shapes": "q, k and v must be (batch, rows, heads, d)",
    "ring": "schedule='ring' is not one of",
}


@st.composite
def cases(draw: st.DrawFn, num_ranks: int, fewest_kv_heads: int) -> dict[str, Any]:
    kv_heads = draw(st.integers(fewest_kv_heads, num_ranks + 3))
    fewest = -(-num_ranks // kv_heads)
    rows = draw(st.lists(st.integers(0, 4), min_size=num_ranks, max_size=num_ranks).filter(any))
    return {
        "rows": rows,
        "batch": draw(st.integers(1, 2)),
        "heads": kv_heads * draw(st.integers(fewest, fewest + 1)),
        "kv_heads": kv_heads,
        "fused": draw(st.booleans()),
        "causal": draw(st.booleans()),
        "mask": draw(st.sampled_from(["none", "added", "bool", "keys"])),
        "started": draw(st.booleans()),
        "recompute": draw(st.booleans()),
        "by_hand": draw(st.booleans()),
        "schedule": draw(st.sampled_from(["direct", "direct", "plain", "auto", "reference"])),
        "num_subslices": draw(st.sampled_from([1, 2, 4])),
        "seed": draw(st.integers(0, 99)),
    }


@pytest.mark.parametrize("num_ranks", WORLDS)
@pytest.mark.parametrize("layer", ["ulysses", "query_split"])
def test_attention_equals_one_process(ranks: Ranks, num_ranks: int, layer: str) -> None:
    @few(num_ranks, 10)
    @given(cases(num_ranks, 1 if layer == "ulysses" else num_ranks))
    def check(case: dict[str, Any]) -> None:
        if layer == "query_split" and case["schedule"] == "direct" and case["seed"] % 2:
            case["schedule"] = "ring"
        ranks.run(num_ranks, getattr(attention_cases, layer), case)

    check()


def test_a_causal_layer_on_eight_ranks_equals_one_process_in_every_cut(ranks: Ranks) -> None:
    for m in (1, 2, 4):
        whole = {"rows": [3, 0, 1, 4, 2, 2, 1, 5], "batch": 1, "heads": 18, "kv_heads": 9, "fused": True, "seed": m}
        whole |= {"causal": True, "mask": "none", "started": False, "recompute": False, "by_hand": False}
        for layer, schedule in [("ulysses", "direct"), ("query_split", "direct"), ("query_split", "ring")]:
            case = {**whole, "schedule": schedule, "num_subslices": m}
            ranks.run(8, getattr(attention_cases, layer), case)


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_others_parts_are_made_first_and_the_own_last(ranks: Ranks, num_ranks: int) -> None:
    for rank, made in enumerate(ranks.run(num_ranks, attention_cases.order_of_parts)):
        others = [(rank + 1 + step) % num_ranks for step in range(num_ranks - 1)]
        for operation in ("matmul_all_to_all", "attention_all_to_all"):
            order = list(dict.fromkeys(made[operation][:num_ranks]))
            assert sorted(order[:-1]) == sorted(others), operation
            assert order[-1] == rank, operation
        assert made["first arrival waited for"] > made["own part made"]


@pytest.mark.parametrize("how", REFUSALS)
def test_attention_refuses_on_every_rank_and_the_group_lives(ranks: Ranks, how: str) -> None:
    for text in ranks.run(2, attention_cases.refuse, how):
        assert REFUSALS[how] in text


def test_attention_goes_backward_once_and_needs_no_weight_gradients(ranks: Ranks) -> None:
    ranks.run(3, attention_cases.frozen_weights, group_timeout_s=10)


@pytest.mark.parametrize(("schedule", "num_subslices"), [("direct", 1), ("direct", 2), ("plain", 1)])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_exchanges_in_halves_of_a_batch_are_the_whole_ones_bit_for_bit(
    ranks: Ranks, num_ranks: int, schedule: str, num_subslices: int
) -> None:
    ranks.run(num_ranks, attention_start_cases.in_halves, schedule, num_subslices)


def test_exchanges_in_halves_work_under_activation_checkpointing(ranks: Ranks) -> None:
    ranks.run(3, attention_start_cases.in_halves, "direct", 1, True)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_start_that_is_dropped_is_waited_for_by_the_next_call(ranks: Ranks, num_ranks: int) -> None:
    ranks.run(num_ranks, attention_start_cases.dropped)
    ranks.run(num_ranks, attention_start_cases.ended_early)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("started", "num_subslices", "dtype"), [(False, 1, "float64"), (True, 2, "float64"), (False, 2, "bfloat16")]
)
def test_an_adapter_of_low_rank_travels_in_the_message_of_its_layer(
    ranks: Ranks, num_ranks: int, started: bool, num_subslices: int, dtype: str
) -> None:
    ranks.run(num_ranks, attention_cases.low_rank, started, num_subslices, dtype)


def test_a_product_that_is_made_at_the_wait_is_as_if_made_at_the_start(ranks: Ranks) -> None:
    ranks.run(2, attention_start_cases.started_under_autocast)
    ranks.run(2, attention_start_cases.own_product_that_fails)


def test_an_adapter_that_does_not_fit_is_refused(ranks: Ranks) -> None:
    ranks.run(2, attention_cases.low_rank_that_fits_not)


def test_attention_works_under_activation_checkpointing(ranks: Ranks) -> None:
    ranks.run(3, attention_cases.checkpointed)


def test_attention_that_recomputes_keeps_no_graph_under_activation_checkpointing(ranks: Ranks) -> None:
    ranks.run(3, attention_cases.recomputed)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_heads_are_split_evenly_and_every_rank_has_its_own_keys(world_size: int) -> None:
    heads, kv_heads = split_heads(30, world_size, 15)
    assert sum(heads) == 30
    assert sum(kv_heads) == 15
    assert [2 * count for count in kv_heads] == heads
    assert max(kv_heads) - min(kv_heads) <= 1


@pytest.mark.parametrize("num_heads", [8, 12])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("world_size", [3, 5, 8])
def test_ranks_share_key_value_heads_that_are_fewer(world_size: int, num_kv_heads: int, num_heads: int) -> None:
    heads, kv_heads = split_heads(num_heads, world_size, num_kv_heads)
    weight = torch.arange(num_kv_heads).repeat_interleave(3)
    repeated = repeat_kv_heads(weight, num_kv_heads, world_size)
    assert sum(heads) == num_heads
    assert min(heads) >= 1
    if num_kv_heads < world_size:
        assert kv_heads == [1] * world_size
        used = [kv for kv, count in zip(repeated[::3].tolist(), heads) for _ in range(count)]
        assert used == [head * num_kv_heads // num_heads for head in range(num_heads)]
    else:
        assert repeated is weight


def test_too_few_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="num_heads=3 cannot be split over 4 ranks; use at most 3 ranks"):
        split_heads(3, 4)
    with pytest.raises(ValueError, match="num_kv_heads=4 does not divide num_heads=6"):
        split_heads(6, 2, 4)
    with pytest.raises(ValueError, match="a projection to 7 features has no num_kv_heads=2 heads"):
        repeat_kv_heads(torch.zeros(7, 1), 2, 4)
