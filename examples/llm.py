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
import torch.nn.functional as F
from llm_ulysses import use_ulysses
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from stretto.overlap import GradientReducer

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


class Alone:
    """One process: what every parallelism below equals."""

    def __init__(self, settings: Settings, model: LlamaForCausalLM) -> None:
        self.settings, self.model = settings, model
        self.optimizer = torch.optim.AdamW(model.parameters(), settings.lr)

    def own(self, tokens: Tensor) -> Tensor:
        """This rank's part of (batch, length)."""
        return tokens

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over own tokens."""
        positions = torch.arange(self.settings.length).unsqueeze(0)  # of all rows
        logits = self.model(inputs, position_ids=positions).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def step(self, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
        """One step; the loss over all ranks, and the norm of its gradient before it was clipped."""
        loss = self.loss(self.own(inputs), self.own(targets))
        loss.backward()
        norm = self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.mean(loss.detach()).item(), norm.item()

    def clip(self) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_norm)

    def mean(self, loss: Tensor) -> Tensor:
        return loss


class DataParallel(Alone):
    """Own samples. Gradients leave for their owners in backward, parameters come back behind the next forward."""

    def __init__(self, settings: Settings, model: LlamaForCausalLM) -> None:
        self.settings, self.model = settings, model
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        mlp = model.model.layers[0].mlp
        self.reducer = GradientReducer(
            model,
            dist.new_group(),
            bucket_bytes=1 << 20,
            last=[mlp.gate_proj, mlp.up_proj, mlp.down_proj],
            sharded=True,
        )
        self.optimizer = torch.optim.AdamW(self.reducer.owned, settings.lr)

    def own(self, tokens: Tensor) -> Tensor:
        return self.cut(tokens, 0, "--batch")

    def cut(self, tokens: Tensor, dim: int, option: str) -> Tensor:
        if tokens.shape[dim] % self.world_size:
            raise ValueError(f"{option} {tokens.shape[dim]} cannot be split over {self.world_size} ranks")
        return tokens.chunk(self.world_size, dim)[self.rank]

    def step(self, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
        result = super().step(inputs, targets)
        self.reducer.publish()
        return result

    def clip(self) -> Tensor:
        """Every rank has a shard of the gradient: the squares are summed over ranks."""
        self.reducer.finish()
        grads = [shard.grad for shard in self.reducer.owned]
        square = torch.stack([grad.square().sum() for grad in grads]).sum()
        dist.all_reduce(square)
        for grad in grads:
            grad.mul_((self.settings.max_norm / (square.sqrt() + 1e-6)).clamp(max=1))
        return square.sqrt()

    def mean(self, loss: Tensor) -> Tensor:
        dist.all_reduce(loss)
        return loss / dist.get_world_size()


class Ulysses(DataParallel):
    """Own rows of every sample; weights are whole, so gradients are reduced as in data parallelism."""

    def __init__(self, settings: Settings, model: LlamaForCausalLM) -> None:
        use_ulysses(model, dist.new_group())
        super().__init__(settings, model)

    def own(self, tokens: Tensor) -> Tensor:
        return self.cut(tokens, 1, "--length")


PARALLEL = {"none": Alone, "dp": DataParallel, "up": Ulysses}


def train(settings: Settings, say=lambda line: None) -> list[tuple[float, float]]:
    """Losses and gradient norms of all steps. `ValueError` for settings that do not fit the number of ranks."""
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
    sys.exit(main())
