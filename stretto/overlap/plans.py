"""Plans: which modules of a model become parallel and how, as plain data or beside PyTorch's own styles.

`parallelize` takes name patterns; `OverlapColwise` and `OverlapRowwise` go into
`torch.distributed.tensor.parallel.parallelize_module`. Both work in place. The hazard: what a plan does not
name stays as it is, on every rank whole. Source: the plans of PyTorch's tensor parallelism, and torchtitan's.
"""

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel.style import ParallelStyle

from stretto.overlap.attention_heads import AttentionHeads, read_heads
from stretto.overlap.dropout import PartDropout
from stretto.overlap.follower import Follower
from stretto.overlap.lora import check_dropout, parallelize_lora
from stretto.overlap.modules import ColumnLinear, LinearOptions, RowLinear, SharedInput, mesh_of
from stretto.overlap.norms import FeaturesRMSNorm
from stretto.overlap.packed import PackedColumns
from stretto.overlap.patterns import Match, match_plan
from stretto.overlap.replicated import replicate_parameters
from stretto.overlap.rows import AnnouncedOutput, OwnRowsInput
from stretto.overlap.sharding import Sharded
from stretto.overlap.vocab import VocabEmbedding, VocabLinear

__all__ = ["OverlapColwise", "OverlapRowwise", "parallelize"]

_STYLES: dict[str, type | tuple[type, ...]] = {
    "column": nn.Linear,
    "row": nn.Linear,
    "attention": nn.Module,
    "sequence": nn.Module,
    "sequence announced": nn.Module,
    "heads": nn.Module,
    "rms_norm": nn.RMSNorm,
    "vocab": (nn.Embedding, nn.Linear),
    "vocab whole": nn.Linear,
    "replicate": nn.Module,
    "replicate own": nn.Module,
    "rows": nn.Module,
    "dropout rows": nn.Dropout,
    "dropout features": nn.Dropout,
}
_WHOLE = ("sequence", "sequence announced", "heads", "replicate", "replicate own")
_SAME = ("replicate", "replicate own")
_SEQUENCE_ONLY = ("sequence", "sequence announced", "rows", "dropout rows")


def parallelize(
    module: nn.Module,
    plan: Mapping[str, str],
    group: dist.ProcessGroup | DeviceMesh,
    options: LinearOptions | None = None,
) -> nn.Module:
    """Make the layers of a model parallel, in place.

    A plan maps name patterns, each part of which may hold `*`, to what becomes of the modules they match:

        "column", "row"     `nn.Linear`, cut by output or by input features. Names joined by `+` in the last
                            part ("layers.*.attn.q+k+v") are column layers with one input, which share one
                            gather; so may names further down ("*.mlp_in+attn.q+attn.k").
        "row 1+4"           a row layer whose input features come in blocks of these proportions, each from a
                            column layer, side by side. Up to the own share of its weight moves at each
                            forward, and again at each backward if it is trained.
        "row > NAME"        without sequence sharding: the layer's last half hides behind the forward of the
                            module NAME, which must not read the layer's output; the output is complete when
                            NAME returns, and must not be read before. `*` in NAME stands for the same as in
                            the pattern.
        "attention"         a module that owns column layers (queries, keys, values): each rank has whole
                            heads, and its head counts are set accordingly. With fewer key-value heads than
                            ranks, ranks share them. With sequence sharding its input, own rows, is announced
                            with the shape of all rows.
        "vocab"             `nn.Embedding`, cut by vocabulary: takes all tokens, the same on every rank, and gives
                            own rows, announced. `nn.Linear`: a column layer whose logits are a DTensor that
                            has the own vocabulary, for `vocab_cross_entropy`. Both may share one weight.
        "vocab whole"       `nn.Linear`: as well, with logits gathered, whole on every rank.
        "sequence"          parameters used on own rows (norms): replicated, gradients summed over the group.
        "sequence announced" as well, and its output is announced with the shape of all rows.
        "heads"             parameters used on own heads (norms of queries): replicated, gradients summed.
        "replicate"         parameters whose gradients are the same on every rank: replicated DTensors, so
                            that a gradient norm over all parameters is exact.
        "replicate own"     as well, of the module's own parameters, not of those inside of it.
        "rms_norm"          `nn.RMSNorm` over all heads' features behind a column layer: cut as they are, one
                            number a row is summed over the ranks.
        "rows"              a module that takes announced rows as the plain rows they are.
        "dropout rows", "dropout features"  `nn.Dropout` on own rows, or on own features behind a column
                            layer: drawn as the one-process model does.

    Args:
        module: the model; rank 0's values become everyone's. Linear layers may be wrapped by peft's LoRA
            already (`parallelize_lora` is for those that are wrapped later).
        plan: as above, with the model's own names (peft's "base_model.model." before them or not).
        group: the ranks, or a one-dimensional mesh of them.
        options: how to communicate.

    Returns:
        The same module. Its state dict has the names of the plain model's and loads full tensors too.

    Raises:
        ValueError: for a pattern that matches nothing (near matches are named), a module that is matched
            twice or is none that the style is for, heads that the ranks do not divide, a parameter that is
            shared with a module of another style; nothing was changed.
    """
    options = options or LinearOptions()
    matches = match_plan(module, plan, _STYLES)
    _check_styles(matches, options)
    _check_parameters(module, matches)
    _check_embeddings(module, matches)
    _check_blocks(module, matches)
    mesh = mesh_of(group, next(module.parameters()).device)
    attentions = [_heads(module, match.names[0], matches, mesh) for match in matches if match.style == "attention"]
    sharded: Sharded = {}
    for match in matches:
        _apply(module, match, mesh, options, sharded)
    for attention in attentions:
        attention.apply(module, mesh, options)
    return parallelize_lora(module)


def _check_styles(matches: list[Match], options: LinearOptions) -> None:
    for match in matches:
        if not options.sequence_parallel and match.style in _SEQUENCE_ONLY:
            raise ValueError(
                f"{match.pattern!r} asks for {match.style!r}, which is for sharded rows; "
                f"with sequence_parallel=False rows are whole"
            )
        if options.sequence_parallel and match.follower:
            raise ValueError(
                f"{match.pattern!r} names the follower {match.follower!r}, but a row layer leaves nothing in flight "
                f"with sequence_parallel=True"
            )


def _check_parameters(module: nn.Module, matches: list[Match]) -> None:
    """A parameter belongs to one style, and so do all modules that share it."""
    planned: dict[str, str] = {}
    for match in matches:
        for name in match.names if match.style not in ("attention", "rows") else ():
            prefix = f"{name}." if name else ""
            recurse = match.style != "replicate own"
            inside = module.get_submodule(name).named_parameters(recurse=recurse, remove_duplicate=False)
            for inner, parameter in inside:
                if isinstance(parameter, DTensor):
                    raise ValueError(f"{prefix + inner!r} is a DTensor; parallelize a model once, and before FSDP")
                before = planned.setdefault(prefix + inner, match.style)
                if before != match.style:
                    raise ValueError(f"{prefix + inner!r} belongs to a {before!r} and to a {match.style!r} module")
    by_parameter: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = by_parameter.setdefault(parameter, name)
        one, other = (_placed(planned.get(where, "")) for where in (first, name))
        if one != other:
            raise ValueError(f"{first!r} and {name!r} are one parameter; they need styles that cut it alike")


def _check_embeddings(module: nn.Module, matches: list[Match]) -> None:
    for match in matches:
        layer = module.get_submodule(match.names[0])
        if match.style == "vocab" and isinstance(layer, nn.Embedding):
            for setting in ("max_norm", "scale_grad_by_freq", "sparse"):
                if getattr(layer, setting):
                    raise ValueError(
                        f"{match.names[0]!r} has {setting}={getattr(layer, setting)}; 'vocab' cannot do it"
                    )


def _check_blocks(module: nn.Module, matches: list[Match]) -> None:
    for match in matches:
        layer = module.get_submodule(match.names[0])
        wrapper, _, inside = match.names[0].rpartition(".")
        if match.blocks and inside == "base_layer":
            check_dropout(wrapper, module.get_submodule(wrapper))
        if match.blocks and isinstance(layer, nn.Linear) and layer.in_features % sum(match.blocks):
            raise ValueError(
                f"{match.names[0]!r} has {layer.in_features} input features, which are not in the proportion "
                f"{'+'.join(map(str, match.blocks))}"
            )


def _block_sizes(blocks: tuple[int, ...], num_features: int) -> tuple[int, ...]:
    return tuple(num_features // sum(blocks) * block for block in blocks)


def _placed(style: str) -> str:
    return {"vocab whole": "vocab", "column": "vocab"}.get(style, style)


def _heads(module: nn.Module, name: str, matches: list[Match], mesh: DeviceMesh) -> AttentionHeads:
    inside = [one for match in matches if match.style == "column" for one in match.names]
    columns = {one: module.get_submodule(one) for one in inside if one.startswith(f"{name}." if name else "")}
    linears = {one: layer for one, layer in columns.items() if isinstance(layer, nn.Linear)}
    return read_heads(name, module.get_submodule(name), linears, mesh.size())


def _apply(module: nn.Module, match: Match, mesh: DeviceMesh, options: LinearOptions, sharded: Sharded) -> None:
    layers = [module.get_submodule(name) for name in match.names]
    layer, style = layers[0], match.style
    if style == "column":
        for one in layers:
            assert isinstance(one, nn.Linear)
            ColumnLinear.adopt(one, mesh, options, sharded)
        if len(layers) > 1:
            shared = SharedInput([one for one in layers if isinstance(one, ColumnLinear)])
            for one in shared.layers:
                one.shared = shared
    elif style == "row":
        assert isinstance(layer, nn.Linear)
        RowLinear.adopt(layer, mesh, options, sharded)
        assert isinstance(layer, RowLinear)
        if match.blocks:
            layer.used_columns = PackedColumns(_block_sizes(match.blocks, layer.in_features), mesh.size())
        if match.follower:
            layer.follower = Follower(module.get_submodule(match.follower))
    elif style in ("vocab", "vocab whole"):
        if isinstance(layer, nn.Embedding):
            VocabEmbedding.adopt(layer, mesh, options, sharded)
        elif isinstance(layer, nn.Linear):
            VocabLinear.adopt(layer, mesh, options, sharded)
            assert isinstance(layer, VocabLinear)
            layer.gathered = style == "vocab whole"
    elif style in _WHOLE:
        replicate_parameters(layer, mesh, sharded, summed=style not in _SAME, recurse=style != "replicate own")
        if style == "sequence announced":
            layer.register_forward_hook(AnnouncedOutput(mesh, options.uneven))
    elif style == "rms_norm":
        assert isinstance(layer, nn.RMSNorm)
        FeaturesRMSNorm.adopt(layer, mesh, sharded)
    elif style == "rows":
        layer.register_forward_pre_hook(OwnRowsInput(), with_kwargs=True)
    elif style in ("dropout rows", "dropout features"):
        assert isinstance(layer, nn.Dropout)
        PartDropout.adopt(layer, mesh, style.split()[1], uneven=options.uneven)


class OverlapColwise(ParallelStyle):
    """`ColwiseParallel` with sequence-sharded input, hidden: `ColumnLinear` in `parallelize_module`.

    Takes rows sharded over the mesh, as a tensor or a DTensor, and gives own features of all rows, as a
    tensor.
    """

    def __init__(self, options: LinearOptions | None = None) -> None:
        super().__init__()
        self.options = options or LinearOptions()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ColumnLinear.adopt(_linear(module), device_mesh, self.options)
        return module


class OverlapRowwise(ParallelStyle):
    """`RowwiseParallel` with sequence-sharded output, hidden: `RowLinear` in `parallelize_module`.

    Takes own features of all rows, as a tensor, and gives own rows, as a tensor.
    """

    def __init__(self, options: LinearOptions | None = None) -> None:
        super().__init__()
        self.options = options or LinearOptions()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        RowLinear.adopt(_linear(module), device_mesh, self.options)
        return module


def _linear(module: nn.Module) -> nn.Linear:
    if type(module) is not nn.Linear:
        raise ValueError(f"this style is for nn.Linear, not {type(module).__name__}")
    return module
