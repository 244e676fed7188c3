"""Tensor parallelism with whole rows whose all-reduces leave no tail: each hides behind the other half of the batch.

Where every rank has all rows, what follows a row layer needs its sum at once: nothing of its own is left to compute
meanwhile. So a decoder layer takes the batch in two halves and starts the sum of one half before it turns to the
other. A layer hands on halves whose last sums are still under way. Source: Domino (arXiv 2409.15241).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM

from stretto.overlap import RowLinear


@dataclass
class Half:
    """(batch / 2, rows, hidden), to which a sum is still to be added."""

    residual: Tensor
    arriving: Tensor | None = None
    work: dist.Work | None = None

    def value(self) -> Tensor:
        """Complete."""
        if self.arriving is None:
            return self.residual
        assert self.work is not None
        self.work.wait()
        return self.residual + self.arriving


class StartedRowLinear(RowLinear):
    """A row layer whose sum over ranks is under way, as `work`, when its forward returns."""

    group: dist.ProcessGroup
    work: dist.Work

    def forward(self, input: Tensor) -> Tensor:
        return _StartedSum.apply(input, self.weight.to_local(), self)


class _StartedSum(torch.autograd.Function):
    """x (..., own features), weight (F, own features) -> (..., F); backwards every rank has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: StartedRowLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = x @ weight.t()
        layer.work = dist.all_reduce(out, group=layer.group, async_op=True)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].flatten(0, -2).t() @ x.flatten(0, -2), None


class HalvesLayer(LlamaDecoderLayer):
    """`LlamaDecoderLayer` on two halves of the batch: attention, attention, MLP, MLP."""

    def forward(self, hidden_states: Any, **kwargs: Any) -> list[Half]:
        halves = hidden_states
        if isinstance(halves, Tensor):
            halves = [Half(part) for part in halves.chunk(2)]
        halves = [self._attend(half.value(), kwargs) for half in halves]
        return [self._transform(half.value()) for half in halves]

    def _attend(self, x: Tensor, kwargs: dict[str, Any]) -> Half:
        out, _ = self.self_attn(hidden_states=self.input_layernorm(x), **kwargs)
        return Half(x, out, self.self_attn.o_proj.work)

    def _transform(self, x: Tensor) -> Half:
        return Half(x, self.mlp(self.post_attention_layernorm(x)), self.mlp.down_proj.work)


def use_halves(model: LlamaForCausalLM, group: dist.ProcessGroup) -> None:
    """Make every layer of a tensor-parallel model a `HalvesLayer`, in place; `group` is for these sums alone."""
    for layer in model.model.layers:
        layer.__class__ = HalvesLayer
        for row in (layer.self_attn.o_proj, layer.mlp.down_proj):
            row.__class__ = StartedRowLinear
            row.group = group
    model.model.norm.register_forward_pre_hook(_joined)


def _joined(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    halves = inputs[0]
    return (halves if isinstance(halves, Tensor) else torch.cat([half.value() for half in halves]),)
