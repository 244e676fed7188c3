"""What every rank does in the tests of parallel layers inside PyTorch's own training stack.

FSDP2 over one axis of a mesh, parallel layers over the other; checkpoints that change layout; the gradient
norm. Each compares with one process that has the whole batch.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from stretto.overlap import LinearOptions, parallelize
from tests.overlap.matmul_cases import Draw, leaf, same
from tests.overlap.module_cases import PLAN, WIDTH, Model, full

TP_PLAN = {"layers.*.norm": "replicate", "layers.*.gate+up": "column", "layers.*.down": "row"}
EVEN_HIDDEN = 12


def plain_model(**options: Any) -> Model:
    torch.manual_seed(3)
    return Model(hidden=EVEN_HIDDEN, **options).double()


def two_axes() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))


def adapted(model: Model) -> Model:
    """With LoRA of peft on every linear layer, random, its base layers frozen, its norms not."""
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(9)
    adapters = LoraConfig(r=3, target_modules=["gate", "up", "down"], init_lora_weights=False)
    return inject_adapter_in_model(adapters, model).double()


def parallel(mesh: DeviceMesh, sequence: bool, meta: bool = False, with_lora: bool = False, **options: Any) -> Model:
    """A plain model's values, cut over `mesh["tp"]` and then sharded over `mesh["dp"]`."""
    if meta:
        with torch.device("meta"):
            model = Model(hidden=EVEN_HIDDEN, **options).double()
    else:
        model = adapted(plain_model(**options)) if with_lora else plain_model(**options)
    parallelize(model, PLAN if sequence else TP_PLAN, mesh["tp"], LinearOptions(sequence_parallel=sequence))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    if meta:
        model.to_empty(device="cpu")
        whole = plain_model().state_dict()
        set_full(model, whole)
    return model


def set_full(model: nn.Module, whole: dict[str, Tensor]) -> None:
    """Fill from full tensors, as torch's own loader does."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))


def batch(mesh: DeviceMesh, sequence: bool) -> tuple[Tensor, Tensor]:
    """The whole batch, and this rank's samples and rows of it."""
    x = Draw(6)(4, 6, WIDTH)
    own = x.chunk(2)[mesh["dp"].get_local_rank()]
    return x, own.chunk(mesh["tp"].size(), 1)[mesh["tp"].get_local_rank()] if sequence else own


def step(model: nn.Module, x: Tensor, scale: float = 1.0) -> tuple[Tensor, torch.optim.Optimizer, Tensor]:
    """Forward, backward, clip, one step: the output, the optimizer and the gradient norm."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    y = model(x)
    (y.square().sum() * scale).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return y, optimizer, norm


def fsdp(sequence: bool, checkpointed: bool, meta: bool, with_lora: bool) -> None:
    """FSDP2 over parallel layers: outputs, clipped gradients, their norm, and the weights after one step."""
    mesh = two_axes()
    whole = adapted(plain_model()) if with_lora else plain_model()
    mine = parallel(mesh, sequence, meta, with_lora, checkpointed=checkpointed)
    x, own = batch(mesh, sequence)
    y, _, theirs = step(whole, x, scale=0.5)
    out, _, norm = step(mine, leaf(own))
    part = y.chunk(2)[mesh["dp"].get_local_rank()]
    same("y", out, part.chunk(mesh["tp"].size(), 1)[mesh["tp"].get_local_rank()] if sequence else part)
    same("norm", full(norm), theirs)
    parameters = dict(whole.named_parameters())
    for name, parameter in mine.named_parameters():
        assert isinstance(parameter, DTensor)
        assert (parameter.grad is None) == (parameters[name].grad is None), name
        if parameter.grad is not None:
            same(f"{name}.grad", full(parameter.grad), parameters[name].grad)
        same(name, full(parameter), parameters[name])


def trained_and_saved(folder: str, sequence: bool) -> None:
    mesh = two_axes()
    model = parallel(mesh, sequence)
    _, own = batch(mesh, sequence)
    _, optimizer, _ = step(model, own)
    save(model, optimizer, folder)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def loaded_over(folder: str, again: str, sequence: bool) -> None:
    """A checkpoint of (2 data, 2 tensor) parallel ranks, here over all ranks tensor parallel."""
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    torch.manual_seed(8)
    model = Model(hidden=EVEN_HIDDEN).double()
    parallelize(model, PLAN if sequence else TP_PLAN, mesh, LinearOptions(sequence_parallel=sequence))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    load(model, optimizer, folder)
    as_one_process(model, optimizer)
    save(model, optimizer, again)


def loaded_plain(folder: str) -> None:
    """And by the plain model, in one process."""
    torch.manual_seed(8)
    model = Model(hidden=EVEN_HIDDEN).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    load(model, optimizer, folder)
    as_one_process(model, optimizer)
    assert any(Path(folder).iterdir())


def as_one_process(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Weights and moments after one step are those of a step in one process."""
    whole = plain_model()
    _, reference, _ = step(whole, Draw(6)(4, 6, WIDTH), scale=0.5)
    parameters = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        same(name, full(parameter), parameters[name])
        for moment in ("exp_avg", "exp_avg_sq", "step"):
            mine, theirs = optimizer.state[parameter][moment], reference.state[parameters[name]][moment]
            same(f"{name} {moment}", full(mine).double(), theirs.double(), tolerance=1e-11)
