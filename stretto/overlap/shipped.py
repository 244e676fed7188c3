"""Plans for decoders of transformers: LlamaForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM, as plain data.

`LLAMA`, `QWEN2` and `QWEN3` shard activations by rows between attention and MLP and are for
`LinearOptions(sequence_parallel=True)`; those named `_TP` leave rows whole, for `sequence_parallel=False`.
What a caller passes is what it passes to one process: `input_ids` of all rows, the same on every rank (that
is checked), and, if it has them, `attention_mask`, `position_ids` and a cache for all rows; masks and positions
are made from the whole shape. Rows that the ranks do not divide, as in decoding, need `uneven=True`. What comes
back are logits of all rows, a DTensor that has the own vocabulary: take the loss with `vocab_cross_entropy`, or
set `model.loss_function = causal_lm_loss(group)` and pass `labels`. For `generate` and for code that wants plain
logits replace one entry: `{**LLAMA, "lm_head": "vocab whole"}`. With sharded rows `inputs_embeds` are a rank's own
rows, and need `position_ids` of all rows and no mask; anything else is refused. `output_hidden_states` gives own
rows. The hazard: `attention_dropout` must be 0, which `parallelize` checks. Sources:
Megatron-LM; torchtitan's plans for the form.
"""

__all__ = ["LLAMA", "LLAMA_TP", "QWEN2", "QWEN2_TP", "QWEN3", "QWEN3_TP"]

LLAMA_TP: dict[str, str] = {
    "model.embed_tokens": "vocab",
    "model.layers.*.input_layernorm": "replicate",
    "model.layers.*.self_attn": "attention",
    "model.layers.*.self_attn.q_proj+k_proj+v_proj": "column",
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.post_attention_layernorm": "replicate",
    "model.layers.*.mlp.gate_proj+up_proj": "column",
    "model.layers.*.mlp.down_proj": "row",
    "model.norm": "replicate",
    "lm_head": "vocab",
}
"""Llama, every rank having every row."""

LLAMA: dict[str, str] = {
    **LLAMA_TP,
    "model.layers.*": "rows",
    "model.layers.*.input_layernorm": "sequence",
    "model.layers.*.post_attention_layernorm": "sequence",
    "model.norm": "sequence announced",
}
"""Llama, rows sharded outside of attention and MLP."""

QWEN2_TP = dict(LLAMA_TP)
"""Qwen2: Llama with biases on queries, keys and values."""

QWEN2 = dict(LLAMA)
"""Qwen2, rows sharded."""

_HEAD_NORMS = {"model.layers.*.self_attn.q_norm": "heads", "model.layers.*.self_attn.k_norm": "heads"}

QWEN3_TP = {**LLAMA_TP, **_HEAD_NORMS}
"""Qwen3: Llama with norms of queries and keys, each rank's of its own heads."""

QWEN3 = {**LLAMA, **_HEAD_NORMS}
"""Qwen3, rows sharded."""
