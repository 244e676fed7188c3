"""Ulysses for the Llama of `llm.py`: attention that trades rows for heads and back, hidden behind its products.

Outside of attention a rank has its own rows of every sequence and all features; inside, all rows and its own heads.
`matmul_all_to_all` projects others' heads first and sends them, rotary positions go on the heads that arrived, and
`attention_all_to_all` attends for others' rows first and multiplies by the output projection as heads arrive. The
weights stay whole on every rank, so their gradients are to be summed over the group.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM, apply_rotary_pos_emb

from stretto.overlap import attention_all_to_all, matmul_all_to_all, split_heads


class UlyssesAttention(LlamaAttention):
    """`LlamaAttention` over own rows: (batch, own rows, hidden) -> (batch, own rows, hidden).

    `position_embeddings` are those of all rows.
    """

    group: dist.ProcessGroup
    how: dict[str, Any]

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **ignored: Any
    ) -> tuple[Tensor, None]:
        args, how = self.projected()
        projected = matmul_all_to_all(hidden_states, *args, **how)
        args, how = self.attended(projected, position_embeddings)
        return attention_all_to_all(*args, **how), None

    def projected(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of `matmul_all_to_all` behind the hidden states."""
        heads, kv_heads = self.split()
        features = [[self.head_dim * num for num in cut] for cut in (heads, kv_heads, kv_heads)]
        weights = [self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]
        return (weights, self.group), {"features": features, **self.how}

    def attended(
        self, projected: list[Tensor], position_embeddings: tuple[Tensor, Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of `attention_all_to_all`: (batch, all rows, own heads, d) with their positions."""
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in projected)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)
        heads, _ = self.split()
        return (q, k, v, self.group), {"heads": heads, "weight": self.o_proj.weight, "is_causal": True, **self.how}

    def split(self) -> tuple[list[int], list[int]]:
        """Heads and key-value heads of every rank."""
        config, num_ranks = self.config, dist.get_world_size(self.group)
        return split_heads(config.num_attention_heads, num_ranks, config.num_key_value_heads)


def use_ulysses(model: LlamaForCausalLM, group: dist.ProcessGroup, **how: Any) -> None:
    """Make every attention of the model a `UlyssesAttention`, in place; parameters stay as they are.

    `how` goes to both operations: schedule, num_subslices, check.
    """
    split_heads(model.config.num_attention_heads, dist.get_world_size(group), model.config.num_key_value_heads)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.__class__ = UlyssesAttention
        attention.group, attention.how = group, how
