"""What every rank does in the tests of LoRA: peft's adapters on a parallel model beside the same in one process."""

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from stretto.overlap import LinearOptions, parallelize, parallelize_lora
from stretto.overlap.modules import ParallelLinear
from stretto.overlap.p2p import peers_of
from stretto.overlap.routes import slice_sizes
from tests.overlap.matmul_cases import Draw, leaf, same
from tests.overlap.module_cases import full, own_rows

HEADS, HEAD_DIM, HIDDEN = 12, 2, 11
WIDTH = HEADS * HEAD_DIM
TARGETS = ["q", "v", "o", "up", "down"]
PLAN = {"layers.*.q+k+v": "column", "layers.*.o": "row", "layers.*.gate+up": "column", "layers.*.down": "row"}
NORMS = {"layers.*.norm1": "sequence", "layers.*.norm2": "sequence"}


class Block(nn.Module):
    """A decoder layer: attention over own heads, then a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=bias) for bias in (True, False, False))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (one(h).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for one in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(torch.sigmoid(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def plain_model(**options: Any) -> Model:
    torch.manual_seed(3)
    return Model(**options).double()


def config(r: int, **options: Any) -> LoraConfig:
    return LoraConfig(r=r, lora_alpha=2 * r + 1, target_modules=TARGETS, init_lora_weights=False, **options)


def adapted(model: nn.Module, seed: int = 5, dropout: float = 0.0) -> PeftModel:
    """Two adapters of ranks that no number of ranks divides, both random; the second has a bias."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(model, config(5, lora_dropout=dropout))
        wrapped.add_adapter("second", config(2, lora_bias=True))
    return wrapped.double()


def activate(model: PeftModel, case: dict[str, Any]) -> Any:
    model.base_model.set_adapter(case["active"])
    if case["trainable_base"]:
        for name, parameter in model.named_parameters():
            if "lora" not in name:
                parameter.requires_grad_(True)
    return model.disable_adapter() if case["disabled"] else contextlib.nullcontext()


def options_of(case: dict[str, Any]) -> LinearOptions:
    return LinearOptions(
        sequence_parallel=case["sequence"],
        uneven=True,
        schedule=case["schedule"],
        num_subslices=case["num_subslices"],
    )


def trained(case: dict[str, Any]) -> None:
    """Outputs and every gradient of an adapted model, parallel after peft or before it."""
    whole = adapted(plain_model(), dropout=case["dropout"])
    plan = {**NORMS, **PLAN} if case["sequence"] else PLAN
    if case["peft_first"]:
        mine = adapted(plain_model(checkpointed=case["checkpointed"]), dropout=case["dropout"])
        if case["prefixed"]:
            plan = {f"base_model.model.{pattern}": style for pattern, style in plan.items()}
        parallelize(mine, plan, dist.group.WORLD, options_of(case))
    else:
        mine = plain_model(checkpointed=case["checkpointed"])
        parallelize(mine, plan, dist.group.WORLD, options_of(case))
        mine = parallelize_lora(adapted(mine, dropout=case["dropout"]))
        assert parallelize_lora(mine) is mine
    draw = Draw(case["seed"])
    x = leaf(draw(2, case["rows"], WIDTH))
    load = draw(*x.shape)
    torch.manual_seed(case["seed"])
    with activate(whole, case):
        y = whole(x)
        (y * load).sum().backward()
    part = own_rows if case["sequence"] else (lambda tensor: tensor)
    own = leaf(part(x))
    torch.manual_seed(case["seed"])
    with activate(mine, case):
        out = mine(own)
        same("y", out, part(y))
        (out * part(load)).sum().backward()
    same("x.grad", own.grad, part(x.grad))
    compare(mine, whole)


def compare(mine: nn.Module, whole: nn.Module) -> None:
    theirs = dict(whole.named_parameters())
    assert [name for name, _ in mine.named_parameters()] == list(theirs)
    for name, parameter in mine.named_parameters():
        grad = theirs[name].grad
        assert (parameter.grad is None) == (grad is None), name
        if grad is not None:
            assert isinstance(parameter.grad, DTensor) == isinstance(parameter, DTensor), name
            same(name, full(parameter.grad), grad)


def num_calls(dtype: torch.dtype) -> int:
    """Operations on the group in one forward and backward of one adapted block; 16-bit ones have float32 adapters."""
    mine = adapted(plain_model()).to(dtype)
    for name, parameter in mine.named_parameters():
        if "lora" in name and dtype == torch.bfloat16:
            parameter.data = parameter.data.float()
    parallelize(mine, {**NORMS, **PLAN}, dist.group.WORLD)
    mine.base_model.set_adapter(["default", "second"])
    before = peers_of(dist.group.WORLD).num_calls
    block = mine.base_model.model.layers[0]
    block(torch.ones(1, 2, WIDTH, dtype=dtype, requires_grad=True)).sum().backward()
    assert block.q.lora_A["default"].weight.grad.dtype == block.q.lora_A["default"].weight.dtype
    return peers_of(dist.group.WORLD).num_calls - before


def checkpoints() -> None:
    """A saved adapter is the one-process one, and a one-process adapter loads, sharded."""
    whole = adapted(plain_model())
    mine = parallelize(adapted(plain_model(), seed=6), {**NORMS, **PLAN}, dist.group.WORLD)
    for adapter in ("default", "second"):
        saved = get_peft_model_state_dict(whole, adapter_name=adapter)
        result = set_peft_model_state_dict(mine, dict(saved), adapter_name=adapter)
        assert not result.unexpected_keys
        gathered = {
            name: full(value) for name, value in get_peft_model_state_dict(mine, adapter_name=adapter).items()
        }
        assert list(gathered) == list(saved)
        assert all(torch.equal(gathered[name], saved[name]) for name in saved)
        again = adapted(plain_model(), seed=7)
        set_peft_model_state_dict(again, gathered, adapter_name=adapter)
        assert all(torch.equal(get_peft_model_state_dict(again, adapter_name=adapter)[n], saved[n]) for n in saved)


def layouts() -> None:
    mine = parallelize(adapted(plain_model()), {**NORMS, **PLAN}, dist.group.WORLD)
    block = mine.base_model.model.layers[1]
    found = [
        getattr(getattr(block, name), part)["second"].weight.placements[0]
        for name in ("up", "down")
        for part in ("lora_A", "lora_B")
    ]
    assert found == [Replicate(), Shard(0), Shard(1), Replicate()]
    assert isinstance(block.gate, ParallelLinear)
    assert not block.q.base_layer.weight.requires_grad


def merged_after() -> None:
    """Merging, and unmerging, works on the shards."""
    whole = adapted(plain_model())
    mine = parallelize(adapted(plain_model()), PLAN, dist.group.WORLD, LinearOptions(sequence_parallel=False))
    x = Draw(1)(1, 4, WIDTH)
    y = whole(x)
    mine.merge_adapter()
    same("merged", mine(x), y)
    mine.unmerge_adapter()
    same("unmerged", mine(x), y)


def refusals() -> None:
    group, whole = dist.group.WORLD, LinearOptions(sequence_parallel=False)

    def wrapped(**options: Any) -> PeftModel:
        return get_peft_model(plain_model(), config(2, **options)).double()

    merged = wrapped()
    merged.merge_adapter()
    for model, words in [
        (wrapped(use_dora=True), "'layers.0.q' is Dora.*; DoRA and other variants cannot be parallel"),
        (wrapped(lora_dropout=0.1), "layers.0.down' has lora_dropout=0.1, which cannot be drawn for input features"),
        (merged, r"'layers.0.q' has merged adapters; unmerge them first \(model.unmerge_adapter\(\)\)"),
        (other_tuner(plain_model()), "'layers.0.q' is a peft.tuners.*; of peft's tuners only LoRA"),
    ]:
        names = [name for name, _ in model.named_parameters()]
        plan = {**PLAN, "layers.*.down": "row 5+6"} if "several" in words or "drawn" in words else PLAN
        with pytest.raises(ValueError, match=words):
            parallelize(model, plan, group, whole)
        assert [name for name, p in model.named_parameters() if not isinstance(p, DTensor)] == names

    late = parallelize(plain_model(), PLAN, group, whole)
    late = get_peft_model(late, config(2)).double()
    x = torch.ones(1, 2, WIDTH, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"adapter 'default' of 'q' is not parallel but its base layer is; call str"):
        late(x)
    parallelize_lora(late)(x)
    late.add_adapter("later", config(3))
    with pytest.raises(ValueError, match=r"adapter 'later' of 'q' is not parallel but its base layer is; call"):
        late(x)
    late = other_tuner(parallelize(plain_model(), PLAN, group, whole))
    with pytest.raises(ValueError, match=r"'q' wraps a parallel layer in peft.*, which only peft's LoRA can"):
        late(x)


def other_tuner(model: nn.Module) -> nn.Module:
    from peft import LoHaConfig

    return get_peft_model(model, LoHaConfig(target_modules=TARGETS)).double()


def llama(sequence: bool) -> None:
    """A Llama of transformers whose ranks share key-value heads, by the shipped plan: every adapter's gradient."""
    from tests.overlap.decoder_cases import parallel, tiny, tokens

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    torch.manual_seed(5)
    adapters = LoraConfig(r=3, lora_alpha=2, target_modules=targets, init_lora_weights=False)
    whole = get_peft_model(tiny("llama"), adapters).double()
    mine = get_peft_model(tiny("llama"), adapters).double()
    mine.load_state_dict(whole.state_dict())
    parallel(mine, "llama", sequence, uneven=True)
    ids = tokens(7)
    logits = whole(ids, use_cache=False).logits
    load = Draw(1)(*logits.shape)
    (logits * load).sum().backward()
    own = mine(ids, use_cache=False).logits
    same("logits", own.full_tensor(), logits)
    vocabulary = own.to_local()
    my_load = load.split(slice_sizes(own.shape[-1], dist.get_world_size()), -1)[dist.get_rank()]
    (vocabulary * my_load).sum().backward()
    compare(mine, whole)
