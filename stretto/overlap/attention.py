"""Attention whose communication is hidden: Ulysses (rows sharded) and query-split (heads sharded).

Ulysses is `matmul_all_to_all` (project, then own heads of all rows), whatever the model does to heads in
between (norms, rotary positions), and `attention_all_to_all` (attend, then all heads of own rows).
Query-split attention is `attention_reduce_scatter`. Tensors are (batch, rows, ...). The hazard: head groups
are in the order of ranks, so `split_heads` must cut the weights of one layer everywhere. Source:
DeepSpeed-Ulysses (arXiv 2309.14509), CommFuse (arXiv 2604.24013).
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from stretto.overlap.heads import repeat_kv_heads, split_heads
from stretto.overlap.inputs import (
    How,
    Sizes,
    check_heads,
    check_linear,
    checked_how,
    gathered_slices,
    needed,
    outside_of_graphs,
    rows_first,
    scattered_slices,
)
from stretto.overlap.p2p import Call, peers_of
from stretto.overlap.projections import Layout, Linears
from stretto.overlap.queries import Attention, QuerySlices, scaled_dot_product_attention
from stretto.overlap.query_split import AttentionReduceScatter
from stretto.overlap.routes import Slices, sizes_from
from stretto.overlap.ulysses import AttentionAllToAll, MatmulAllToAll

__all__ = [
    "attention_all_to_all",
    "attention_reduce_scatter",
    "matmul_all_to_all",
    "repeat_kv_heads",
    "scaled_dot_product_attention",
    "split_heads",
]

LowRank = Sequence[tuple[Tensor, Tensor] | None] | None


@outside_of_graphs
def matmul_all_to_all(
    x: Tensor,
    weights: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    features: Sequence[Sequence[int]],
    biases: Sequence[Tensor | None] | None = None,
    low_rank: LowRank = None,
    sizes: Sizes = None,
    schedule: str = "direct",
    num_subslices: int = 1,
    check: bool = True,
    tuned_as: str = "",
) -> list[Tensor]:
    """Project own rows to all features and trade: own features of all rows. The first half of Ulysses.

    Args:
        x: (batch, rows of this rank, K).
        weights: each (F, K), whole and the same on every rank; q, k and v share one message a rank.
        group: every rank of it makes this call.
        features: for each weight, how many of its F features every rank gets, in the order of ranks.
        biases: each (F,), or None.
        low_rank: for each weight None, or a pair that is added before anything is sent, as LoRA is: low (batch,
            rows of this rank, r), whatever the caller made of x, and up (F, r), whole and the same on every rank;
            low up^T is the addition. Both of one dtype, x's, or float32 where x is 16-bit.
        sizes: rows of every rank, as in `all_gather_matmul`.
        schedule: "direct", "plain" or "auto", as in `all_gather_matmul`.
        num_subslices: pieces a rank's rows are cut in.
        check: as in `all_gather_matmul`, and so `tuned_as`.
        tuned_as: see `check`.

    Returns:
        For each weight (batch, sum(sizes), features[weight][rank]); laid out rows first.

    Gradients:
        x and lows: whole; head groups' parts are added as they arrive, own first. weights, biases and ups: the
            part of this rank's rows; sum them over the group, as for any weight that every rank holds.

    Raises:
        As `all_gather_matmul`.
    """
    options = {"schedule": schedule, "num_subslices": num_subslices, "check": check, "tuned_as": tuned_as}
    call, how, layout, rows, linears = projected(x, weights, biases, low_rank, group, features, sizes, options)
    out = MatmulAllToAll.apply(call, how, layout, rows, *linears.flat())
    return own_features(out, how, layout)


def projected(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None,
    low_rank: LowRank,
    group: dist.ProcessGroup,
    features: Sequence[Sequence[int]],
    sizes: Sizes,
    options: dict[str, Any],
) -> tuple[Call, How, Layout, Tensor, Linears]:
    """The arguments of `matmul_all_to_all`, looked over, as its autograd function takes them."""
    peers = peers_of(group)
    biases = [None] * len(weights) if biases is None else list(biases)
    with peers.call("matmul_all_to_all") as call:
        check_linear(x, weights, biases, 1)
        pairs = [(None, None) if pair is None else pair for pair in low_rank or [None] * len(weights)]
        if len(pairs) != len(weights):
            raise ValueError(f"{len(pairs)} low_rank pairs for {len(weights)} weights; give one, or None, for each")
        linears = Linears(list(weights), biases, [low for low, _ in pairs], [up for _, up in pairs])
        linears = linears.looked_over(x)
        gradients = needed(x, *weights, *biases, *(one for pair in pairs for one in pair if low_rank))
        how = checked_how(peers, gradients=gradients, device=x.device, ring=False, **options)
        if len(features) != len(weights):
            raise ValueError(f"{len(features)} splits of features for {len(weights)} weights")
        cuts = tuple(Slices(sizes_from(f, peers.world_size)) for f in features)
        for cut, weight in zip(cuts, weights):
            if cut.total != len(weight):
                raise ValueError(f"features={cut.sizes} add up to {cut.total}, but the weight has {len(weight)}")
        rows = rows_first(x, 1)
        layout = Layout(gathered_slices(call, how, rows, sizes), cuts)
    return call, how, layout, rows, linears


def own_features(out: Tensor, how: How, layout: Layout) -> list[Tensor]:
    """Of every weight, (batch, rows, own features), as views of (rows, batch, own features of all)."""
    parts = out.split([cut.sizes[how.peers.rank] for cut in layout.features], -1)
    return [part.transpose(0, 1) for part in parts]


@outside_of_graphs
def attention_all_to_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup,
    *,
    heads: Sequence[int] | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    attention: Attention = scaled_dot_product_attention,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    recompute: bool = False,
    sizes: Sizes = None,
    schedule: str = "direct",
    num_subslices: int = 1,
    check: bool = True,
    tuned_as: str = "",
) -> Tensor:
    """Attend with own heads for all rows and trade: all heads of own rows. The second half of Ulysses.

    Others' queries are attended and sent first, own last; with `weight` each head group is multiplied as it
    arrives. Under a causal mask later slices cost more, and ranks come to them at different steps: nothing is
    awaited before the own slice is done, so that no rank waits at every step for the one with the dear slice.

    Args:
        q: (batch, all rows, own heads, d).
        k: (batch, all rows, own key-value heads, d).
        v: (batch, all rows, own key-value heads, d of values).
        group: every rank of it makes this call.
        heads: query heads of every rank; None: as many as here on each.
        weight: (F, all heads * d of values), the output projection, whole and the same on every rank; or
            None.
        bias: (F,), the same on every rank; only with `weight`.
        attention: called with query (batch, heads, n, d), key, value (batch, kv_heads, num_keys, d) and a
            mask or None; returns (batch, heads, n, d of values).
        attn_mask: (..., rows or 1, rows), bool or added, broadcast over batch and own heads.
        is_causal: queries see keys up to their own row; later keys are not even read.
        recompute: keep q, k and v alone, by autograd's own saving, and attend again in the backward. Without it each
            slice's graph is kept, and activation checkpointing saves nothing of it. `attention` must draw nothing.
        sizes: rows that every rank owns; None: as `torch.chunk` cuts them.
        schedule: "direct", "plain" or "auto", as in `all_gather_matmul`.
        num_subslices: pieces a rank's queries are cut in.
        check: as in `all_gather_matmul`, and so `tuned_as`.
        tuned_as: see `check`.

    Returns:
        (batch, sizes[rank], all heads * d of values), or (batch, sizes[rank], F); laid out rows first.

    Gradients:
        q, k and v: slice by slice of queries as their gradients arrive, own first; k's and v's summed over
        slices in float32 (float64 for float64). weight and bias: the part of this rank's rows.

    Raises:
        As `all_gather_matmul`.
    """
    options = {"schedule": schedule, "num_subslices": num_subslices, "check": check, "tuned_as": tuned_as}
    call, how, layout, q, k, v = divided(q, k, v, group, heads, weight, bias, sizes, options)
    queries = QuerySlices(q, k, v, attention, attn_mask, is_causal, needed(q, k, v), recomputes=recompute)
    out = AttentionAllToAll.apply(call, how, layout, queries, q, k, v, weight, bias)
    return out.transpose(0, 1)


def divided(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup,
    heads: Sequence[int] | None,
    weight: Tensor | None,
    bias: Tensor | None,
    sizes: Sizes,
    options: dict[str, Any],
) -> tuple[Call, How, Layout, Tensor, Tensor, Tensor]:
    """The arguments of `attention_all_to_all`, looked over, as its autograd function takes them."""
    peers = peers_of(group)
    with peers.call("attention_all_to_all") as call:
        check_heads(q, k, v)
        if bias is not None and weight is None:
            raise ValueError("a bias without a weight has nothing to be added to; give both or neither")
        how = checked_how(peers, gradients=needed(q, k, v, weight, bias), device=q.device, ring=False, **options)
        counts = sizes_from([q.shape[2]] * peers.world_size if heads is None else heads, peers.world_size)
        if counts[peers.rank] != q.shape[2]:
            raise ValueError(f"heads[{peers.rank}]={counts[peers.rank]} but q has {q.shape[2]} heads")
        groups = Slices(tuple(count * v.shape[3] for count in counts))
        if weight is not None:
            check_linear(q.new_empty(1, groups.total), [weight], [bias], 0)
        q, k, v = (t.transpose(0, 1).contiguous() for t in (q, k, v))
        rows = scattered_slices(how, len(q), sizes)
    return call, how, Layout(rows, (groups,)), q, k, v


@outside_of_graphs
def attention_reduce_scatter(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup,
    *,
    bias: Tensor | None = None,
    attention: Attention = scaled_dot_product_attention,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    sizes: Sizes = None,
    schedule: str = "direct",
    num_subslices: int = 1,
    check: bool = True,
    tuned_as: str = "",
) -> Tensor:
    """Attend with own heads, project, and sum over ranks, each keeping its own rows: query-split attention.

    Args:
        q: (batch, all rows, own heads, d).
        k: (batch, all rows, own key-value heads, d).
        v: (batch, all rows, own key-value heads, d of values).
        weight: (F, own heads * d of values), the columns of the own heads.
        group: every rank of it makes this call.
        bias: (F,), the same on every rank; added once, by the owner of a row, after the sum.
        attention: as in `attention_all_to_all`, and so `attn_mask` and `is_causal`.
        attn_mask: see `attention`.
        is_causal: see `attention`. Arrivals are then awaited late, as in `attention_all_to_all`, which costs
            two buffers of the size of the whole output.
        sizes: rows that every rank is to own; None: as `torch.chunk` cuts them.
        schedule: as in `matmul_reduce_scatter`.
        num_subslices: pieces a rank's queries are cut in.
        check: as in `all_gather_matmul`, and so `tuned_as`.
        tuned_as: see `check`.

    Returns:
        (batch, sizes[rank], F); laid out rows first.

    Gradients:
        One gather of the output's gradient feeds them all. q, k, v, weight: of the own heads. bias: over the
        rows of all ranks, bitwise the same on every rank.

    Raises:
        As `all_gather_matmul`.
    """
    peers = peers_of(group)
    with peers.call("attention_reduce_scatter") as call:
        check_heads(q, k, v)
        check_linear(q.new_empty(1, q.shape[2] * v.shape[3]), [weight], [bias], 0)
        gradients, device = needed(q, k, v, weight, bias), q.device
        how = checked_how(peers, schedule, num_subslices, check, gradients, device=device, tuned_as=tuned_as)
        q, k, v = (t.transpose(0, 1).contiguous() for t in (q, k, v))
        slices = scattered_slices(how, len(q), sizes)
    queries = QuerySlices(q, k, v, attention, attn_mask, is_causal, needed(q, k, v))
    out = AttentionReduceScatter.apply(call, how, slices, queries, q, k, v, weight, bias)
    return out.transpose(0, 1)
