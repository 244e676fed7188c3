"""Ulysses with its messages left in flight: what the caller computes before `wait` hides them.

An exchange hides behind its own products only if these take longer than its messages. Where they do not, another half
of the batch does it: start one half's exchange, compute with the other, wait; the backward does the same in reversed
order, without being told. The hazard: whatever lies between a start and its wait must be the same on every rank.
Source: DeepSpeed-Ulysses (arXiv 2309.14509), CommFuse (arXiv 2604.24013), Domino (arXiv 2409.15241).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from stretto.overlap.attention import LowRank, divided, own_features, projected
from stretto.overlap.inputs import How, Sizes, needed, outside_of_graphs
from stretto.overlap.p2p import Call
from stretto.overlap.pending import Pending
from stretto.overlap.projections import Layout
from stretto.overlap.queries import Attention, QuerySlices, scaled_dot_product_attention
from stretto.overlap.ulysses_halves import AttentionStart, AttentionWait, MatmulStart, MatmulWait, Trip

__all__ = ["attention_all_to_all_start", "matmul_all_to_all_start"]


@outside_of_graphs
def matmul_all_to_all_start(
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
) -> Pending:
    """`matmul_all_to_all` up to its wait: others' pieces are on their way, the own ones are computed at the wait.

    Arguments, errors and, bit for bit, numbers as `matmul_all_to_all`, whose result `Pending.wait` gives. Further
    operations on the group may be called in between; what was given must not change there. "auto" is "direct" here:
    what hides the messages is not known. Under "plain" nothing is left in flight.

    Gradients:
        The gradients of others' rows leave where autograd comes to the wait, and are awaited where it comes to the
        start: what lay between the two forward hides them.
    """
    options = {"schedule": schedule, "num_subslices": num_subslices, "check": check, "tuned_as": tuned_as}
    call, how, layout, rows, linears = projected(x, weights, biases, low_rank, group, features, sizes, options)
    trip = _trip(call, how, layout)
    own = MatmulStart.apply(trip, rows, *linears.flat())
    return Pending(lambda: own_features(MatmulWait.apply(trip, own), how, layout))


@outside_of_graphs
def attention_all_to_all_start(
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
    sizes: Sizes = None,
    schedule: str = "direct",
    num_subslices: int = 1,
    check: bool = True,
    tuned_as: str = "",
) -> Pending:
    """`attention_all_to_all` up to its wait: own heads have attended, and others' queries are on their way.

    Arguments, errors and, bit for bit, numbers as `attention_all_to_all`, whose result `Pending.wait` gives: it
    multiplies by `weight`, if that is given. In between, schedules and gradients as `matmul_all_to_all_start`.
    """
    options = {"schedule": schedule, "num_subslices": num_subslices, "check": check, "tuned_as": tuned_as}
    call, how, layout, q, k, v = divided(q, k, v, group, heads, weight, bias, sizes, options)
    trip = _trip(call, how, layout)
    queries = QuerySlices(q, k, v, attention, attn_mask, is_causal, needed(q, k, v))
    own = AttentionStart.apply(trip, queries, q, k, v)
    return Pending(lambda: AttentionWait.apply(trip, own, weight, bias).transpose(0, 1))


def _trip(call: Call, how: How, layout: Layout) -> Trip:
    call.tuned_as = how.tuned_as
    if how.schedule == "auto":
        how = replace(how, schedule="direct", num_subslices=1)
    return Trip(call, how, layout.cut(how.num_subslices))
