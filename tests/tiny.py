"""Tiny random diffusers pipelines, built from configs and saved as folders: real classes, nothing downloaded.

The hazard: they are random, so they show that two paths agree, never that a picture is good.
"""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

TEXT_LENGTH = 16
TEXT_DIM = 8


def flux_transformer(
    heads=2, head_dim=8, layers=1, single_layers=1, channels=4, text_dim=TEXT_DIM, guidance_embeds=True, seed=0
):
    """A random FluxTransformer2DModel in eval mode, width heads * head_dim; the defaults have 23,780 parameters."""
    axes = (head_dim - 4 * (head_dim // 6), 2 * (head_dim // 6), 2 * (head_dim // 6))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformer = FluxTransformer2DModel(
            in_channels=channels,
            num_layers=layers,
            num_single_layers=single_layers,
            attention_head_dim=head_dim,
            num_attention_heads=heads,
            joint_attention_dim=text_dim,
            pooled_projection_dim=text_dim,
            guidance_embeds=guidance_embeds,
            axes_dims_rope=axes,
        )
    return transformer.eval()


def wan_transformer(heads=2, head_dim=12, layers=1, channels=4, text_dim=TEXT_DIM, seed=0):
    """A random WanTransformer3DModel in eval mode; the defaults have 12,960 parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformer = WanTransformer3DModel(
            num_attention_heads=heads,
            attention_head_dim=head_dim,
            in_channels=channels,
            out_channels=channels,
            text_dim=text_dim,
            freq_dim=16,
            ffn_dim=32,
            num_layers=layers,
            rope_max_seq_len=32,
        )
    return transformer.eval()


def tiny_flux_folder(folder):
    """Save a FluxPipeline whose autoencoder halves each side: 16 x 24 pixels are 4 x 6 tokens of 4 channels."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(4, 4),
            latent_channels=1,
            norm_num_groups=1,
            use_quant_conv=False,
            use_post_quant_conv=False,
            scaling_factor=1.5,
            shift_factor=0.1,
        )
        pipeline = FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            vae=vae,
            text_encoder=_clip_encoder(),
            tokenizer=_clip_tokenizer(),
            text_encoder_2=T5EncoderModel(T5Config(**_t5_sizes())),
            tokenizer_2=_t5_tokenizer(),
            transformer=flux_transformer(),
        )
    pipeline.save_pretrained(folder)
    return Path(folder)


def tiny_wan_folder(folder):
    """Save a WanPipeline with Wan's own compression: 9 frames of 32 x 48 pixels are (4, 3, 4, 6) latents."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        vae = AutoencoderKLWan(
            base_dim=3,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[-0.7, 0.2, 0.0, 0.5],
            latents_std=[2.8, 1.4, 2.3, 0.9],
        )
        pipeline = WanPipeline(
            tokenizer=_t5_tokenizer(),
            text_encoder=UMT5EncoderModel(UMT5Config(**_t5_sizes())),
            vae=vae,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            transformer=wan_transformer(),
        )
    pipeline.save_pretrained(folder)
    return Path(folder)


def _clip_vocabulary():
    letters = sorted(ByteLevel.alphabet())
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return {word: number for number, word in enumerate(words)}


def _clip_tokenizer():
    return CLIPTokenizer(vocab=_clip_vocabulary(), merges=[], model_max_length=TEXT_LENGTH)


def _clip_encoder():
    size = len(_clip_vocabulary())
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=size,
            hidden_size=TEXT_DIM,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=TEXT_LENGTH,
            bos_token_id=size - 2,
            eos_token_id=size - 1,
            pad_token_id=size - 1,
        )
    )


def _t5_vocabulary():
    letters = [chr(number) for number in range(33, 127)]
    return [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0), *((letter, -3.0) for letter in letters)]


def _t5_tokenizer():
    return T5TokenizerFast(vocab=_t5_vocabulary(), extra_ids=0, model_max_length=TEXT_LENGTH)


def _t5_sizes():
    return {
        "vocab_size": len(_t5_vocabulary()),
        "d_model": TEXT_DIM,
        "d_kv": 4,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
        "relative_attention_num_buckets": 8,
    }
