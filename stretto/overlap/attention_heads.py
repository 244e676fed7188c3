"""An attention module whose heads are shared out: its head counts, and the whole shape that it reads.

Nothing in the module's code changes. Its column layers (queries, keys, values) give each rank whole heads,
the attributes from which it reads how many are set to the rank's own, and with sequence sharding its input,
a plain tensor of own rows, is announced with the shape of all rows. The hazard: a model that keeps a head
count, or positions of rows that lie side by side, under a name not listed here. Source: Megatron-LM's tensor
parallelism for the layout.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from stretto.overlap.heads import HeadCut, cut_heads
from stretto.overlap.inputs import outside_of_graphs
from stretto.overlap.modules import ColumnLinear, LinearOptions
from stretto.overlap.row_counts import Rows
from stretto.overlap.rows import announce, as_part_of
from stretto.overlap.shared_rows import SharedRows

__all__ = ["AttentionHeads", "read_heads"]

_COUNTS = {
    "heads": ("heads", "num_heads", "num_attention_heads", "n_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "kv_heads", "n_kv_heads"),
    "groups": ("num_key_value_groups", "num_kv_groups"),
}
_DROPOUT = ("attention_dropout", "attn_dropout", "dropout_p")
_POSITIONS = ("image_rotary_emb", "rotary_emb", "position_embeddings")
_INPUT = ("hidden_states", "x", "input", "query")


@dataclass(frozen=True)
class AttentionHeads:
    """How one attention module is cut."""

    name: str
    cut: HeadCut
    head_dim: int
    columns: tuple[str, ...]

    def apply(self, root: nn.Module, mesh: DeviceMesh, options: LinearOptions, inputs: Sequence[Rows] = ()) -> None:
        """Set head counts and shared heads; the layers are parallel already. `inputs`: whose rows it is given."""
        module, cut, rank = root.get_submodule(self.name), self.cut, mesh.get_local_rank()
        own = {"heads": cut.heads, "kv_heads": len(cut.kv_heads(rank)), "groups": cut.group}
        for kind, names in _COUNTS.items():
            for name in names:
                if isinstance(getattr(module, name, None), int):
                    setattr(module, name, own[kind])
        for column in self.columns:
            layer = root.get_submodule(column)
            assert isinstance(layer, ColumnLinear)
            if cut.shares and layer.out_features == cut.num_kv_heads * self.head_dim:
                layer.used_rows = SharedRows(cut, self.head_dim)
        if options.sequence_parallel and inputs:
            module.register_forward_pre_hook(_Knowing(mesh, inputs, module), with_kwargs=True)
        elif options.sequence_parallel:
            module.register_forward_pre_hook(_Announcing(mesh, options.uneven), with_kwargs=True)


def read_heads(name: str, module: nn.Module, columns: dict[str, nn.Linear], world_size: int) -> AttentionHeads:
    """How an attention module can be cut, or `ValueError`; `columns` are its column layers by name."""
    if not columns:
        raise ValueError(f"{name!r} is planned as 'attention', but no 'column' layer inside of it is")
    widths = sorted({layer.out_features for layer in columns.values()})
    head_dim = _head_dim(name, module, widths[-1])
    if len(widths) > 2 or any(width % head_dim for width in widths):
        raise ValueError(f"{name!r} has column layers of {widths} features; heads of {head_dim} do not fill them")
    for attribute in _DROPOUT:
        value = getattr(module, attribute, None)
        if isinstance(value, float) and value > 0:
            raise ValueError(
                f"{name!r} has {attribute}={value}: each rank would draw its own heads' mask, not the one-process "
                f"model's; set {attribute} to 0"
            )
    try:
        cut = cut_heads(widths[-1] // head_dim, world_size, widths[0] // head_dim)
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None
    whole = {"heads": cut.num_heads, "kv_heads": cut.num_kv_heads, "groups": cut.num_heads // cut.num_kv_heads}
    for kind, attributes in _COUNTS.items():
        for attribute in attributes:
            count = getattr(module, attribute, whole[kind])
            if isinstance(count, int) and count != whole[kind]:
                raise ValueError(f"{name!r} has {attribute}={count}, but its column layers make {whole[kind]}")
    return AttentionHeads(name, cut, head_dim, tuple(columns))


def _head_dim(name: str, module: nn.Module, num_features: int) -> int:
    head_dim = getattr(module, "head_dim", None)
    if isinstance(head_dim, int):
        return head_dim
    for attribute in _COUNTS["heads"]:
        heads = getattr(module, attribute, None)
        if isinstance(heads, int) and heads > 0:
            return max(1, num_features // heads)
    known = ", ".join(_COUNTS["heads"])
    raise ValueError(f"{name!r} tells neither its head_dim nor how many heads it has ({known}); set one of them")


class _Announcing:
    """Before an attention's forward: its input's shape becomes that of all rows."""

    def __init__(self, mesh: DeviceMesh, uneven: bool) -> None:
        self.mesh, self.uneven = mesh, uneven

    @outside_of_graphs
    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        key = next((name for name in _INPUT if isinstance(kwargs.get(name), Tensor)), None)
        if args and isinstance(args[0], Tensor):
            x = announce(args[0], self.mesh, uneven=self.uneven)
            args = (x, *args[1:])
        elif key is not None:
            x = announce(kwargs[key], self.mesh, uneven=self.uneven)
            kwargs = {**kwargs, key: x}
        else:
            return args, kwargs
        _check_positions(x.shape[-2], kwargs)
        return args, kwargs


class _Knowing:
    """Before an attention's forward: its first inputs' shapes become those of all rows, where these are known.

    Rows of several sequences, side by side, stay plain, so that a layer beside the attention may share its
    gather; positions of all rows are put in the order of gathered ones.
    """

    def __init__(self, mesh: DeviceMesh, inputs: Sequence[Rows], module: nn.Module) -> None:
        self.mesh, self.inputs = mesh, tuple(inputs)
        self.names = tuple(inspect.signature(module.forward).parameters)

    @outside_of_graphs
    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = {**dict(zip(self.names, args)), **kwargs}
        for name, rows in zip(self.names, self.inputs):
            x = given.get(name)
            if rows.is_joined:
                self._reorder(given, rows)
            elif isinstance(x, Tensor):
                shape = (*x.shape[:-2], rows.total, x.shape[-1])
                given[name] = as_part_of(shape, x, self.mesh, Shard(x.ndim - 2))
        return tuple(given[name] for name in self.names[: len(args)]), {name: given[name] for name in kwargs}

    def _reorder(self, given: dict[str, Any], rows: Rows) -> None:
        if isinstance(given.get("attention_mask"), Tensor):
            raise ValueError("an attention_mask cannot be put in the order of rows of several sequences; give none")
        for name in _POSITIONS:
            if isinstance(given.get(name), Tensor):
                given[name] = self._in_gathered_order(given[name], rows)
            elif isinstance(given.get(name), tuple):
                given[name] = tuple(self._in_gathered_order(one, rows) for one in given[name])

    def _in_gathered_order(self, positions: Tensor, rows: Rows) -> Tensor:
        if rows.total not in positions.shape:
            raise ValueError(f"positions of shape {tuple(positions.shape)} are not of all {rows.total} rows")
        order = rows.gathered_order(self.mesh.size(), positions.device)
        return positions.index_select(positions.shape.index(rows.total), order)


def _check_positions(rows: int, kwargs: dict[str, Any]) -> None:
    """A decoder's rotary positions and mask must be of all rows: one row would be broadcast, silently."""
    positions = kwargs.get("position_embeddings")
    if not isinstance(positions, tuple) or not isinstance(positions[0], Tensor):
        return
    given, mask = positions[0].shape[-2], kwargs.get("attention_mask")
    if given != rows:
        raise ValueError(
            f"position_embeddings are of {given} rows, but the ranks have {rows} together; give the model the whole "
            f"input_ids, or position_ids of all rows"
        )
    if isinstance(mask, Tensor) and mask.ndim == 4 and (mask.shape[-1] < rows or mask.shape[-2] not in (1, rows)):
        raise ValueError(f"attention_mask of shape {tuple(mask.shape)} is not of all {rows} rows")
