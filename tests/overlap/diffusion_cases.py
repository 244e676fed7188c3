"""What every rank does in the tests of diffusion transformers: diffusers' own classes, parallel by a shipped plan."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from stretto.overlap import FLUX, FLUX_TP, WAN, WAN_I2V, WAN_I2V_TP, WAN_TP, LinearOptions, parallelize
from tests.overlap.matmul_cases import Draw, leaf, same
from tests.overlap.module_cases import full

HEADS, HEAD_DIM = 12, 6
PLANS = {"flux": FLUX, "wan": WAN, "wan i2v": WAN_I2V}
WHOLE_PLANS = {"flux": FLUX_TP, "wan": WAN_TP, "wan i2v": WAN_I2V_TP}


def tiny(family: str) -> nn.Module:
    """A float64 transformer with two layers of each kind and random weights, the same on every rank."""
    import diffusers

    torch.manual_seed(5)
    if family == "flux":
        model = diffusers.FluxTransformer2DModel(
            in_channels=4,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=HEADS,
            joint_attention_dim=5,
            pooled_projection_dim=3,
            guidance_embeds=True,
            axes_dims_rope=(2, 2, 2),
        )
    else:
        image = {"image_dim": 7, "added_kv_proj_dim": HEADS * HEAD_DIM} if "i2v" in family else {}
        model = diffusers.WanTransformer3DModel(
            num_attention_heads=HEADS,
            attention_head_dim=HEAD_DIM,
            in_channels=3,
            out_channels=3,
            text_dim=5,
            freq_dim=16,
            ffn_dim=13,
            num_layers=2,
            rope_max_seq_len=32,
            **image,
        )
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def inputs(family: str) -> dict[str, Any]:
    """Two samples of token counts that no number of ranks divides; latents and text need a gradient."""
    draw = Draw(4)
    if family == "flux":
        ids = torch.cartesian_prod(*(torch.arange(float(n)) for n in (1, 1, 7)))
        return {
            "hidden_states": leaf(draw(2, 7, 4)),
            "encoder_hidden_states": leaf(draw(2, 5, 5)),
            "pooled_projections": draw(2, 3),
            "timestep": torch.tensor([0.3, 0.8], dtype=torch.float64),
            "img_ids": ids,
            "txt_ids": torch.zeros(5, 3),
            "guidance": torch.tensor([3.5, 1.0], dtype=torch.float64),
        }
    given = {
        "hidden_states": leaf(draw(2, 3, 3, 2, 10)),
        "encoder_hidden_states": leaf(draw(2, 512 if "i2v" in family else 5, 5)),
        "timestep": torch.tensor([300.0, 800.0], dtype=torch.float64),
    }
    return {**given, "encoder_hidden_states_image": leaf(draw(2, 4, 7))} if "i2v" in family else given


def adapt(model: nn.Module, family: str) -> None:
    """LoRA as diffusers adds it, on parallel layers and on whole ones, its rank divided by no number of ranks."""
    from peft import LoraConfig

    targets = {
        "flux": "to_q to_k add_v_proj to_out.0 to_add_out net.2 net.0.proj proj_mlp proj_out norm1.linear x_embedder",
        "wan": "to_q to_v to_out.0 net.0.proj net.2 time_proj proj_out",
    }[family]
    model.add_adapter(LoraConfig(r=5, lora_alpha=7, target_modules=targets.split(), init_lora_weights=False))
    model.double()


@contextmanager
def float64_throughout() -> Iterator[None]:
    """What Wan computes in float32, whatever its weights are, in float64: only then are sums over ranks to 1e-12."""
    narrow = torch.Tensor.float
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.Tensor.float = narrow


def trained(family: str, sharded: bool, checkpointed: bool, adapted: bool) -> None:
    """Output, gradients of every parameter and of the inputs, gradient norm; and a plain checkpoint loads."""
    whole, mine = tiny(family), tiny(family)
    for model in (whole, mine) if adapted else ():
        adapt(model, family)
    with torch.no_grad():
        for parameter in mine.parameters():
            parameter.zero_()
    names = list(whole.state_dict())
    plan = (PLANS if sharded else WHOLE_PLANS)[family]
    parallelize(mine, plan, dist.group.WORLD, LinearOptions(sequence_parallel=sharded))
    mine.load_state_dict(whole.state_dict())
    assert list(mine.state_dict()) == names
    if checkpointed:
        mine.enable_gradient_checkpointing()
    theirs, given = inputs(family), inputs(family)
    with float64_throughout():
        y, out = whole(**theirs, return_dict=False)[0], mine(**given, return_dict=False)[0]
        load = Draw(7)(*y.shape)
        (y * load).sum().backward()
        (out * load).sum().backward()
    same("output", out, y)
    for name, value in given.items():
        if value.requires_grad:
            same(f"{name}.grad", value.grad, theirs[name].grad)
    compare(mine, whole)
    norm, mine_norm = (nn.utils.clip_grad_norm_(model.parameters(), 1.0) for model in (whole, mine))
    same("norm", full(mine_norm), norm)


def compare(mine: nn.Module, whole: nn.Module) -> None:
    theirs = dict(whole.named_parameters())
    assert [name for name, _ in mine.named_parameters()] == list(theirs)
    for name, parameter in mine.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert (parameter.grad is None) == (theirs[name].grad is None), name
        if parameter.grad is not None:
            same(name, full(parameter.grad), theirs[name].grad)
