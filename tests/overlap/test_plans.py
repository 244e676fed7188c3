"""Plans beyond linear layers: dropout, followers, attention, replicated parameters; and plans that are refused."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.overlap import LinearOptions, parallelize
from stretto.overlap.heads import cut_heads
from tests.overlap import plan_cases
from tests.overlap.examples import few
from tests.ranks import Ranks


@pytest.mark.parametrize("checkpointed", [True, False])
@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_dropout_draws_what_one_process_draws(
    ranks: Ranks, num_ranks: int, sequence: bool, checkpointed: bool
) -> None:
    ranks.run(num_ranks, plan_cases.dropped, sequence, checkpointed, 5)


@pytest.mark.parametrize("checkpointed", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_row_layer_is_in_flight_until_its_follower_returns(
    ranks: Ranks, num_ranks: int, checkpointed: bool
) -> None:
    for events in ranks.run(num_ranks, plan_cases.followed, checkpointed):
        others = {1: 0, 2: 2, 3: 2}[num_ranks]  # a scatter's sums; two ranks send others' and own rows' partials
        assert events == [f"sent, {others} in flight", f"inside the follower, {others} in flight", "awaited"]


@st.composite
def attentions(draw: st.DrawFn, num_ranks: int) -> dict[str, Any]:
    kv_heads = draw(st.integers(1, 4))
    heads = math.lcm(num_ranks, kv_heads) * draw(st.integers(1, 2))
    return {
        "heads": heads,
        "kv_heads": draw(st.sampled_from([kv_heads, heads])),
        "head_dim": draw(st.integers(1, 3)),
        "rows": draw(st.integers(1, 7)),
        "schedule": draw(st.sampled_from(["direct", "ring", "plain", "auto"])),
        "seed": draw(st.integers(0, 99)),
        **{name: draw(st.booleans()) for name in ("sequence", "bias", "shared", "keyword")},
    }


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8])
def test_attention_with_any_number_of_key_value_heads(ranks: Ranks, num_ranks: int) -> None:
    @few(num_ranks, 10)
    @given(attentions(num_ranks))
    def check(case: dict[str, Any]) -> None:
        ranks.run(num_ranks, plan_cases.attended, case)

    check()


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_gradients_of_norms_are_summed_under_checkpointing_and_accumulate(
    ranks: Ranks, reentrant: bool | None
) -> None:
    ranks.run(3, plan_cases.accumulated, reentrant)


def test_an_error_in_a_forward_leaves_parameters_in_place(ranks: Ranks) -> None:
    ranks.run(2, plan_cases.an_error_inside_leaves_parameters_in_place)


@pytest.mark.slow
def test_a_plan_can_be_compiled_around(ranks: Ranks) -> None:
    ranks.run(2, plan_cases.compiled_around, timeout_s=180)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bad_plans_are_refused_and_change_nothing(ranks: Ranks, num_ranks: int) -> None:
    ranks.run(num_ranks, plan_cases.refused)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_every_query_head_finds_its_key_value_head(world_size: int, heads: int, kv: int, each: int) -> None:
    num_heads = world_size * heads * kv * each
    cut = cut_heads(num_heads, world_size, kv)
    found = [head for rank in range(world_size) for head in cut.kv_heads(rank) for _ in range(cut.group)]
    assert found == [head // (num_heads // kv) for head in range(num_heads)]
    if not cut.shares:
        assert [len(cut.kv_heads(rank)) for rank in range(world_size)] == [kv // world_size] * world_size


def test_the_ranks_that_fit_are_offered() -> None:
    with pytest.raises(ValueError, match="num_heads=30 cannot be split over 8 ranks; use 1, 2, 3, 5 or 6 ranks"):
        cut_heads(30, 8)
    with pytest.raises(ValueError, match="num_heads=3 cannot be split over 8 ranks; use 1 or 3 ranks"):
        cut_heads(3, 8)
    with pytest.raises(ValueError, match="num_kv_heads=4 does not divide num_heads=6"):
        cut_heads(6, 2, 4)


def test_a_plan_without_a_group_says_what_to_call_first_and_changes_nothing() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"not NoneType; call torch.distributed.init_process_group first"):
        parallelize(model, {"0": "column"}, None)  # type: ignore[arg-type]
    assert type(model[0]) is torch.nn.Linear


def test_options_are_looked_over_when_they_are_made() -> None:
    with pytest.raises(ValueError, match=r"schedule='dirct' is not one of 'auto', 'direct', 'ring', 'plain'"):
        LinearOptions(schedule="dirct")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"num_subslices=0 must be at least 1"):
        LinearOptions(num_subslices=0)
