"""Plans beyond linear layers: dropout, followers, vocabulary, replicated parameters; and plans that are refused."""

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
        ranks.run(num_ranks, plan_cases.embedded, case)

    check()


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_only_rows_that_were_looked_up_travel(ranks: Ranks, num_ranks: int) -> None:
    rows = 4 * plan_cases.WIDTH * 2 * (num_ranks - 1)  # two tokens of every other rank, float32
    assert ranks.run(num_ranks, plan_cases.looked_up) == [(rows, rows)] * num_ranks


@pytest.mark.parametrize("how", ["as many of each, equally far", "another shape", "another dtype", "a row more"])
def test_different_tokens_are_refused_on_every_rank_at_once(ranks: Ranks, how: str) -> None:
    ranks.run(2, plan_cases.different_tokens, how, timeout_s=10)


@pytest.mark.parametrize("sequence", [True, False])
def test_tokens_may_change_once_they_were_looked_up(ranks: Ranks, sequence: bool) -> None:
    ranks.run(2, plan_cases.tokens_that_change, sequence)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_entropies_of_16_bit_logits_are_summed_in_float32(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks.run(3, plan_cases.entropies_in, dtype)


def test_rows_whose_targets_are_ignored_count_nothing_whatever_is_in_them(ranks: Ranks) -> None:
    ranks.run(2, plan_cases.rows_that_count_nothing)


def test_bad_targets_are_refused_on_every_rank(ranks: Ranks) -> None:
    ranks.run(3, plan_cases.bad_targets)


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
