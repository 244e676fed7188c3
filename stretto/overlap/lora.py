"""LoRA of peft inside parallel linear layers: the adapter's products ride on the base layer's communication.

In a column layer A joins the gather of the base, and of the layers that share it, and B is sharded as the base
is; in a row layer A is sharded on its input, its partial sum travels in the message of the base's, and B is
whole on every rank. peft's own forward stays: only the layers that it calls become parallel. The hazard is
what every rank holds whole and uses in part, A of a column layer and B of a row layer on sharded rows: its
gradient is a part too, and is summed over the group here. Source: LoRA (arXiv 2106.09685) for the layer; the
cuts are this library's. peft is known by its attributes and never imported.
"""

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from stretto.overlap.dropout import PartDropout
from stretto.overlap.group_sums import with_summed_gradients
from stretto.overlap.modules import ColumnLinear, ParallelLinear, RowLinear, SharedInput
from stretto.overlap.p2p import peers_of
from stretto.overlap.rows import as_part_of, own_part

__all__ = ["parallelize_lora"]

_PREFIX = "base_model.model."
_WAY_OUT = "call stretto.overlap.parallelize_lora(model) after peft has changed a parallel model"


class _Adapter(ParallelLinear):
    """A or B of one adapter of a wrapped layer."""

    wrapper: tuple[nn.Module]
    """peft's layer, in a tuple so that it is no submodule."""
    adapter: str

    def joins(self) -> bool:
        """Whether peft is about to call this A with the base's very input."""
        wrapper: Any = self.wrapper[0]
        if wrapper.disable_adapters or wrapper.merged or self.adapter not in wrapper.active_adapters:
            return False
        if self.weight.dtype != wrapper.base_layer.weight.dtype and getattr(
            wrapper, "cast_input_dtype_enabled", True
        ):
            return False  # it is called with a copy
        dropout = wrapper.lora_dropout[self.adapter]
        return not (dropout.training and getattr(dropout, "p", 0.0) > 0)

    def _summed(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = super()._local()
        peers, whole = peers_of(self.mesh.get_group()), [weight] if bias is None else [weight, bias]
        weight, *biases = with_summed_gradients(peers, "adapter gradients", whole, check=self.options.check)
        return weight, biases[0] if biases else None


class _AdapterDropout(PartDropout):
    """An adapter's dropout on own rows or own features, whether announced or not."""

    def forward(self, input: Tensor) -> Tensor:
        """As `PartDropout`; where every rank has all rows, as `nn.Dropout`."""
        if not self.training or self.p == 0:
            return nn.Dropout.forward(self, input)
        if isinstance(input, DTensor) and tuple(input.placements) == (Replicate(),):
            whole = nn.Dropout.forward(self, input.to_local())
            return as_part_of(tuple(input.shape), whole, self.mesh, Replicate())
        return super().forward(own_part(input))


class _ColumnA(_Adapter, ColumnLinear):
    """(rank, in_features), whole on every rank, used for own output features alone."""

    placements: ClassVar[dict[str, Placement]] = {"weight": Replicate(), "bias": Replicate()}
    leads: ClassVar[bool] = False

    def _local(self) -> tuple[Tensor, Tensor | None]:
        return self._summed()


class _ColumnB(_Adapter):
    """(out_features, rank), the base's own output features; nothing is sent."""

    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(0), "bias": Shard(0)}

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, *self._local())


class _RowA(_Adapter, RowLinear):
    """(rank, in_features), the base's own input features."""

    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(1), "bias": Replicate()}
    leads: ClassVar[bool] = False


class _RowB(_Adapter):
    """(out_features, rank), whole on every rank, used on own rows alone; nothing is sent."""

    placements: ClassVar[dict[str, Placement]] = {"weight": Replicate(), "bias": Replicate()}

    def forward(self, input: Tensor) -> Tensor:
        own_rows = self.options.sequence_parallel
        return F.linear(input, *(self._summed() if own_rows else self._local()))


def parallelize_lora(module: nn.Module) -> nn.Module:
    """Make the LoRA adapters of parallel layers parallel, in place; those that are already stay as they are.

    `parallelize` does this for a model that peft has wrapped before. Call it where peft wraps a model that is
    parallel already, or adds an adapter to it. Every rank makes the call.

    Args:
        module: a model with peft's LoRA layers around `ColumnLinear` and `RowLinear`, or the `PeftModel`.
            Rank 0's adapters become everyone's.

    Returns:
        The same module. The adapters' names are peft's, their parameters DTensors: column layers have A
        replicated and B sharded by rows, row layers A sharded by columns and B replicated. Full tensors of a
        one-process adapter load, and its own, gathered, are that adapter.

    Gradients:
        Those of one process. A of column layers, and B of row layers on sharded rows, are summed over the
        group in float32 (float64 for float64) by one all-reduce each.

    Raises:
        ValueError: for DoRA and other variants, other tuners, merged adapters, and adapters that peft made for a
            rank's part of a layer, as it does where the mesh's axes have names; nothing was changed.

    Dropout in an adapter draws as one process would, if the ranks' generators are in step. Its A then has an
    input of its own, which costs a communication of its own.
    """
    wrapped = [(name, one) for name, one in module.named_modules() if isinstance(_base_of(one), ParallelLinear)]
    for name, wrapper in wrapped:
        check_lora(name, wrapper)
    for _, wrapper in wrapped:
        _adopt(wrapper)
    for parent in module.modules():
        if any(isinstance(child, ParallelLinear) for child in parent.children()):
            _watch(parent)
    return module


def plain_names(module: nn.Module) -> dict[str, str]:
    """The names that a model's modules have without peft, and those that they have; wrappers hide their insides."""
    by_peft = hasattr(module, "peft_config") and _base_of(module, "base_model") is not None
    prefix = _PREFIX if by_peft else ""
    found: dict[str, str] = {}
    inside: list[str] = []
    for name, one in module.named_modules():
        if f"{name}.".startswith(prefix) and not any(name.startswith(outer) for outer in inside):
            found[f"{name}.".removeprefix(prefix).removesuffix(".")] = name
            if _base_of(one) is not None:
                inside.append(f"{name}.")
    return found


def linear_in(name: str, module: nn.Module, style: str) -> nn.Module:
    """The linear layer that peft wrapped, where a style is for such; else the module itself.

    `ValueError` for adapters that cannot be parallel.
    """
    base = _base_of(module)
    if base is None or style not in ("column", "column whole", "row"):
        return module
    check_lora(name, module)
    return base


def name_of_linear(name: str, module: nn.Module, style: str) -> str:
    """The name of `linear_in`'s result, where the module has `name`."""
    return name if linear_in(name, module, style) is module else f"{name}.base_layer"


def plain_pattern(pattern: str) -> str:
    """A plan's pattern without peft's prefix."""
    return pattern.removeprefix(_PREFIX)


def _watch(parent: nn.Module) -> None:
    if _refuse_late_adapters not in parent._forward_pre_hooks.values():
        parent.register_forward_pre_hook(_refuse_late_adapters)


def _refuse_late_adapters(parent: nn.Module, _: Any) -> None:
    """Before a forward: `ValueError` if peft put adapters around parallel layers that nobody made parallel."""
    for name, one in [(type(parent).__name__, parent), *parent.named_children()]:
        if not isinstance(_base_of(one), ParallelLinear):
            continue
        for adapter, layer in getattr(one, "lora_A", {}).items():
            if not isinstance(layer, ParallelLinear):
                raise ValueError(f"adapter {adapter!r} of {name!r} is not parallel but its base layer is; {_WAY_OUT}")
        if not hasattr(one, "lora_A"):
            raise ValueError(f"{name!r} wraps a parallel layer in {type(one).__module__}, which only peft's LoRA can")


def check_lora(name: str, wrapper: Any) -> None:
    """`ValueError` unless this is peft's plain LoRA around a linear layer."""
    kind = f"{type(wrapper).__module__}.{type(wrapper).__name__}"
    if not all(hasattr(wrapper, one) for one in ("lora_A", "lora_B", "lora_dropout", "scaling", "active_adapters")):
        raise ValueError(f"{name!r} is a {kind}; of peft's tuners only LoRA can wrap a parallel layer")
    if wrapper.merged:
        raise ValueError(f"{name!r} has merged adapters; unmerge them first (model.unmerge_adapter())")
    variants = {**getattr(wrapper, "lora_variant", {}), **getattr(wrapper, "lora_magnitude_vector", {})}
    for adapter in wrapper.lora_A:
        if adapter in variants:
            raise ValueError(
                f"adapter {adapter!r} of {name!r} is {type(variants[adapter]).__name__}; "
                "DoRA and other variants cannot be parallel, plain LoRA can"
            )
    base = wrapper.base_layer
    for adapter, layer in wrapper.lora_B.items():
        if isinstance(base, ParallelLinear) and isinstance(layer, nn.Linear):
            sizes = (layer.out_features, wrapper.lora_A[adapter].in_features)
            if sizes != (base.out_features, base.in_features):
                raise ValueError(
                    f"adapter {adapter!r} of {name!r} is for {sizes[0]} x {sizes[1]} features, a rank's part of the "
                    f"layer, as peft makes it where a mesh's axes have names; add adapters before parallelize"
                )
    rows = getattr(base, "rows", None)
    if getattr(base, "used_columns", None) is not None or (rows is not None and rows.is_joined):
        check_dropout(name, wrapper)


def check_dropout(name: str, wrapper: Any) -> None:
    """`ValueError` if an adapter has dropout, in front of a layer whose input comes in several blocks."""
    for adapter, dropout in wrapper.lora_dropout.items():
        if getattr(dropout, "p", 0.0) > 0:
            raise ValueError(
                f"adapter {adapter!r} of {name!r} has lora_dropout={dropout.p}, which cannot be drawn for input "
                f"features or rows in several blocks; set lora_dropout=0"
            )


def _adopt(wrapper: Any) -> None:
    base = wrapper.base_layer
    column = isinstance(base, ColumnLinear)
    drops = any(getattr(dropout, "p", 0.0) > 0 for dropout in wrapper.lora_dropout.values())
    if column and base.weight.dtype.itemsize == 2 and not drops:
        wrapper.cast_input_dtype_enabled = False  # a float32 A takes the gather's 16-bit rows and casts them there
    if base.shared is None:
        base.shared = SharedInput([base])
    for adapter in wrapper.lora_A:
        if isinstance(wrapper.lora_A[adapter], ParallelLinear):
            continue
        for layer, cls in (
            (wrapper.lora_A[adapter], _ColumnA if column else _RowA),
            (wrapper.lora_B[adapter], _ColumnB if column else _RowB),
        ):
            cls.adopt(layer, base.mesh, base.options)
            layer.wrapper, layer.adapter, layer.rows = (wrapper,), adapter, base.rows
        dropout = wrapper.lora_dropout[adapter]
        if isinstance(dropout, nn.Dropout) and (base.options.sequence_parallel or not column):
            part = "rows" if column else "features"
            _AdapterDropout.adopt(dropout, base.mesh, part, uneven=base.options.uneven)
            dropout.rows = base.rows
        wrapper.lora_A[adapter].shared = base.shared
        if column:
            wrapper.lora_B[adapter].used_rows = base.used_rows
        else:
            wrapper.lora_A[adapter].used_columns = base.used_columns
        base.shared.layers.append(wrapper.lora_A[adapter])


def _base_of(module: nn.Module, name: str = "base_layer") -> nn.Module | None:
    return module._modules.get(name)
