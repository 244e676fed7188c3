"""Ulysses whose messages hide behind the other half of the batch, where its own products are too short to hide them.

The queries, keys and values of a rank are more bytes than their product takes time to make. So the batch is taken
in two halves: one half's heads are on their way while the other half attends, or goes through the MLP. A layer hands
on halves whose attention is still arriving and whose MLP is still to come: the next layer runs one half's MLP, starts
its projection, and turns to the other. Backward it is the same in reversed order. Source: Domino (arXiv 2409.15241),
which does so for tensor parallelism.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from llm_ulysses import UlyssesAttention, use_ulysses
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM

from stretto.overlap import Pending, attention_all_to_all_start, matmul_all_to_all_start


@dataclass
class Half:
    """(batch / 2, own rows, hidden) out of a layer whose attention is arriving and whose MLP has not run."""

    residual: Tensor
    attention: Pending | None = None
    layer: "UlyssesHalvesLayer | None" = None

    def value(self) -> Tensor:
        """Complete."""
        if self.attention is None or self.layer is None:
            return self.residual
        x = self.residual + self.attention.wait()
        return x + self.layer.mlp(self.layer.post_attention_layernorm(x))


class UlyssesHalvesAttention(UlyssesAttention):
    """`UlyssesAttention` of two halves at once; what it gives is still arriving."""

    def forward(self, halves: list[Half], norm: Any, position_embeddings: tuple[Tensor, Tensor]) -> list[Half]:
        """Each message hides behind what comes between its start and its wait."""
        args, how = self.projected()
        started = []
        for half in halves:
            x = half.value()
            started.append((x, matmul_all_to_all_start(norm(x), *args, **how)))
        found = []
        for x, pending in started:
            args, how = self.attended(pending.wait(), position_embeddings)
            found.append(Half(x, attention_all_to_all_start(*args, **how)))
        return found


class UlyssesHalvesLayer(LlamaDecoderLayer):
    """`LlamaDecoderLayer` on two halves of the batch."""

    def forward(self, hidden_states: Any, position_embeddings: Any = None, **ignored: Any) -> list[Half]:
        halves = hidden_states
        if isinstance(halves, Tensor):
            halves = [Half(part) for part in halves.chunk(2)]
        halves = self.self_attn(halves, self.input_layernorm, position_embeddings)
        for half in halves:
            half.layer = self
        return halves


def use_ulysses_halves(model: LlamaForCausalLM, group: dist.ProcessGroup, **how: Any) -> None:
    """Make every layer of the model a `UlyssesHalvesLayer`, in place; otherwise as `use_ulysses`."""
    use_ulysses(model, group, **how)
    for layer in model.model.layers:
        layer.__class__ = UlyssesHalvesLayer
        layer.self_attn.__class__ = UlyssesHalvesAttention
    model.model.norm.register_forward_pre_hook(_joined)


def _joined(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    halves = inputs[0]
    return (halves if isinstance(halves, Tensor) else torch.cat([half.value() for half in halves]),)
