"""Slices of causal queries, each against no more keys than it sees, are the whole attention and its gradients."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from stretto.overlap import queries
from stretto.overlap.queries import QuerySlices, scaled_dot_product_attention
from tests.overlap.examples import few


@few(2, 60)
@given(
    rows=st.integers(1, 9),
    cuts=st.lists(st.integers(1, 8), max_size=3),
    block=st.integers(1, 4),
    kv_heads=st.sampled_from([1, 2]),
    seed=st.integers(0, 9),
)
def test_causal_slices_in_blocks_equal_the_whole(
    rows: int, cuts: list[int], block: int, kv_heads: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda heads: torch.randn(rows, 2, heads, 3, dtype=torch.float64, generator=generator)  # noqa: E731
    q, k, v = (draw(heads).requires_grad_() for heads in (2, kv_heads, kv_heads))
    as_torch = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
    whole = F.scaled_dot_product_attention(*as_torch, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3).flatten(2)
    dy = torch.randn(whole.shape, dtype=torch.float64, generator=generator)
    expected = torch.autograd.grad(whole, (q, k, v), dy)

    ends = sorted({0, rows, *(cut for cut in cuts if cut < rows)})
    slices = [slice(first, end) for first, end in itertools.pairwise(ends)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queries, "_BLOCK_ROWS", block)
        parts = QuerySlices(q, k, v, scaled_dot_product_attention, None, True, (True, True, True))
        for part in reversed(slices):
            torch.testing.assert_close(parts.output(part), whole[part].detach(), rtol=1e-12, atol=1e-12)
        for part in slices:
            parts.backward(part, dy[part])
    for found, right in zip(parts.gradients(), expected):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def test_blocks_under_autocast_have_its_dtype_and_cast_keys_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(8, 1, 1, 2, requires_grad=True) for _ in range(3))
    monkeypatch.setattr(queries, "_BLOCK_ROWS", 2)
    with torch.autocast("cpu", torch.bfloat16):
        parts = QuerySlices(q, k, v, scaled_dot_product_attention, None, True, (True, True, True))
    storages = []
    attention = F.scaled_dot_product_attention

    def noted(query: torch.Tensor, key: torch.Tensor, *others: object, **options: object) -> torch.Tensor:
        storages.append((key.dtype, key.untyped_storage().data_ptr()))
        return attention(query, key, *others, **options)

    monkeypatch.setattr(queries.F, "scaled_dot_product_attention", noted)
    assert parts.output(slice(2, 8)).dtype == torch.bfloat16
    assert len(storages) == 3
    assert {dtype for dtype, _ in storages} == {torch.bfloat16}
    assert len(set(storages)) == 1


def test_a_slice_in_blocks_sees_fewer_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(8, 1, 1, 2) for _ in range(3))
    seen = []

    def attention(query: torch.Tensor, key: torch.Tensor, *others: object, **options: object) -> torch.Tensor:
        seen.append((query.shape[2], key.shape[2]))
        return query

    monkeypatch.setattr(queries.F, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(queries, "_BLOCK_ROWS", 2)
    parts = QuerySlices(q, k, v, scaled_dot_product_attention, None, True, (False, False, False))
    parts.output(slice(3, 8))
    parts.output(slice(0, 3))
    assert seen == [(2, 5), (2, 7), (1, 8), (3, 3)]
