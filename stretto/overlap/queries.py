"""Any attention, one slice of queries at a time, forward and backward.

A slice's queries attend to all keys and values, so slices may be computed in any order and their outputs
leave as they are made; backwards, a slice's gradients are taken as soon as its output's gradient is there.
With a causal mask a slice needs only the keys up to its own end: later slices cost more. The hazard: each
slice keeps its own graph from forward to backward.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from stretto.overlap.loops import sum_dtype

__all__ = ["Attention", "QuerySlices", "scaled_dot_product_attention"]

Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> Tensor:
    """torch's; query (batch, heads, n, d), key and value (batch, kv_heads, rows, d)."""
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask, enable_gqa=grouped)


def slice_mask(
    attn_mask: Tensor | None, is_causal: bool, rows: slice, num_keys: int, device: torch.device
) -> Tensor | None:
    """The mask of some queries against the first `num_keys` keys, (..., n, num_keys), bool or added."""
    mask = attn_mask
    if mask is not None:
        mask = mask[..., rows if mask.shape[-2] != 1 else slice(None), :num_keys]
    if not is_causal:
        return mask
    queries = torch.arange(rows.start, rows.stop, device=device)
    visible = queries[:, None] >= torch.arange(num_keys, device=device)
    if mask is None:
        return visible
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, float("-inf"))


def _as_it_is(tensor: Tensor) -> Tensor:
    """Keeps activation checkpointing out of the slices' graphs: they are kept, not computed again."""
    return tensor


class QuerySlices:
    """Attention of q (rows, batch, heads, d) to k, v (rows, batch, kv_heads, d), some rows at a time."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention: Attention,
        attn_mask: Tensor | None,
        is_causal: bool,
        needs: tuple[bool, ...],
    ) -> None:
        self._q, self._k, self._v, self._needs = q, k, v, needs
        self._attention, self._mask, self.is_causal = attention, attn_mask, is_causal
        self._graphs: dict[tuple[int, int], tuple[list[Tensor], Tensor]] = {}
        self.features = q.shape[2] * v.shape[3]
        kept = sum_dtype(q.dtype)
        self._dq = torch.zeros_like(q) if needs[0] else None
        self._dk = torch.zeros_like(k, dtype=kept) if needs[1] else None
        self._dv = torch.zeros_like(v, dtype=kept) if needs[2] else None

    def output(self, rows: slice) -> Tensor:
        """The output of these queries, (n, batch, heads * d), contiguous and detached."""
        num_rows, batch = rows.stop - rows.start, self._q.shape[1]
        if num_rows * batch * self.features == 0:
            return self._q.new_zeros(num_rows, batch, self.features)
        stop = rows.stop if self.is_causal else self._k.shape[0]
        inputs = [self._q[rows].detach(), self._k[:stop].detach(), self._v[:stop].detach()]
        with torch.set_grad_enabled(any(self._needs)), saved_tensors_hooks(_as_it_is, _as_it_is):
            for tensor, needed in zip(inputs, self._needs):
                tensor.requires_grad_(needed)
            query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in inputs)
            out = (
                self._attention(query, key, value, slice_mask(self._mask, self.is_causal, rows, stop, self._q.device))
                .permute(2, 0, 1, 3)
                .flatten(2)
            )
        if any(self._needs):
            self._graphs[rows.start, rows.stop] = (inputs, out)
        return out.detach().contiguous()

    def forget(self) -> None:
        """Drop the graphs of the outputs so far."""
        self._graphs.clear()

    def backward(self, rows: slice, grad: Tensor) -> None:
        """Take the gradient of a slice's output, (n, batch, heads * d), into those of q, k and v."""
        if not any(self._needs) or grad.numel() == 0:
            return
        if (rows.start, rows.stop) not in self._graphs:
            raise RuntimeError("attention in query slices goes backward once; its graphs are gone after that")
        inputs, out = self._graphs.pop((rows.start, rows.stop))
        needed = [tensor for tensor in inputs if tensor.requires_grad]
        grads = dict(zip(map(id, needed), torch.autograd.grad(out, needed, grad.view_as(out), allow_unused=True)))
        for total, tensor, start in zip((self._dq, self._dk, self._dv), inputs, (rows.start, 0, 0)):
            found = grads.get(id(tensor))
            if total is not None and found is not None:
                total[start : start + len(tensor)] += found

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Those of q, k and v, in their dtypes; None where none was needed."""
        dtype = self._q.dtype
        dq, dk, dv = (None if total is None else total.to(dtype) for total in (self._dq, self._dk, self._dv))
        return dq, dk, dv
