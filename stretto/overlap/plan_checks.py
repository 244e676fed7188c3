"""What a plan must not ask for: looked over before anything of a model is changed.

The hazard: a rule that is missing here is a model changed by half. Source: the styles of `plans.py`.
"""

from torch import nn
from torch.distributed.tensor import DTensor

from stretto.overlap.lora import check_dropout
from stretto.overlap.modules import LinearOptions
from stretto.overlap.patterns import Match

__all__ = ["check_plan"]

SEQUENCE_ONLY = (
    *("sequence", "sequence announced", "sequence own", "sequence split", "sequence joined"),
    *("modulation", "column whole", "rows", "rows split", "dropout rows"),
)
SPLITS = ("sequence split", "rows split")
OF_ROWS = (*SPLITS, "sequence joined", "column", "row", "attention")
OWN = ("replicate own", "sequence own")


def check_plan(module: nn.Module, matches: list[Match], options: LinearOptions) -> None:
    """`ValueError` for what cannot be done."""
    _check_styles(matches, options)
    _check_rows(matches)
    _check_parameters(module, matches)
    _check_embeddings(module, matches)
    _check_blocks(module, matches)


def _check_styles(matches: list[Match], options: LinearOptions) -> None:
    for match in matches:
        if not options.sequence_parallel and match.style in SEQUENCE_ONLY:
            raise ValueError(
                f"{match.pattern!r} asks for {match.style!r}, which is for sharded rows; "
                f"with sequence_parallel=False rows are whole, as in LLAMA_TP, QWEN2_TP and QWEN3_TP"
            )
        if options.sequence_parallel and match.follower:
            raise ValueError(
                f"{match.pattern!r} names the follower {match.follower!r}, but a row layer leaves nothing in flight "
                f"with sequence_parallel=True"
            )


def _check_rows(matches: list[Match]) -> None:
    """Whose rows a module sees is said where it matters, of sequences that somebody splits, each once."""
    splits: dict[str, str] = {}
    for match in matches:
        if match.rows and match.style not in OF_ROWS:
            raise ValueError(f"{match.pattern!r} asks for {match.style!r}, which has no rows to name with @")
        if match.style != "attention" and len(match.rows) > 1:
            raise ValueError(f"{match.pattern!r} names rows of several inputs with a comma, as only 'attention' has")
        if match.style in SPLITS:
            parts = match.rows[0] if match.rows else ("",)
            if len(parts) > 1 or parts[0] in splits:
                other = splits.get(parts[0], "nobody")
                raise ValueError(
                    f"{match.pattern!r} splits {'+'.join(parts)!r}; one sequence is split once ({other!r})"
                )
            splits[parts[0]] = match.pattern
    for match in matches:
        unknown = [name for one in match.rows for name in one if name not in splits]
        if unknown:
            known = ", ".join(map(repr, splits)) or "none"
            raise ValueError(
                f"{match.pattern!r} is of rows {unknown[0]!r}, which no pattern splits; known are {known}"
            )
        if match.style == "sequence joined" and not match.rows and "" not in splits:
            raise ValueError(f"{match.pattern!r} joins rows that no pattern splits; name some that are, with @")


def _check_parameters(module: nn.Module, matches: list[Match]) -> None:
    """A parameter belongs to one style, and so do all modules that share it."""
    planned: dict[str, str] = {}
    for match in matches:
        for name in match.names if match.style not in ("attention", "rows", "rows split") else ():
            prefix = f"{name}." if name else ""
            recurse = match.style not in OWN
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
        blocks = match.numbers if match.style == "row" else ()
        joined = any(len(one) > 1 for one in match.rows)
        if (blocks or joined) and inside == "base_layer":
            check_dropout(wrapper, module.get_submodule(wrapper))
        if blocks and isinstance(layer, nn.Linear) and layer.in_features % sum(blocks):
            raise ValueError(
                f"{match.names[0]!r} has {layer.in_features} input features, which are not in the proportion "
                f"{'+'.join(map(str, blocks))}"
            )


def _placed(style: str) -> str:
    return {"vocab whole": "vocab", "column": "vocab", "column whole": "vocab"}.get(style, style)
