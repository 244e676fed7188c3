"""The autograd of query-split attention: heads sharded over ranks, output projection summed over them.

Each slice of queries is attended and projected, and its partial sum leaves for the rank that owns the rows;
backwards each slice goes back as its output's gradient arrives. The arithmetic of a whole attention hides
each message. The hazard: with a causal mask slices cost unequally. Source: CommFuse (arXiv 2604.24013),
query-split.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.overlap.inputs import How
from stretto.overlap.loops import Scatter, gather
from stretto.overlap.p2p import Call
from stretto.overlap.products import BiasGradient, WeightGradient, output
from stretto.overlap.queries import QuerySlices
from stretto.overlap.routes import Slices
from stretto.overlap.tuning import tuned

__all__ = ["AttentionReduceScatter"]


class AttentionReduceScatter(torch.autograd.Function):
    """q, k, v (sum(sizes), batch, own heads, d), weight (F, own heads * d) -> (sizes[rank], batch, F)."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        how: How,
        slices: Slices,
        queries: QuerySlices,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """Others' queries first, own last. The backward is cut as the forward was: its slices are those graphs."""
        shape = (slices.total, q.shape[1], len(weight))
        attended = q.new_empty(slices.total, q.shape[1], queries.features)

        def run(way: How) -> Tensor:
            queries.forget()
            header, cut = way.header(call, q.dtype), slices.cut(way.num_subslices)
            window = call.peers.world_size if queries.is_causal else 2
            causal = queries.is_causal  # a causal slice costs less in pieces, which see fewer keys
            scatter = Scatter(call, header, shape, cut, q.device, check=way.check, window=window, cut_own=causal)
            for piece in scatter.pieces():
                attended[piece.rows] = queries.output(piece.rows)
                partial = q.new_empty(len(attended[piece.rows]), *shape[1:])
                scatter.put(piece, output(attended[piece.rows], weight, None, partial))
            return scatter.result(bias)

        facts = (shape[1:], q.dtype, queries.is_causal, how.gradients)
        with how.peers.resume(call):
            how, out = tuned(call, how, slices.total, facts, run)
        slices = slices.cut(how.num_subslices)
        ctx.how, ctx.slices, ctx.queries = how, slices, queries
        ctx.save_for_backward(attended, weight, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """One gather of the output's gradient feeds attention, weight and bias, own slice first."""
        attended, weight, bias = ctx.saved_tensors
        how, slices, queries = ctx.how, ctx.slices, ctx.queries
        needs_w, needs_b = ctx.needs_input_grad[7:]
        dw = WeightGradient(weight) if needs_w else None
        db = BiasGradient(bias, slices) if needs_b else None
        with how.peers.call("attention_reduce_scatter backward") as call:
            call.tuned_as = how.tuned_as
            header = how.header(call, weight.dtype)
            dys = gather(call, header, grads[0].contiguous(), slices, check=how.check, cut_own=queries.is_causal)
            for piece, dy in dys:
                queries.backward(piece.rows, (dy.flatten(0, 1) @ weight).view(*dy.shape[:2], weight.shape[1]))
                if dw is not None:
                    dw.add(dy, attended[piece.rows])
                if db is not None:
                    db.add(piece, dy)
        dqkv = queries.gradients()
        return None, None, None, None, *dqkv, dw and dw.result(), db and db.result()
