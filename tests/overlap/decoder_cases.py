"""What every rank does in the tests of decoders: transformers' own classes, parallel by a shipped plan.

The whole model runs in one process beside it: logits, loss and every gradient must be equal.
"""

import warnings
from typing import Any
from unittest import mock

import pytest
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
    causal_lm_loss,
    parallelize,
    report,
    tuning,
    vocab_cross_entropy,
)
from stretto.overlap.p2p import Call
from tests.overlap.matmul_cases import same
from tests.overlap.module_cases import own_rows

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
    for module in model.modules():
        for name in ("q_norm", "k_norm"):
            if hasattr(module, name):
                setattr(module, name, in_float64(getattr(module, name)))
    return model


def in_float64(norm: nn.Module) -> nn.Module:
    """The same norm by torch: transformers' rounds to float32 inside, and so each rank's part of a gradient."""
    exact = nn.RMSNorm(norm.weight.shape, norm.variance_epsilon)
    exact.weight = norm.weight
    return exact


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
    parallel(mine, family, case["sequence"], **{"uneven": True, **case["options"]})
    if case["checkpointed"]:
        mine.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        mine.train()
    for rows in case["rows"]:
        ids = tokens(rows)
        targets = tokens(rows + 1)[:, 1:].clone()
        targets[0, 0] = -100
        keep = case.get("keep", 0)
        targets = targets[:, -keep:]
        logits = whole(ids, use_cache=False, logits_to_keep=keep).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        own = mine(ids, use_cache=False, logits_to_keep=keep).logits
        same("logits", own.full_tensor(), logits)
        my_loss = vocab_cross_entropy(own, targets, dist.group.WORLD)
        same("loss", my_loss, loss)
        my_loss.backward()
        compare(mine, whole)


def clipped(family: str, sequence: bool) -> None:
    """The norm of all gradients, sharded and replicated, and what clipping and a step leave of them."""
    whole, mine = tiny(family), tiny(family)
    parallel(mine, family, sequence, uneven=True)
    ids = tokens(5)
    for model in (whole, mine):
        logits = model(ids, use_cache=False).logits
        full(logits).square().sum().backward()
    theirs = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    ours = nn.utils.clip_grad_norm_(mine.parameters(), 0.5)
    same("norm", full(ours), theirs)
    compare(mine, whole)
    for model in (whole, mine):
        torch.optim.AdamW(model.parameters(), lr=0.1).step()
    for (name, one), other in zip(mine.named_parameters(), whole.parameters()):
        same(name, full(one.detach()), other.detach(), 1e-9)


def checkpoints(family: str, tied: bool) -> None:
    """A model on the meta device is made parallel, then filled from a plain checkpoint, and gives it back."""
    whole = tiny(family, tie_word_embeddings=tied)
    with torch.device("meta"):
        mine = tiny(family, tie_word_embeddings=tied)
    parallel(mine, family, True, uneven=True)
    mine.to_empty(device="cpu")
    mine.model.rotary_emb = type(mine.model.rotary_emb)(mine.config)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(2)
    mine.load_state_dict(whole.state_dict())
    assert (mine.lm_head.weight is mine.model.embed_tokens.weight) == tied
    ids = tokens(7)
    same("logits", full(mine(ids, use_cache=False).logits), whole(ids, use_cache=False).logits)
    assert list(mine.state_dict()) == list(whole.state_dict())
    for name, value in mine.state_dict().items():
        assert torch.equal(full(value), whole.state_dict()[name]), name


def decoded(family: str, sequence: bool) -> None:
    """Prefill, then one row at a time with a cache, padded on the left: logits as in one process; and generate."""
    whole, mine = tiny(family).eval(), tiny(family).eval()
    parallel(mine, family, sequence, uneven=True)
    ids = tokens(6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    with torch.no_grad():
        caches: list[Any] = [None, None]
        for start, end in ((0, 3), (3, 4), (4, 5), (5, 6)):
            outputs = [
                model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
                for model, cache in zip((whole, mine), caches)
            ]
            caches = [output.past_key_values for output in outputs]
            same(f"logits of {start}:{end}", full(outputs[1].logits)[1], outputs[0].logits[1])
            if start >= 2:
                same(f"padded logits of {start}:{end}", full(outputs[1].logits), outputs[0].logits)
        for keep in (1, 2):
            kept = [full(model(ids, logits_to_keep=keep).logits) for model in (whole, mine)]
            assert kept[0].shape[1] == keep
            same(f"last {keep}", kept[1], kept[0])
    for_generation = tiny(family).eval()
    plan = {**PLANS[family][0 if sequence else 1], "lm_head": "vocab whole"}
    parallelize(for_generation, plan, dist.group.WORLD, LinearOptions(sequence_parallel=sequence, uneven=True))
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(for_generation.generate(ids, **options), whole.generate(ids, **options))


def left_plain(num_rows: int) -> list[tuple[str, str, int]]:
    """Decoding some rows at a time where trials of overlap take twice as long: what calls of linear layers did.

    One row is tried not at all.
    """
    whole, mine = tiny("llama").eval(), tiny("llama").eval()
    group = dist.new_group()
    parallelize(mine, {**LLAMA, "lm_head": "vocab whole"}, group, LinearOptions(uneven=True))
    ids, caches = tokens(2 * num_rows), [None, None]

    def timed(call: Call, run: Any) -> tuple[float, float]:
        assert num_rows > 1
        run()
        return (1e-3, 5e-4) if run.args[0].schedule == "plain" else (2e-3, 5e-4)

    with torch.no_grad(), warnings.catch_warnings(), mock.patch.object(tuning, "_timed", timed):
        warnings.simplefilter("ignore")
        for rows in ids.split(num_rows, 1):
            outputs = [
                model(rows, past_key_values=cache, use_cache=True) for model, cache in zip((whole, mine), caches)
            ]
            caches = [output.past_key_values for output in outputs]
            same("logits", outputs[1].logits, outputs[0].logits)
    records = [(r.operation, r.schedule, r.num_calls) for r in report(group).records]
    dist.destroy_process_group(group)
    return [record for record in records if "matmul" in record[0]]


def packed_and_masked() -> None:
    """Padding masks, positions and packed sequences, given for all rows, mean what they mean in one process."""
    whole, mine = tiny("llama"), tiny("llama")
    parallel(mine, "llama", True, uneven=True)
    ids, mask = tokens(7), torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    for given in ({"attention_mask": mask}, {"position_ids": packed}, {"position_ids": packed + 4}):
        logits, own = (full(model(ids, use_cache=False, **given).logits) for model in (whole, mine))
        same(str(list(given)), own, logits)


def embedded_outside() -> None:
    """Own rows as `inputs_embeds`, with the positions of all rows."""
    whole, mine = tiny("llama"), tiny("llama")
    parallel(mine, "llama", True, uneven=True)
    ids = tokens(7)
    own = own_rows(whole.model.embed_tokens(ids))
    positions = torch.arange(7)[None]
    logits = full(mine(inputs_embeds=own, position_ids=positions, use_cache=False).logits)
    same("logits", logits, whole(ids, use_cache=False).logits)


def labelled() -> None:
    """`labels` with the shipped loss, and with whole logits transformers' own loss, which is in float32."""
    whole, mine = tiny("llama"), tiny("llama")
    parallel(mine, "llama", True, uneven=True)
    mine.loss_function = causal_lm_loss(dist.group.WORLD)
    ids = tokens(7)
    labels = ids.clone()
    labels[0, :3] = -100
    mine_loss = mine(ids, labels=labels, use_cache=False).loss
    logits = whole(ids, use_cache=False).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    same("loss", mine_loss, expected)
    for model, loss in ((mine, mine_loss), (whole, expected)):
        model.zero_grad()
        loss.backward()
    compare(mine, whole)
    gathered = tiny("llama")
    plan = {**LLAMA, "lm_head": "vocab whole"}
    parallelize(gathered, plan, dist.group.WORLD, LinearOptions(uneven=True))
    gathered(ids, labels=labels, use_cache=False).loss.backward()
    whole.zero_grad()
    whole(ids, labels=labels, use_cache=False).loss.backward()
    compare(gathered, whole)


def refused() -> None:
    """What would be wrong in silence is an error on every rank, and leaves the group usable."""
    rank, n = dist.get_rank(), dist.get_world_size()
    mine = tiny("llama")
    parallel(mine, "llama", True)
    ids = tokens(2 * n)
    with pytest.raises(ValueError, match="the ranks have different tokens"):
        mine(ids.roll(rank, 1), use_cache=False)
    with pytest.raises(ValueError, match=f"{2 * n + 1} rows over {n} ranks are uneven; set LinearOptions.uneven"):
        mine(tokens(2 * n + 1), use_cache=False)
    with pytest.raises(ValueError, match="token 23 is outside of the vocabulary, 0 to 22"):
        mine(ids.clamp(max=0) + 23, use_cache=False)
    with pytest.raises(ValueError, match=rf"position_embeddings are of 4 rows, but the ranks have {4 * n} together"):
        mine(inputs_embeds=torch.zeros(1, 4, 8, dtype=torch.float64), use_cache=False)
    embeds, positions = torch.zeros(1, 1, 8, dtype=torch.float64), torch.arange(n)[None]
    one_row = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="attention_mask of shape"):
        mine(inputs_embeds=embeds, position_ids=positions, attention_mask=one_row, use_cache=False)
    logits = mine(ids, use_cache=False).logits
    with pytest.raises(Exception, match="DTensor"):
        F.cross_entropy(logits.transpose(1, 2), ids)
    three = tiny("llama", num_attention_heads=3, num_key_value_heads=1, hidden_size=12)
    dropping = tiny("llama", attention_dropout=0.1)
    for model, words in [
        (three, f"'model.layers.0.self_attn': num_heads=3 cannot be split over {n} ranks; use 1 rank"),
        (dropping, r"'model.layers.0.self_attn' has attention_dropout=0.1"),
    ]:
        with pytest.raises(ValueError, match=words):
            parallel(model, "llama", True)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    tied = tiny("llama", tie_word_embeddings=True)
    plan = {name: style for name, style in LLAMA.items() if name != "model.embed_tokens"}
    with pytest.raises(ValueError, match=r"'model.embed_tokens.weight' and 'lm_head.weight' are one parameter"):
        parallelize(tied, plan, dist.group.WORLD)
    assert not any(isinstance(parameter, DTensor) for parameter in tied.parameters())
