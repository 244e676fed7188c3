"""A transformer of your own over several ranks, by a plan: the loss and the gradients of one process.

    torchrun --nproc-per-node 2 examples/own_model.py

Nothing in the model knows of ranks. The plan names its modules: blocks work on the rank's own rows, attention has the
rank's own heads, the vocabulary is shared out, and one gather feeds q, k and v.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.leaving import end_process
from stretto.overlap import LinearOptions, parallelize, report, vocab_cross_entropy

VOCABULARY, WIDTH, HEADS = 64, 48, 6

PLAN = {
    "embed": "vocab",
    "blocks.*": "rows",
    "blocks.*.norm1": "sequence",
    "blocks.*.attn": "attention",
    "blocks.*.attn.q+k+v": "column",
    "blocks.*.attn.out": "row",
    "blocks.*.norm2": "sequence",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "norm": "sequence announced",
    "head": "vocab",
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_and_norm(steps: int = 3) -> list[tuple[float, float]]:
    """Losses and gradient norms of a few steps: over the ranks of the default group, or in one process."""
    torch.manual_seed(0)
    model, found = Model().double(), []
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is not None:
        parallelize(model, PLAN, group, LinearOptions(uneven=True))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tokens = torch.randint(VOCABULARY, (2, 17))
    for _ in range(steps):
        logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
        if group is None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        else:
            loss = vocab_cross_entropy(logits, targets, group)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found.append((loss.item(), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)))
        optimizer.step()
        optimizer.zero_grad()
    return found


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    results = loss_and_norm()
    if int(os.environ.get("RANK", 0)) == 0:
        print("\n".join(f"loss {loss:.6f}  gradient norm {norm:.6f}" for loss, norm in results))
        if dist.is_initialized():
            print(report(dist.group.WORLD))
    if dist.is_initialized():
        dist.destroy_process_group()
        end_process(0)
