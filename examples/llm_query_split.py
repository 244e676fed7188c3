"""Query-split attention for the tensor-parallel Llama of `llm.py`: attention hides the scatter behind its projection.

The output projection alone is a small product, and too little to hide its reduce-scatter. `attention_reduce_scatter`
attends for the rows that other ranks own first, projects and sends them, and keeps the own rows for last.
"""

from typing import Any

from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM, apply_rotary_pos_emb

from stretto.overlap import attention_reduce_scatter


class QuerySplitAttention(LlamaAttention):
    """`LlamaAttention` with own heads: (batch, own rows, hidden) -> (batch, own rows, hidden).

    Its queries, keys and values are column layers, its output projection a row layer. `position_embeddings` are those
    of all rows.
    """

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **ignored: Any
    ) -> tuple[Tensor, None]:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(hidden_states).unflatten(-1, (-1, self.head_dim)) for layer in layers)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)  # (batch, all rows, own heads, d)
        row = self.o_proj
        weight, group, how = row.weight.to_local(), row.mesh.get_group(), row.options.of_call([row])
        return attention_reduce_scatter(q, k, v, weight, group, is_causal=True, **how), None


def use_query_split(model: LlamaForCausalLM) -> None:
    """Make every attention of a model parallel by `LLAMA` a `QuerySplitAttention`, in place."""
    for layer in model.model.layers:
        layer.self_attn.__class__ = QuerySplitAttention
