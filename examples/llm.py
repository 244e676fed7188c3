"""Train a Llama on real text, in one process or over several ranks, with the communication hidden.

    python examples/llm.py
    torchrun --nproc-per-node 2 examples/llm.py --parallel tpsp

    --parallel none      one process
               tpsp      tensor parallel; between layers every rank has its own rows (sequence parallelism)
               tp        tensor parallel; between layers every rank has all rows
               up        Ulysses: own rows everywhere but in attention, which has own heads (llm_ulysses.py)
               dp        own samples; every rank updates its shard of the parameters (ZeRO-1)
               tpsp+dp   tensor parallel over pairs of ranks, data parallel over the pairs

Losses and clipped gradient norms are those of one process, whichever is chosen. The text is the Constitution of the
United States (data/), its tokens are bytes; the model is transformers' own, with grouped-query attention.
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from llm_parallel import PARALLEL
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from stretto.leaving import end_process

TEXT = Path(__file__).parent / "data" / "constitution.txt"
VOCABULARY = 256


@dataclass(frozen=True)
class Settings:
    parallel: str = "none"
    steps: int = 50
    batch: int = 4
    """Sequences a step, over all ranks."""
    length: int = 128
    """Tokens of a sequence."""
    hidden: int = 96
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    lr: float = 3e-3
    max_norm: float = 1.0
    seed: int = 0


def make_model(settings: Settings) -> LlamaForCausalLM:
    """The same on every rank."""
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=settings.hidden,
        intermediate_size=settings.hidden * 8 // 3,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=settings.length,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batches(settings: Settings) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, (batch, length) each: pieces of the text drawn at random, the same on every rank."""
    tokens = torch.tensor(list(TEXT.read_bytes()))
    generator = torch.Generator().manual_seed(settings.seed)
    while True:
        starts = torch.randint(len(tokens) - settings.length, (settings.batch, 1), generator=generator)
        pieces = tokens[starts + torch.arange(settings.length + 1)]
        yield pieces[:, :-1], pieces[:, 1:]


def check(settings: Settings) -> None:
    """`ValueError` for settings that make no model or no step."""
    for name in ("steps", "batch", "length", "hidden", "layers", "heads", "kv_heads"):
        if getattr(settings, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(settings, name)} must be at least 1")
    if settings.hidden % (2 * settings.heads):
        raise ValueError(f"--hidden {settings.hidden} must be a multiple of twice --heads {settings.heads}")
    if settings.heads % settings.kv_heads:
        raise ValueError(f"--heads {settings.heads} must be a multiple of --kv-heads {settings.kv_heads}")
    if settings.length >= TEXT.stat().st_size:
        raise ValueError(f"--length {settings.length} is longer than the text, {TEXT.stat().st_size} tokens")


def train(settings: Settings, say=lambda line: None) -> list[tuple[float, float]]:
    """Losses and gradient norms of all steps. `ValueError` for settings that do not fit the number of ranks."""
    check(settings)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if (settings.parallel == "none") != (world_size == 1):
        raise ValueError(f"--parallel {settings.parallel} does not go with {world_size} ranks; see --help")
    trainer = PARALLEL[settings.parallel](settings, make_model(settings))
    results, begin = [], time.perf_counter()
    for number, (inputs, targets) in enumerate(itertools.islice(batches(settings), settings.steps), 1):
        results.append(trainer.step(inputs, targets))
        if number % 10 == 0 or number == settings.steps:
            rate = number * settings.batch * settings.length / (time.perf_counter() - begin)
            say("step {:4}  loss {:.4f}  gradient norm {:.3f}  {:.0f} tokens/s".format(number, *results[-1], rate))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", choices=list(PARALLEL), default="none")
    for name, default in list(vars(Settings()).items())[1:]:
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    rank = int(os.environ.get("RANK", 0))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    try:
        train(Settings(**vars(parser.parse_args())), print if rank == 0 else lambda line: None)
    except ValueError as error:
        if rank == 0:
            print(f"llm.py: {error}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    if "RANK" in os.environ:
        end_process(main())
    sys.exit(main())
