"""Plans for diffusion transformers of diffusers: FluxTransformer2DModel and WanTransformer3DModel, as plain data.

Tensor parallelism that leaves rows whole, for `LinearOptions(sequence_parallel=False)`: every rank is given
the same inputs and gets the same output. Modulation (AdaLayerNorm), embedders and the output layer stay whole,
as replicated parameters. With LoRA of peft the plan is the same. The hazard is FLUX's single block, whose
output layer takes attention and MLP side by side: see "row 1+4" in `parallelize` for what that costs. FLUX
with sequence sharding would interleave text and image rows in its single blocks, and has no plan. Sources: the
models' own code in diffusers; Megatron-LM for the layout.
"""

__all__ = ["FLUX_TP", "WAN_I2V_TP", "WAN_TP"]

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
