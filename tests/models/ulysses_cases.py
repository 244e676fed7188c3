"""What every rank does in the tests of Ulysses: a diffusers transformer split over the group, beside the whole one.

Every rank makes the same whole model and runs it alone with ordinary autograd. Velocities must be the same, and the
gradients, summed over the group, those of the whole model. A case is plain data. In float64 diffusers' own roundings
to float32 (`.float()` around norms, positions and modulation) are kept wide, in both models.
"""

import contextlib
import copy
import functools
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from stretto.models.digits import DigitsAdapter
from stretto.models.lora import attach_lora, lora_off
from stretto.models.sharded import shard_transformer
from stretto.models.trainable import make_full, trainable_parameters
from stretto.models.ulysses import split_sequence
from stretto.overlap import FLUX, FLUX_TP, WAN_TP, LinearOptions, OverlapWarning, parallelize, report
from stretto.policy.per_sample import PerSampleGradients
from tests import tiny
from tests.overlap.matmul_cases import Draw, same

TARGETS = {
    "flux": ["to_q", "to_k", "add_v_proj", "to_out.0", "to_add_out", "proj_mlp", "net.2", "proj_out", "x_embedder"],
    "wan": ["attn1.to_q", "attn1.to_v", "to_out.0", "attn2.to_k", "net.2", "time_proj", "proj_out"],
}
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}


def imported() -> None:
    """Coming here is all."""


@contextlib.contextmanager
def wide(dtype: str) -> Iterator[None]:
    """In float64, `.float()` is `.double()`."""
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double if dtype == "float64" else torch.Tensor.float):
        yield


def model(case: dict[str, Any]) -> nn.Module:
    """Several layers of each kind, random in every parameter."""
    if case["family"] == "flux":
        whole: Any = tiny.flux_transformer(heads=case["heads"], head_dim=6, layers=2, single_layers=2)
    else:
        whole = tiny.wan_transformer(heads=case["heads"], head_dim=6, layers=2)
    with torch.no_grad():
        draw = Draw(9)
        for parameter in whole.parameters():
            parameter.add_(draw(*parameter.shape), alpha=0.1 if parameter.ndim > 1 else 0.3)
    whole.requires_grad_(False)
    if case.get("checkpointed"):
        whole.enable_gradient_checkpointing()
    return whole


def tune(transformer: nn.Module, case: dict[str, Any]) -> None:
    """Full, or LoRA on layers inside and outside of attention, its B not zero."""
    if case["tuning"] == "full":
        make_full(transformer)
        return
    attach_lora(transformer, rank=3, alpha=5, targets=TARGETS[case["family"]], seed=1)
    fill(transformer)


def fill(transformer: nn.Module) -> None:
    """B of every LoRA is zero no more, so that A has a gradient."""
    draw = Draw(10)
    for name, parameter in transformer.named_parameters():
        if ".lora_B." in name:
            parameter.data.copy_(draw(*parameter.shape)).mul_(0.3)


def inputs(case: dict[str, Any], seed: int = 4) -> dict[str, Any]:
    draw, batch, (frames, height, width) = Draw(seed), case["batch"], case["grid"]
    dtype = getattr(torch, case["dtype"])
    text = draw(batch, case["text"], tiny.TEXT_DIM).to(dtype)
    sigma = torch.linspace(0.25, 0.5, batch, dtype=dtype)  # 1000 of it exact in bfloat16
    if case["family"] == "wan":
        latents = draw(batch, 4, frames, 2 * height, 2 * width).to(dtype)
        return {"hidden_states": latents, "timestep": 1000 * sigma, "encoder_hidden_states": text}
    ids = torch.cartesian_prod(*(torch.arange(float(n)) for n in (frames, height, width)))
    return {
        "hidden_states": draw(batch, len(ids), 4).to(dtype),
        "timestep": sigma,
        "encoder_hidden_states": text,
        "pooled_projections": draw(batch, tiny.TEXT_DIM).to(dtype),
        "guidance": torch.full((batch,), 2.0, dtype=dtype),
        "img_ids": ids,
        "txt_ids": torch.zeros(case["text"], 3),
    }


def in_its_dtype(function: Any) -> Any:
    """The case, in `wide` of its dtype."""

    @functools.wraps(function)
    def wrapped(case: dict[str, Any]) -> Any:
        with wide(case["dtype"]):
            return function(case)

    return wrapped


def pair(case: dict[str, Any], group: dist.ProcessGroup) -> tuple[nn.Module, nn.Module]:
    """The whole model, and the same one split; LoRA comes before the split or after it."""
    dtype = getattr(torch, case["dtype"])
    whole = model(case)
    mine = copy.deepcopy(whole)
    tune(whole, case)
    options = {"schedule": case.get("schedule", "direct"), "num_subslices": case.get("num_subslices", 1)}
    if case.get("split_first"):
        split_sequence(mine, group, **options)
        tune(mine, case)
    else:
        tune(mine, case)
        split_sequence(mine, group, **options)
    if dtype is torch.bfloat16:
        for parameter in (*whole.parameters(), *mine.parameters()):
            parameter.data = parameter.data if parameter.requires_grad else parameter.data.to(dtype)
        return whole, mine
    nn.Module.to(whole, dtype)
    nn.Module.to(mine, dtype)
    assert list(whole.state_dict()) == list(mine.state_dict())
    return whole, mine


def velocity(transformer: nn.Module, given: dict[str, Any]) -> Tensor:
    return transformer(**given, return_dict=False)[0]


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def compare(
    mine: nn.Module,
    whole: nn.Module,
    tolerance: float,
    group: dist.ProcessGroup | None = None,
    is_summed: bool = False,
) -> None:
    """Every gradient of the one, summed over the ranks unless it is already, is the other's."""
    theirs = dict(whole.named_parameters())
    least = 1e-3 * max(float(p.grad.norm()) for p in theirs.values() if p.grad is not None)
    assert [name for name, _ in mine.named_parameters()] == list(theirs)
    for name, parameter in mine.named_parameters():
        expected = theirs[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            total = parameter.grad.clone()
            if not is_summed:
                dist.all_reduce(local_of(total), group=group)
            total = total.full_tensor() if isinstance(total, DTensor) else total
            error, allowed = float((total - expected).norm()), tolerance * max(float(expected.norm()), least)
            assert error <= allowed, f"{name} is off by {error:.2e}, allowed {allowed:.2e}"


@in_its_dtype
def trained(case: dict[str, Any]) -> None:
    """Velocity, the latents' gradient and the gradient of every parameter."""
    whole, mine = pair(case, dist.group.WORLD)
    tolerance = TOLERANCES[getattr(torch, case["dtype"])]
    theirs, given = inputs(case), inputs(case)
    for one in (theirs, given):
        one["hidden_states"].requires_grad_(True)
    y, out = velocity(whole, theirs), velocity(mine, given)
    same("velocity", out, y, tolerance)
    load = Draw(7)(*y.shape).to(y.dtype)
    (y * load).sum().backward()
    (out * load).sum().backward()
    total = given["hidden_states"].grad
    dist.all_reduce(total)
    same("latents", total, theirs["hidden_states"].grad, tolerance)
    compare(mine, whole, tolerance)


def in_bf16(case: dict[str, Any], autocast: bool) -> None:
    """Of a bf16 base, or under autocast, gradients are as far from float32's as those of the whole model are."""
    whole, mine = pair(case, dist.group.WORLD)
    truth = copy.deepcopy(whole).float()
    found = []
    for transformer in (truth, whole, mine):
        given = inputs(case)
        if transformer is truth:
            given = {name: value.float() for name, value in given.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and transformer is not truth):
            y = velocity(transformer, given)
        (y * Draw(7)(*y.shape).to(y.dtype)).sum().backward()
        grads = torch.cat([p.grad.flatten() for p in transformer.parameters() if p.grad is not None])
        assert grads.dtype == torch.float32
        if transformer is mine:
            dist.all_reduce(grads)
        found.append(grads)
    error, theirs = (float((one - found[0]).norm() / found[0].norm()) for one in reversed(found[1:]))
    assert 1e-4 < theirs < 0.1, theirs
    assert error < 1.3 * theirs, (error, theirs)


@in_its_dtype
def retained(case: dict[str, Any]) -> None:
    """Graphs kept while others are made, forwards without gradient between, of the reference too; then backward."""
    whole, mine = pair(case, dist.group.WORLD)
    tolerance = TOLERANCES[getattr(torch, case["dtype"])]
    for transformer in (whole, mine):
        kept = []
        for step in range(3):
            with torch.no_grad():
                velocity(transformer, inputs(case, 20 + step))
                with lora_off(transformer):
                    plain = velocity(transformer, inputs(case, step))
            kept.append(velocity(transformer, inputs(case, step)))
            kept[-1].register_hook(lambda gradient, plain=plain: gradient * plain)
        for step, y in enumerate(kept):
            ((1 + step) * y.square()).sum().backward()
    compare(mine, whole, tolerance)


@in_its_dtype
def guided(case: dict[str, Any]) -> None:
    """The shipped digits under guidance: both branches in one forward."""
    dtype, checkpointing = getattr(torch, case["dtype"]), case["checkpointed"]
    adapters = [DigitsAdapter(dtype=dtype, guidance=2.0, checkpointing=checkpointing) for _ in range(2)]
    split_sequence(adapters[1].transformer, dist.group.WORLD, schedule="direct")
    for adapter in adapters:
        if case["tuning"] == "full":
            make_full(adapter.transformer)
        else:
            attach_lora(adapter.transformer, rank=4, alpha=8, targets=adapter.lora_targets, seed=3)
            fill(adapter.transformer)
    latents, sigma = Draw(1)(3, 16, 4).to(dtype), torch.tensor([0.9, 0.5, 0.2], dtype=dtype)
    ys = [adapter.velocity(latents, sigma, adapter.encode(["3", "7", "0"])) for adapter in adapters]
    same("velocity", ys[1], ys[0], TOLERANCES[dtype])
    for y in ys:
        y.square().sum().backward()
    compare(adapters[1].transformer, adapters[0].transformer, TOLERANCES[dtype])


@in_its_dtype
def called_whole(case: dict[str, Any]) -> None:
    """Layers that others patch or watch are called, and nothing else changes; it is said once."""
    whole, mine = pair(case, dist.group.WORLD)
    calls: list[str] = []
    for name, layer in mine.named_modules():
        if name.endswith(("blocks.0.attn.to_q", "blocks.1.attn1.to_q")):
            layer.register_forward_hook(lambda module, args, output, name=name: calls.append(name))
        if name.endswith("to_k"):
            layer.forward = lambda x, layer=layer: type(layer).forward(layer, x)
    given = inputs(case)
    y, out = velocity(whole, given), velocity(mine, given)
    assert calls
    same("velocity", out, y, 1e-10)
    for one in (y, out):
        one.square().sum().backward()
    compare(mine, whole, 1e-10)


def reported(case: dict[str, Any]) -> list[tuple[str, str, str, int]]:
    """What a group's report says after one training step: operation, whose tokens, schedule, calls."""
    group = dist.new_group()
    with warnings.catch_warnings():
        warnings.simplefilter("error", OverlapWarning)
        _, mine = pair(case, group)
        velocity(mine, inputs(case)).square().sum().backward()
    lines = [(one.operation, one.tuned_as, one.schedule, one.num_calls) for one in report(group).records]
    dist.destroy_process_group(group)
    return lines


@in_its_dtype
def copied(case: dict[str, Any]) -> None:
    """A deep copy, and a model that peft has wrapped, unwrapped or merged since, are split as well."""
    whole, mine = pair(case, dist.group.WORLD)
    frozen = copy.deepcopy(mine)
    given = inputs(case)
    y = velocity(whole, given)
    same("copy", velocity(frozen, given), y, 1e-10)
    same("itself", velocity(mine, given), y, 1e-10)
    for transformer in (whole, mine):
        transformer.merge_adapter() if hasattr(transformer, "merge_adapter") else transformer.fuse_lora()
    same("merged", velocity(mine, given), velocity(whole, given), 1e-10)


@in_its_dtype
def beside_tensor_parallel(case: dict[str, Any]) -> None:
    """Two axes: heads over the tensor ranks and again over the Ulysses ranks, tokens over the latter."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "tensor"))
    whole = model(case)
    mine = copy.deepcopy(whole)
    tune(whole, case)
    tune(mine, case)
    whole.double()
    mine.double()
    plan = {"flux": FLUX_TP, "wan": WAN_TP}[case["family"]]
    parallelize(mine, plan, mesh["tensor"], LinearOptions(sequence_parallel=False, schedule="direct"))
    split_sequence(mine, mesh["ulysses"], schedule="direct")
    y, out = velocity(whole, inputs(case)), velocity(mine, inputs(case))
    same("velocity", out, y, 1e-10)
    for one in (y, out):
        one.square().sum().backward()
    compare(mine, whole, 1e-10, mesh.get_group("ulysses"))


@in_its_dtype
def beside_fsdp(case: dict[str, Any]) -> None:
    """FSDP2 over the same ranks: it sums the parts of the tokens as it sums those of samples."""
    whole, mine = pair(case, dist.group.WORLD)
    shard_transformer(mine, init_device_mesh("cpu", (dist.get_world_size(),)))
    kept = [(velocity(whole, inputs(case, seed)), velocity(mine, inputs(case, seed))) for seed in (4, 5)]
    for y, out in kept:
        same("velocity", out, y, 1e-10)
        y.square().sum().backward()
        out.square().sum().backward()
    compare(mine, whole, 1e-10, is_summed=True)


@in_its_dtype
def by_sample(case: dict[str, Any]) -> None:
    """Per-sample gradients, summed over the ranks, are those of one process."""
    found = []
    for split in (False, True):
        adapter = DigitsAdapter(dtype=torch.float64, guidance=2.0)
        attach_lora(adapter.transformer, rank=4, alpha=8, targets=adapter.lora_targets, seed=3)
        fill(adapter.transformer)
        adapter.transformer.double()
        if split:
            split_sequence(adapter.transformer, dist.group.WORLD, schedule="direct")
        trained = trainable_parameters(adapter.transformer)
        per_sample = PerSampleGradients(adapter.transformer, trained)
        assert not per_sample.uncovered
        with per_sample.active(3), per_sample.collecting():
            sigma = torch.tensor([0.9, 0.5, 0.2], dtype=torch.float64)
            adapter.velocity(Draw(1)(3, 16, 4), sigma, adapter.encode(["3", "7", "0"])).square().sum().backward()
        assert all(parameter.grad is None for parameter in trained.values())
        found.append(per_sample.take(list(trained.values())))
    for name, expected, total in zip(trained, *found):
        dist.all_reduce(total)
        same(name, total, expected, 1e-9)


def refused() -> dict[str, str]:
    """The errors, by what was done."""
    group, found = dist.group.WORLD, {}
    split = tiny.flux_transformer(heads=4)
    split_sequence(split, group)
    rows = tiny.flux_transformer(heads=4)
    parallelize(rows, FLUX, group, LinearOptions())
    for name, attempt in {
        "rows": lambda: split_sequence(rows, group),
        "heads": lambda: split_sequence(tiny.wan_transformer(heads=2), group),
        "class": lambda: split_sequence(nn.Linear(2, 2), group),
        "twice": lambda: split_sequence(split, group),
    }.items():
        try:
            attempt()
        except ValueError as error:
            found[name] = str(error)
    return found
