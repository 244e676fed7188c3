"""Any attention, one slice of queries at a time, forward and backward.

A slice's queries attend to all keys and values, so slices may be computed in any order and their outputs
leave as they are made; backwards, a slice's gradients are taken as soon as its output's gradient is there.
With a causal mask a slice needs only the keys up to its own end: later slices cost more. The hazard: each
slice keeps its own graph from forward to backward.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.bias import causal_lower_right

from stretto.overlap.loops import sum_dtype

__all__ = ["Attention", "QuerySlices", "scaled_dot_product_attention"]

Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]

_BLOCK_ROWS = 256
"""Of causal queries on the host, how many are attended at once: a mask hides keys, but saves none of their work."""


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> Tensor:
    """torch's; query (batch, heads, n, d), key and value (batch, kv_heads, rows, d)."""
    return _torchs(query, key, value, attn_mask, False)


def _torchs(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """Causal without a mask, for n = rows, skips the products of queries with later keys."""
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal, enable_gqa=grouped)


def _last_causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """torch's causal attention of the last n of as many queries as keys, with as few hidden keys as it can."""
    n, num_keys = query.shape[2], key.shape[2]
    if n == num_keys:
        return _torchs(query, key, value, None, True)
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:  # once for all blocks, and for CUDA's bias
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    if query.is_cuda and query.shape[1] == key.shape[1]:
        return F.scaled_dot_product_attention(query, key, value, causal_lower_right(n, num_keys))
    outs: list[Tensor] = []
    step = n if query.is_cuda else _BLOCK_ROWS
    for first in range(num_keys - n, num_keys, step):
        end = min(first + step, num_keys)
        block = query[:, :, first - num_keys + n : end - num_keys + n]
        mask = slice_mask(None, True, slice(first, end), end, query.device)
        outs.append(_torchs(block, key[:, :, :end], value[:, :, :end], mask, False))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


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
    """Attention of q (rows, batch, heads, d) to k, v (rows, batch, kv_heads, d), some rows at a time.

    With `recomputes` no graph is kept: q, k and v are given up to autograd's own saving (`give_up`, `take_back`),
    which activation checkpointing can drop, and each slice is attended again where it goes backward.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention: Attention,
        attn_mask: Tensor | None,
        is_causal: bool,
        needs: tuple[bool, ...],
        *,
        recomputes: bool = False,
    ) -> None:
        self._inputs: tuple[Tensor, ...] = (q, k, v)
        self._needs, self.recomputes = needs, recomputes and any(needs)
        self._attention, self._mask, self.is_causal = attention, attn_mask, is_causal
        self._graphs: dict[tuple[int, int], tuple[list[Tensor], Tensor]] = {}
        self.features = q.shape[2] * v.shape[3]
        device = q.device.type
        self._autocast = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        self._sums: list[Tensor | None] | None = None

    def output(self, rows: slice) -> Tensor:
        """The output of these queries, (n, batch, heads * d), contiguous and detached."""
        q = self._inputs[0]
        num_rows, batch = rows.stop - rows.start, q.shape[1]
        if num_rows * batch * self.features == 0:
            return q.new_zeros(num_rows, batch, self.features)
        keeps = any(self._needs) and not self.recomputes
        inputs, out = self._attended(rows, keeps)
        if keeps:
            self._graphs[rows.start, rows.stop] = (inputs, out)
        return out.detach().contiguous()

    def forget(self) -> None:
        """Drop the graphs of the outputs so far."""
        self._graphs.clear()

    def give_up(self) -> tuple[Tensor, ...]:
        """q, k and v, for the caller to keep until `take_back`, if this recomputes; else the graphs hold them."""
        if not self.recomputes:
            return ()
        inputs, self._inputs = self._inputs, ()
        return inputs

    def take_back(self, inputs: Sequence[Tensor]) -> None:
        """The tensors that were given up, before the first slice goes backward."""
        self._inputs = tuple(inputs) or self._inputs

    def backward(self, rows: slice, grad: Tensor) -> None:
        """Take the gradient of a slice's output, (n, batch, heads * d), into those of q, k and v."""
        if not any(self._needs) or grad.numel() == 0:
            return
        if self.recomputes:
            inputs, out = self._attended(rows, True)
        elif (rows.start, rows.stop) in self._graphs:
            inputs, out = self._graphs.pop((rows.start, rows.stop))
        else:
            raise RuntimeError("attention in query slices goes backward once; its graphs are gone after that")
        needed = [tensor for tensor in inputs if tensor.requires_grad]
        grads = dict(zip(map(id, needed), torch.autograd.grad(out, needed, grad.view_as(out), allow_unused=True)))
        for total, tensor, start in zip(self._totals(), inputs, (rows.start, 0, 0)):
            found = grads.get(id(tensor))
            if total is not None and found is not None:
                total[start : start + len(tensor)] += found

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Those of q, k and v, in their dtypes; None where none was needed."""
        dtype, sums = self._inputs[0].dtype, self._totals()
        self._sums = None
        self.give_up()
        return tuple(None if total is None else total.to(dtype) for total in sums)

    def _attended(self, rows: slice, with_graph: bool) -> tuple[list[Tensor], Tensor]:
        """Detached q of these rows, k and v, and the output; with a graph between them if it is wanted."""
        q, k, v = self._inputs
        stop = rows.stop if self.is_causal else len(k)
        inputs = [q[rows].detach(), k[:stop].detach(), v[:stop].detach()]
        autocast = torch.autocast(q.device.type, *self._autocast, cache_enabled=False)
        with torch.set_grad_enabled(with_graph), saved_tensors_hooks(_as_it_is, _as_it_is), autocast:
            for tensor, needed in zip(inputs, self._needs):
                tensor.requires_grad_(needed and with_graph)
            query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in inputs)
            if self._is_torchs:
                out = _last_causal(query, key, value)
            else:
                mask = slice_mask(self._mask, self.is_causal, rows, stop, q.device)
                out = self._attention(query, key, value, mask)
            return inputs, out.permute(2, 0, 1, 3).flatten(2)

    @property
    def _is_torchs(self) -> bool:
        """Whether it is torch's attention with nothing but a causal mask."""
        return self._attention is scaled_dot_product_attention and self.is_causal and self._mask is None

    def _totals(self) -> list[Tensor | None]:
        """The gradients so far, made where the first is asked for: k's and v's are sums over slices."""
        if self._sums is None:
            q, k, v = self._inputs
            kept = sum_dtype(q.dtype)
            kinds = zip((q, k, v), (q.dtype, kept, kept), self._needs)
            self._sums = [torch.zeros_like(x, dtype=dtype) if need else None for x, dtype, need in kinds]
        return self._sums
