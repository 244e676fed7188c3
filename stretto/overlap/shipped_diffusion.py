"""Plans for diffusion transformers of diffusers: FluxTransformer2DModel and WanTransformer3DModel, as plain data.

`FLUX`, `WAN` and `WAN_I2V` shard tokens over the ranks between the products and are for
`LinearOptions(sequence_parallel=True)`; those named `_TP` leave rows whole, for `sequence_parallel=False`.
Either way every rank is given the same inputs and gets the same output, and every gradient is complete.
Embedders, modulation and the output layer are whole on every rank, as replicated parameters. With LoRA of peft
the plan is the same.

With sharded rows FLUX's text and image tokens split before their embedders, each by itself, and image tokens
join after the output layer; a single block has a rank's text and image rows side by side, and what it gathers
is in the order of ranks, rotary positions with it. Wan's tokens split before the first block and join after the
output layer; its text is not a stream that layers add to, and stays whole. Counts need not be divisible by the
ranks, heads do.

The hazard is FLUX's single block, whose output layer takes attention and MLP side by side: see "row 1+4" in
`parallelize` for what that costs. Sources: the models' own code in diffusers; Megatron-LM for the layout.
"""

__all__ = ["FLUX", "FLUX_TP", "WAN", "WAN_I2V", "WAN_I2V_TP", "WAN_TP"]

FLUX_TP: dict[str, str] = {
    "x_embedder": "replicate",
    "context_embedder": "replicate",
    "time_text_embed": "replicate",
    "transformer_blocks.*.norm1": "replicate",
    "transformer_blocks.*.norm1_context": "replicate",
    "transformer_blocks.*.attn": "attention",
    "transformer_blocks.*.attn.to_q+to_k+to_v": "column",
    "transformer_blocks.*.attn.add_q_proj+add_k_proj+add_v_proj": "column",
    "transformer_blocks.*.attn.norm_q": "heads",
    "transformer_blocks.*.attn.norm_k": "heads",
    "transformer_blocks.*.attn.norm_added_q": "heads",
    "transformer_blocks.*.attn.norm_added_k": "heads",
    "transformer_blocks.*.attn.to_out.0": "row",
    "transformer_blocks.*.attn.to_add_out": "row",
    "transformer_blocks.*.ff.net.0.proj": "column",
    "transformer_blocks.*.ff.net.2": "row",
    "transformer_blocks.*.ff_context.net.0.proj": "column",
    "transformer_blocks.*.ff_context.net.2": "row",
    "single_transformer_blocks.*.norm": "replicate",
    "single_transformer_blocks.*.attn": "attention",
    "single_transformer_blocks.*.proj_mlp+attn.to_q+attn.to_k+attn.to_v": "column",
    "single_transformer_blocks.*.attn.norm_q": "heads",
    "single_transformer_blocks.*.attn.norm_k": "heads",
    "single_transformer_blocks.*.proj_out": "row 1+4",
    "norm_out": "replicate",
    "proj_out": "replicate",
}
"""FLUX, every rank having every row; heads divisible by the ranks."""

FLUX: dict[str, str] = {
    "x_embedder": "sequence split @ image",
    "context_embedder": "sequence split @ text",
    "time_text_embed": "replicate",
    "transformer_blocks.*.norm1.linear": "modulation",
    "transformer_blocks.*.norm1_context.linear": "modulation",
    "transformer_blocks.*.attn": "attention @ image, text",
    "transformer_blocks.*.attn.to_q+to_k+to_v": "column @ image",
    "transformer_blocks.*.attn.add_q_proj+add_k_proj+add_v_proj": "column @ text",
    "transformer_blocks.*.attn.norm_q": "heads",
    "transformer_blocks.*.attn.norm_k": "heads",
    "transformer_blocks.*.attn.norm_added_q": "heads",
    "transformer_blocks.*.attn.norm_added_k": "heads",
    "transformer_blocks.*.attn.to_out.0": "row @ image",
    "transformer_blocks.*.attn.to_add_out": "row @ text",
    "transformer_blocks.*.ff.net.0.proj": "column @ image",
    "transformer_blocks.*.ff.net.2": "row @ image",
    "transformer_blocks.*.ff_context.net.0.proj": "column @ text",
    "transformer_blocks.*.ff_context.net.2": "row @ text",
    "single_transformer_blocks.*.norm.linear": "modulation",
    "single_transformer_blocks.*.attn": "attention @ text+image",
    "single_transformer_blocks.*.proj_mlp+attn.to_q+attn.to_k+attn.to_v": "column @ text+image",
    "single_transformer_blocks.*.attn.norm_q": "heads",
    "single_transformer_blocks.*.attn.norm_k": "heads",
    "single_transformer_blocks.*.proj_out": "row 1+4 @ text+image",
    "norm_out.linear": "modulation",
    "proj_out": "sequence joined @ image",
}
"""FLUX, text and image tokens sharded outside of attention and MLP; heads divisible by the ranks."""

WAN_TP: dict[str, str] = {
    "": "replicate own",
    "patch_embedding": "replicate",
    "condition_embedder": "replicate",
    "blocks.*": "replicate own",
    "blocks.*.attn1": "attention",
    "blocks.*.attn1.to_q+to_k+to_v": "column",
    "blocks.*.attn1.norm_q": "rms_norm",
    "blocks.*.attn1.norm_k": "rms_norm",
    "blocks.*.attn1.to_out.0": "row",
    "blocks.*.norm2": "replicate",
    "blocks.*.attn2": "attention",
    "blocks.*.attn2.to_q": "column",
    "blocks.*.attn2.to_k+to_v": "column",
    "blocks.*.attn2.norm_q": "rms_norm",
    "blocks.*.attn2.norm_k": "rms_norm",
    "blocks.*.attn2.to_out.0": "row",
    "blocks.*.ffn.net.0.proj": "column",
    "blocks.*.ffn.net.2": "row",
    "proj_out": "replicate",
}
"""Wan, text to video, every rank having every row; heads divisible by the ranks."""

WAN_I2V_TP: dict[str, str] = {
    **WAN_TP,
    "blocks.*.attn2.add_k_proj+add_v_proj": "column",
    "blocks.*.attn2.norm_added_k": "rms_norm",
}
"""Wan, image to video."""

WAN: dict[str, str] = {
    **WAN_TP,
    "": "sequence own",
    "condition_embedder": "modulation 0+1",
    "blocks.0": "rows split",
    "blocks.*": "sequence own",
    "blocks.*.norm2": "sequence",
    "blocks.*.attn2.to_k+to_v": "column whole",
    "proj_out": "sequence joined",
}
"""Wan, text to video, tokens sharded outside of attention and MLP; text is whole on every rank."""

WAN_I2V: dict[str, str] = {
    **WAN,
    "blocks.*.attn2.add_k_proj+add_v_proj": "column whole",
    "blocks.*.attn2.norm_added_k": "rms_norm",
}
"""Wan, image to video, tokens sharded."""
