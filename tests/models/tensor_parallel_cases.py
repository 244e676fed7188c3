"""What every rank does in the tests of tensor parallelism: an adapter whose layers are split, beside the whole one.

Every rank makes the same whole adapter and runs it alone with ordinary autograd. In float64 what diffusers rounds to
float32 (`.float()` around norms and modulation) is kept wide, in both. A case is plain data.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from stretto.models.digits import DigitsAdapter
from stretto.models.flux import FluxAdapter
from stretto.models.gradient_norm import clip_gradients, gradient_norm
from stretto.models.lora import attach_lora
from stretto.models.sharded import shard_transformer
from stretto.models.tensor_parallel import split_layers
from stretto.models.trainable import make_full, trainable_parameters
from stretto.models.wan import WanAdapter
from stretto.overlap import GradientReducer, parallelize_lora
from tests import tiny
from tests.overlap import diffusion_cases
from tests.overlap.matmul_cases import Draw, same
from tests.overlap.module_cases import full

TOLERANCES = {"float64": 1e-10, "float32": 1e-5}
HEADS = {"flux": 12, "wan": 12, "digits": 4}


@contextlib.contextmanager
def wide(dtype: str) -> Iterator[None]:
    """In float64, `.float()` is `.double()`."""
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double if dtype == "float64" else torch.Tensor.float):
        yield


def adapter_of(case: dict[str, Any]) -> Any:
    """Tiny, random in every parameter, without encoders: token counts that no number of ranks divides."""
    settings = {"guidance": case.get("guidance", 1.0)}
    if case["family"] == "digits":
        adapter: Any = DigitsAdapter(**settings)
    else:
        size = {"heads": HEADS[case["family"]], "head_dim": 6, "layers": 2}
        parts = SimpleNamespace(scheduler=SimpleNamespace(config={}), device="cpu")
        if case["family"] == "flux":
            parts.transformer, parts.vae_scale_factor = tiny.flux_transformer(single_layers=2, **size), 2
            adapter = FluxAdapter(parts, height=4, width=28, **settings)
        else:
            parts.transformer = tiny.wan_transformer(**size)
            parts.vae_scale_factor_spatial, parts.vae_scale_factor_temporal = 8, 4
            parts.config = SimpleNamespace(boundary_ratio=None, expand_timesteps=False)
            adapter = WanAdapter(parts, height=16, width=80, frames=9, **settings)
    draw = Draw(9)
    for parameter in adapter.transformer.parameters() if case["family"] != "digits" else ():
        parameter.data.add_(draw(*parameter.shape), alpha=0.1 if parameter.ndim > 1 else 0.3)
    adapter.transformer.requires_grad_(False)
    if case.get("checkpointed"):
        adapter.transformer.enable_gradient_checkpointing()
    return adapter


def tune(adapter: Any, case: dict[str, Any]) -> None:
    """Full, or LoRA on the adapter's own targets, its B not zero; all in the case's dtype."""
    if case["tuning"] == "full":
        make_full(adapter.transformer)
    else:
        attach_lora(adapter.transformer, rank=3, alpha=5, targets=adapter.lora_targets, seed=1)
        draw = Draw(10)
        for name, parameter in trainable_parameters(adapter.transformer).items():
            if ".lora_B." in name:
                parameter.data.copy_(draw(*parameter.shape)).mul_(0.3)
    nn.Module.to(adapter.transformer, getattr(torch, case["dtype"]))


def pair(case: dict[str, Any], mesh: DeviceMesh) -> tuple[Any, Any]:
    """The whole adapter, and the same one split."""
    whole, mine = adapter_of(case), adapter_of(case)
    for adapter in (whole, mine):
        tune(adapter, case)
    assert split_layers(mine, mesh, shard_rows=case["shard_rows"], schedule="direct") is mine.transformer
    return whole, mine


def inputs(adapter: Any, case: dict[str, Any], seed: int = 4) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Latents that need a gradient, sigma, and a condition, with its negative twin under guidance."""
    draw, dtype = Draw(seed), getattr(torch, case["dtype"])
    if case["family"] == "digits":
        condition = adapter.encode(["3", "8"])
    else:
        sizes = {"prompt_embeds": (2, 5, tiny.TEXT_DIM), "pooled_prompt_embeds": (2, tiny.TEXT_DIM)}
        twins = ("", "negative_") if adapter.rows_per_sample == 2 else ("",)
        condition = {twin + name: draw(*shape).to(dtype) for twin in twins for name, shape in sizes.items()}
        if case["family"] == "wan":
            condition = {name: value for name, value in condition.items() if "pooled" not in name}
    latents = draw(2, *adapter.latent_shape).to(dtype).requires_grad_()
    return latents, torch.tensor([0.3, 0.8], dtype=dtype), condition


def on_tensor_axis(case: dict[str, Any]) -> None:
    """A no-grad rollout step, two retained graphs, gradients, clipping and the state dict, as of one process."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    with wide(case["dtype"]):
        whole, mine = pair(case, mesh)
        tolerance = TOLERANCES[case["dtype"]]
        found = [run(adapter, case) for adapter in (whole, mine)]
    for name, theirs, ours in zip(("rollout", "first", "second", "latents.grad"), *found):
        same(name, ours, theirs, tolerance)
    compare(mine.transformer, whole.transformer, tolerance)
    norms = [clip_gradients(adapter.transformer.parameters(), 0.01) for adapter in (whole, mine)]
    same("norm", norms[1], norms[0], tolerance)
    compare(mine.transformer, whole.transformer, tolerance)
    same_state(mine.transformer, whole.transformer)


def run(adapter: Any, case: dict[str, Any]) -> list[Tensor]:
    latents, sigma, condition = inputs(adapter, case)
    with torch.no_grad():
        rollout = adapter.velocity(latents, sigma, condition)
    first = adapter.velocity(latents, sigma, condition)
    second = adapter.velocity(latents, sigma * 0.5, condition)
    load = Draw(7)(*first.shape).to(first.dtype)
    (first * load).sum().backward()
    (second * load).sum().backward()
    return [rollout, first, second, latents.grad]


def compare(mine: nn.Module, whole: nn.Module, tolerance: float) -> None:
    """Every gradient, and those of whole parameters bitwise equal on every rank."""
    theirs = dict(whole.named_parameters())
    least = 1e-3 * max(float(p.grad.norm()) for p in theirs.values() if p.grad is not None)
    assert [name for name, _ in mine.named_parameters()] == list(theirs)
    for name, parameter in mine.named_parameters():
        expected = theirs[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is None:
            continue
        error = float((full(parameter.grad) - expected).norm())
        allowed = tolerance * max(float(expected.norm()), least)
        assert error <= allowed, f"{name} is off by {error:.2e}, allowed {allowed:.2e}"
        if not isinstance(parameter.grad, DTensor) or all(one.is_replicate() for one in parameter.grad.placements):
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            copies = [torch.empty_like(local) for _ in range(dist.get_world_size())]
            dist.all_gather(copies, local.contiguous())
            assert all(torch.equal(copy, local) for copy in copies), f"{name} differs between ranks"


def same_state(mine: nn.Module, whole: nn.Module) -> None:
    theirs = whole.state_dict()
    assert list(mine.state_dict()) == list(theirs)
    for name, value in mine.state_dict().items():
        assert torch.equal(full(value), theirs[name]), name


def in_16_bits(case: dict[str, Any], how: str) -> None:
    """A bfloat16 base under float32 LoRA, or autocast: errors against float32 are about those of one process.

    Noise level and guidance are such that 1000 times them survives 16 bits: the sinusoids would drown the rest.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    exact, whole, mine = (adapter_of(case) for _ in range(3))
    for adapter in (exact, whole, mine):
        tune(adapter, case)
        for parameter in adapter.transformer.parameters():
            if how == "bfloat16" and not parameter.requires_grad and adapter is not exact:
                parameter.data = parameter.data.bfloat16()
    split_layers(mine, mesh, shard_rows=case["shard_rows"], schedule="direct")
    found = []
    for adapter in (exact, whole, mine):
        adapter.guidance_embedded = 4.096
        latents, _, condition = inputs(adapter, case)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast" and adapter is not exact):
            velocity = adapter.velocity(latents, torch.tensor([0.256, 0.512]), condition)
        velocity.square().mean().backward()
        grads = [full(p.grad).flatten() for p in trainable_parameters(adapter.transformer).values()]
        found.append((velocity.detach(), torch.cat(grads)))
    for truth, theirs, ours in zip(*found):
        assert ours.dtype == torch.float32
        errors = [float((one - truth).norm() / truth.norm()) for one in (theirs, ours)]
        assert 0 < errors[1] <= 1.5 * errors[0] < 0.1, errors


def beside_fsdp(case: dict[str, Any]) -> None:
    """Tensor over one axis, FSDP2 over the other, whose ranks have samples of their own."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("shard", "tensor"))
    with wide(case["dtype"]):
        whole, mine = pair(case, mesh["tensor"])
        shard_transformer(mine.transformer, mesh["shard"])
        for seed in range(mesh["shard"].size()):
            step(whole, case, seed)
        step(mine, case, mesh["shard"].get_local_rank())
    compare(mine.transformer, whole.transformer, TOLERANCES[case["dtype"]])
    expected, norm = (gradient_norm(adapter.transformer.parameters()) for adapter in (whole, mine))
    same("norm", norm, expected, TOLERANCES[case["dtype"]])
    same_state(mine.transformer, whole.transformer)


def beside_late_reduction(case: dict[str, Any]) -> None:
    """Tensor over one axis, samples over the other, whose gradients leave before it is known what they are worth."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "tensor"))
    worths = torch.tensor([[0.5, -2.0]], dtype=torch.float64)
    with wide(case["dtype"]):
        whole, mine = pair(case, mesh["tensor"])
        for seed, worth in enumerate(worths[0].tolist()):
            step(whole, case, seed, worth)
        reducer = GradientReducer(mine.transformer, mesh["replicate"].get_group(), late_bound=True)
        step(mine, case, mesh["replicate"].get_local_rank(), reducer=reducer)
    reducer.finish()
    reducer.settle(worths)
    reducer.deliver()
    reducer.close()
    compare(mine.transformer, whole.transformer, TOLERANCES[case["dtype"]])
    expected, norm = (gradient_norm(adapter.transformer.parameters()) for adapter in (whole, mine))
    same("norm", norm, expected, TOLERANCES[case["dtype"]])


def step(
    adapter: Any, case: dict[str, Any], seed: int, scale: float = 1.0, reducer: GradientReducer | None = None
) -> None:
    """Two retained graphs; a reducer sends their sum in the last backward."""
    latents, sigma, condition = inputs(adapter, case, seed)
    first = adapter.velocity(latents, sigma, condition)
    last = adapter.velocity(latents, sigma * 0.5, condition)
    with contextlib.nullcontext() if reducer is None else reducer.accumulate():
        (first.square().sum() * scale).backward()
    (last.square().sum() * scale).backward()


def image_to_video(shard_rows: bool) -> None:
    """Wan with image keys, of which no adapter is: the transformer itself."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    whole, mine = diffusion_cases.tiny("wan i2v"), diffusion_cases.tiny("wan i2v")
    split_layers(mine, mesh, shard_rows=shard_rows, schedule="direct")
    with wide("float64"):
        outputs = [model(**diffusion_cases.inputs("wan i2v"), return_dict=False)[0] for model in (whole, mine)]
        for output in outputs:
            output.square().sum().backward()
    same("velocity", outputs[1], outputs[0], 1e-10)
    compare(mine, whole, 1e-10)


def mixed_norms() -> None:
    """DTensors on three meshes, with uneven shards, and plain tensors, some without a gradient."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
    kinds: list[Callable[[Tensor], Tensor]] = [
        lambda x: x,
        lambda x: distribute_tensor(x, mesh["a"], [Shard(0)]),
        lambda x: distribute_tensor(x, mesh["b"], [Shard(1)]),
        lambda x: distribute_tensor(x, mesh["a"], [Replicate()]),
        lambda x: distribute_tensor(x, mesh, [Shard(0), Shard(1)]),
        lambda x: distribute_tensor(x, mesh, [Replicate(), Shard(0)]),
    ]
    draw = Draw(3)
    whole, mine = [], []
    for number, kind in enumerate(kinds * 2):
        x, grad = draw(3, 5), draw(3, 5)
        whole.append(nn.Parameter(x))
        mine.append(nn.Parameter(kind(x)))
        if number != 7:
            whole[-1].grad, mine[-1].grad = grad.clone(), kind(grad.clone())
    expected = nn.utils.clip_grad_norm_(whole, 2.0)
    same("norm", clip_gradients(mine, 2.0), expected, 1e-14)
    for one, other in zip(mine, whole):
        if other.grad is not None:
            same("clipped", full(one.grad), other.grad, 1e-14)
    same("norm after", gradient_norm(mine), gradient_norm(whole), 1e-14)
    assert gradient_norm([]) == gradient_norm(whole[7:8]) == 0


def refused() -> None:
    """Heads that do not divide, a class without a plan, a second split: one line, and nothing is changed."""
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor",))
    transformer = tiny.flux_transformer(heads=30)
    with pytest.raises(ValueError, match=r"num_heads=30 cannot be split over 4 ranks.* divisor of 30 \(1, 2, 3\)"):
        split_layers(transformer, mesh, shard_rows=True)
    assert not any(isinstance(parameter, DTensor) for parameter in transformer.parameters())
    with pytest.raises(ValueError, match="no plan splits the layers of a Conv1d; set"):
        split_layers(nn.Conv1d(1, 1, 1), mesh, shard_rows=True)
    transformer = split_layers(tiny.flux_transformer(heads=8), mesh, shard_rows=True)
    with pytest.raises(ValueError, match="its layers are split already"):
        split_layers(transformer, mesh, shard_rows=False)
    attach_lora(transformer, rank=2, alpha=2, targets=["attn.to_q"], seed=0)
    with pytest.raises(ValueError, match=r"a rank's part of the layer.*add adapters before parallelize"):
        parallelize_lora(transformer)
