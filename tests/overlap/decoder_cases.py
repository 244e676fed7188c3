"""What every rank does in the tests of decoders: transformers' own classes, parallel by a shipped plan.

The whole model runs in one process beside it: logits, loss and every gradient must be equal.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.overlap import (
    LLAMA,
    LLAMA_TP,
    QWEN2,
    QWEN2_TP,
    QWEN3,
    QWEN3_TP,
    LinearOptions,
    parallelize,
    vocab_cross_entropy,
)
from tests.overlap.matmul_cases import same

PLANS = {
    "llama": (LLAMA, LLAMA_TP),
    "qwen2": (QWEN2, QWEN2_TP),
    "qwen3": (QWEN3, QWEN3_TP),
}
VOCABULARY = 23


def tiny(family: str, **settings: Any) -> nn.Module:
    """A float64 decoder of two layers with random weights, the same on every rank."""
    import transformers

    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    config = getattr(transformers, f"{name}Config")(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 8,
            "intermediate_size": 11,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 2,
            "max_position_embeddings": 32,
            "attn_implementation": "sdpa",
            "initializer_range": 0.4,
            "pad_token_id": 3,
            **settings,
        }
    )
    torch.manual_seed(5)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def parallel(model: nn.Module, family: str, sequence: bool, **options: Any) -> nn.Module:
    plan = PLANS[family][0 if sequence else 1]
    return parallelize(model, plan, dist.group.WORLD, LinearOptions(sequence_parallel=sequence, **options))


def tokens(rows: int, batch: int = 2) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, rows), generator=torch.Generator().manual_seed(rows))


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(mine: nn.Module, whole: nn.Module) -> None:
    theirs = dict(whole.named_parameters())
    assert set(theirs) == {name for name, _ in mine.named_parameters()}
    for name, parameter in mine.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert isinstance(parameter.grad, DTensor), name
        same(name, full(parameter.grad), theirs[name].grad)


def trained(case: dict[str, Any]) -> None:
    """Logits, loss and every gradient; then, again with other rows, what accumulates."""
    family, settings = case["family"], case["settings"]
    whole, mine = tiny(family, **settings), tiny(family, **settings)
    parallel(mine, family, case["sequence"], uneven=True, **case["options"])
    if case["checkpointed"]:
        mine.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        mine.train()
    for rows in case["rows"]:
        ids = tokens(rows)
        targets = tokens(rows + 1)[:, 1:].clone()
        targets[0, 0] = -100
        logits = whole(ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        own = mine(ids, use_cache=False).logits
        same("logits", own.full_tensor(), logits)
        my_loss = vocab_cross_entropy(own, targets, dist.group.WORLD)
        same("loss", my_loss, loss)
        my_loss.backward()
        compare(mine, whole)
