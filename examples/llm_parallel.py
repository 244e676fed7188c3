"""How the Llama of `llm.py` is trained in one process and over several ranks: one short class for each way.

`step` is the same for all; the classes say what a rank is fed, how the model is made parallel, and what becomes of
the gradients before the optimizer's step. Every one gives the losses and the clipped gradient norms of `Alone`.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from llm_halves import use_halves
from llm_query_split import use_query_split
from llm_ulysses import use_ulysses
from llm_ulysses_halves import use_ulysses_halves
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaForCausalLM

from stretto.overlap import LLAMA, LLAMA_TP, GradientReducer, LinearOptions, parallelize, vocab_cross_entropy


class Alone:
    """One process: what every parallelism below equals."""

    def __init__(self, settings: Any, model: LlamaForCausalLM) -> None:
        self.settings, self.model = settings, model
        self.optimizer = torch.optim.AdamW(self.prepare(), settings.lr)

    def prepare(self) -> list[Tensor]:
        """Make the model parallel; the parameters that this rank updates."""
        return list(self.model.parameters())

    def own(self, tokens: Tensor) -> Tensor:
        """What this rank is fed of (batch, length)."""
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
        """Over ranks."""
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return loss


def cut(tokens: Tensor, dim: int, part: int, num_parts: int) -> Tensor:
    """One part of (batch, length), all being equal."""
    if tokens.shape[dim] % num_parts:
        raise ValueError(f"--{('batch', 'length')[dim]} {tokens.shape[dim]} cannot be split over {num_parts} ranks")
    return tokens.chunk(num_parts, dim)[part]


class TensorParallel(Alone):
    """All tokens on every rank, part of the features: the plan says how. Sums hide behind the batch's other half."""

    plan, options = LLAMA_TP, LinearOptions(sequence_parallel=False)

    def prepare(self) -> list[Tensor]:
        if self.settings.batch % 2:
            raise ValueError(f"--batch {self.settings.batch} must be even: a half hides the other's communication")
        self.group = dist.group.WORLD
        parallelize(self.model, self.plan, self.group, self.options)
        use_halves(self.model)
        return list(self.model.parameters())

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Of logits that are sharded over the vocabulary and never gathered."""
        return vocab_cross_entropy(self.model(inputs).logits, targets, self.group)

    def clip(self) -> Tensor:
        return super().clip().full_tensor()


class SequenceTensorParallel(TensorParallel):
    """The same with own rows between layers."""

    plan, options = LLAMA, LinearOptions(sequence_parallel=True)

    def prepare(self) -> list[Tensor]:
        self.group = dist.group.WORLD
        parallelize(self.model, self.plan, self.group, self.options)
        use_query_split(self.model)
        return list(self.model.parameters())

    def own(self, tokens: Tensor) -> Tensor:
        cut(tokens, 1, 0, dist.get_world_size(self.group))  # the model cuts the rows itself
        return tokens


class SequenceTensorAndDataParallel(SequenceTensorParallel):
    """Ranks 0 and 1, 2 and 3, ... share a model; the pairs have their own samples."""

    def prepare(self) -> list[Tensor]:
        if dist.get_world_size() % 2:
            raise ValueError(f"--parallel tpsp+dp needs pairs of ranks, not {dist.get_world_size()}")
        self.mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
        self.group = self.mesh.get_group("tensor")
        parallelize(self.model, self.plan, self.mesh["tensor"], self.options)
        use_query_split(self.model)
        self.reducer = GradientReducer(self.model, self.mesh.get_group("data"), bucket_bytes=1 << 18)
        return list(self.model.parameters())

    def own(self, tokens: Tensor) -> Tensor:
        return cut(super().own(tokens), 0, self.mesh.get_local_rank("data"), self.mesh.size(0))

    def clip(self) -> Tensor:
        self.reducer.finish()
        return super().clip()


class DataParallel(Alone):
    """Own samples. Gradients leave for their owners in backward, parameters come back behind the next forward."""

    def prepare(self) -> list[Tensor]:
        mlp = self.model.model.layers[0].mlp
        last = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]  # what is left to compute while the last gradients travel
        units = [layer.self_attn for layer in self.model.model.layers]  # Ulysses reads weights without calling layers
        self.reducer = GradientReducer(
            self.model, dist.new_group(), bucket_bytes=1 << 18, last=last, units=units, sharded=True
        )
        return self.reducer.owned

    def own(self, tokens: Tensor) -> Tensor:
        return cut(tokens, 0, dist.get_rank(), dist.get_world_size())

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


class Ulysses(DataParallel):
    """Own rows of every sample; weights are whole, so gradients are reduced as in data parallelism."""

    def prepare(self) -> list[Tensor]:
        group = dist.new_group()
        if self.settings.batch % 2:
            use_ulysses(self.model, group)
        else:
            use_ulysses_halves(self.model, group)
        return super().prepare()

    def own(self, tokens: Tensor) -> Tensor:
        return cut(tokens, 1, dist.get_rank(), dist.get_world_size())


PARALLEL = {
    "none": Alone,
    "tpsp": SequenceTensorParallel,
    "tp": TensorParallel,
    "up": Ulysses,
    "dp": DataParallel,
    "tpsp+dp": SequenceTensorAndDataParallel,
}
