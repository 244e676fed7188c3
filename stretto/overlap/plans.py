"""Plans: which modules of a model become parallel and how, as plain data.

`parallelize` takes name patterns and works in place. The hazard: what a plan does not name stays as it is, on every
rank whole. Source: the plans of PyTorch's tensor parallelism, and torchtitan's.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from stretto.overlap.attention_heads import AttentionHeads, read_heads
from stretto.overlap.dropout import PartDropout
from stretto.overlap.follower import Follower
from stretto.overlap.lora import parallelize_lora
from stretto.overlap.modules import ColumnLinear, LinearOptions, RowLinear, SharedInput, mesh_of
from stretto.overlap.norms import FeaturesRMSNorm
from stretto.overlap.own_rows import JoinedOutput, SplitInput, SummedOutput
from stretto.overlap.packed import PackedColumns
from stretto.overlap.patterns import Match, match_plan
from stretto.overlap.plan_checks import OWN, SPLITS, check_plan
from stretto.overlap.replicated import replicate_parameters
from stretto.overlap.row_counts import RowCount, Rows
from stretto.overlap.rows import AnnouncedOutput, OwnRowsInput
from stretto.overlap.sharding import Sharded
from stretto.overlap.vocab import VocabEmbedding, VocabLinear

__all__ = ["parallelize"]

_STYLES: dict[str, type | tuple[type, ...]] = {
    "column": nn.Linear,
    "column whole": nn.Linear,
    "row": nn.Linear,
    "attention": nn.Module,
    "sequence": nn.Module,
    "sequence announced": nn.Module,
    "sequence own": nn.Module,
    "sequence split": nn.Module,
    "sequence joined": nn.Module,
    "modulation": nn.Module,
    "heads": nn.Module,
    "rms_norm": nn.RMSNorm,
    "vocab": (nn.Embedding, nn.Linear),
    "vocab whole": nn.Linear,
    "replicate": nn.Module,
    "replicate own": nn.Module,
    "rows": nn.Module,
    "rows split": nn.Module,
    "dropout rows": nn.Dropout,
    "dropout features": nn.Dropout,
}
_COLUMNS = ("column", "column whole")
_SUMMED = ("sequence", "sequence announced", "sequence own", "sequence split", "sequence joined", "heads")
_WHOLE = (*_SUMMED, "modulation", "replicate", "replicate own")


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
        "column whole"      with sequence sharding: column layers whose input has all rows, the same on every rank.
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
        "sequence own"      as "sequence", of the module's own parameters, not of those inside of it.
        "sequence split"    as "sequence"; the module is given all rows, the same on every rank, and works on its own.
        "sequence joined"   as "sequence"; its output, own rows, becomes all rows, on every rank.
        "modulation"        parameters used whole, whose output is used on own rows, as the shift, scale and gate of a
                            norm are: replicated; the gradient of the output is summed over the ranks, and so
                            that of the parameters, and of whatever comes before, is complete.
        "modulation 0+1"    as well, where only these of its outputs are used on own rows.
        "heads"             parameters used on own heads (norms of queries): replicated, gradients summed.
        "replicate"         parameters whose gradients are the same on every rank: replicated DTensors, so
                            that a gradient norm over all parameters is exact.
        "replicate own"     as well, of the module's own parameters, not of those inside of it.
        "rms_norm"          `nn.RMSNorm` over all heads' features behind a column layer: cut as they are, one
                            number a row is summed over the ranks.
        "rows"              a module that takes announced rows as the plain rows they are.
        "rows split"        a module that is given all rows, and takes its own; beside other styles.
        "dropout rows", "dropout features"  `nn.Dropout` on own rows, or on own features behind a column
                            layer: drawn as the one-process model does.

    Where a plan splits a sequence ("sequence split", "rows split"), every rank's rows are known without asking,
    and may be uneven. With several sequences, each has a name, and layers say after `@` whose rows they see:
    "column @ image"; "attention @ image, text" of two inputs in their order; "row @ text+image" where a rank has
    rows of both side by side. Gathered, those lie in the order of ranks: positions that "attention" is given
    as `image_rotary_emb`, `rotary_emb` or `position_embeddings` are put in that order.

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
    check_plan(module, matches, options)
    mesh = mesh_of(group, next(module.parameters()).device)
    attentions = [(match, _heads(module, match.names[0], matches, mesh)) for match in matches if _attends(match)]
    counts = {
        name: RowCount(name) for match in matches if match.style in SPLITS for (name,) in match.rows or (("",),)
    }
    sharded: Sharded = {}
    for match in matches:
        _apply(module, match, mesh, options, sharded, _rows_of(match, counts))
    for match, attention in attentions:
        attention.apply(module, mesh, options, _rows_of(match, counts))
    return parallelize_lora(module)


def _attends(match: Match) -> bool:
    return match.style == "attention"


def _rows_of(match: Match, counts: Mapping[str, RowCount]) -> list[Rows]:
    """The rows of each input, as far as the plan splits them."""
    named = match.rows or ((("",),) if "" in counts else ())
    return [Rows(tuple(counts[name] for name in names)) for names in named]


def _block_sizes(blocks: tuple[int, ...], num_features: int) -> tuple[int, ...]:
    return tuple(num_features // sum(blocks) * block for block in blocks)


def _heads(module: nn.Module, name: str, matches: list[Match], mesh: DeviceMesh) -> AttentionHeads:
    inside = [one for match in matches if match.style in _COLUMNS for one in match.names]
    columns = {one: module.get_submodule(one) for one in inside if one.startswith(f"{name}." if name else "")}
    linears = {one: layer for one, layer in columns.items() if isinstance(layer, nn.Linear)}
    return read_heads(name, module.get_submodule(name), linears, mesh.size())


def _apply(
    module: nn.Module,
    match: Match,
    mesh: DeviceMesh,
    options: LinearOptions,
    sharded: Sharded,
    rows: list[Rows],
) -> None:
    layers = [module.get_submodule(name) for name in match.names]
    layer, style = layers[0], match.style
    if style in _COLUMNS:
        whole = replace(options, sequence_parallel=False)
        for one in layers:
            assert isinstance(one, nn.Linear)
            ColumnLinear.adopt(one, mesh, options if style == "column" else whole, sharded)
            assert isinstance(one, ColumnLinear)
            one.rows = rows[0] if rows and style == "column" else None
        if len(layers) > 1:
            shared = SharedInput([one for one in layers if isinstance(one, ColumnLinear)])
            for one in shared.layers:
                one.shared = shared
    elif style == "row":
        assert isinstance(layer, nn.Linear)
        RowLinear.adopt(layer, mesh, options, sharded)
        assert isinstance(layer, RowLinear)
        layer.rows = rows[0] if rows else None
        if match.numbers:
            layer.used_columns = PackedColumns(_block_sizes(match.numbers, layer.in_features), mesh.size())
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
        summed, recurse = style in _SUMMED, style not in OWN
        replicate_parameters(layer, mesh, sharded, summed=summed, recurse=recurse, check=options.check)
        if style == "sequence announced":
            layer.register_forward_hook(AnnouncedOutput(mesh, options.uneven))
        elif style == "sequence joined":
            layer.register_forward_hook(JoinedOutput(rows[0], mesh, options.check))
        elif style == "modulation":
            layer.register_forward_hook(SummedOutput(mesh, options.check, match.numbers))
    elif style == "rms_norm":
        assert isinstance(layer, nn.RMSNorm)
        FeaturesRMSNorm.adopt(layer, mesh, sharded, check=options.check)
    if style in SPLITS:
        layer.register_forward_pre_hook(SplitInput(rows[0].parts[0], mesh, options.check), with_kwargs=True)
    elif style == "rows":
        layer.register_forward_pre_hook(OwnRowsInput(), with_kwargs=True)
    elif style in ("dropout rows", "dropout features"):
        assert isinstance(layer, nn.Dropout)
        PartDropout.adopt(layer, mesh, style.split()[1], uneven=options.uneven)
