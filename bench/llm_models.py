"""The Llamas of `bench.llm`, made parallel in every way, and the ways in which their steps communicate.

    compute   the arithmetic of "plain", every message replaced by a copy of what would have been sent
    ideal     the same while the messages' bytes move, needed by nobody
    plain     messages with nothing beside them; "restructured plain": with query-split attention, or halves, as ours
    slicing k chunks, each beside the product of its neighbour (`llm_slicing`); data parallel: k buckets
    ours      the library: no tail

A model is told its way by `use`. The hazard is a message left over for the next way: `rest` leaves none.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.overlap import LLAMA, LLAMA_TP, GradientReducer, LinearOptions, parallelize, vocab_cross_entropy

__all__ = ["MODELS", "Model", "Shape", "Way", "part"]

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

BUCKET_BYTES = 12 << 20


@dataclass(frozen=True)
class Shape:
    """The model and what a step takes, over all ranks."""

    batch: int
    length: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def product_weights(self) -> int:
        """Weights that multiply every token."""
        kv = self.hidden // self.heads * self.kv_heads
        layer = self.hidden * (2 * self.hidden + 2 * kv + 3 * self.intermediate)
        return self.layers * layer + self.hidden * self.vocabulary

    def flops(self, training: bool) -> float:
        """Of a step: 2 a weight and token forward, and as many for each token's visible keys; thrice in training."""
        attention = self.layers * 2 * 2 * self.hidden * (self.length + 1) / 2
        return self.tokens * (2 * self.product_weights + attention) * (3 if training else 1)


@dataclass(frozen=True)
class Way:
    """How a step communicates."""

    name: str

    @property
    def schedule(self) -> str:
        kind = self.name.split()[0]
        return {"slicing": "direct", "ours": "auto"}.get(kind, "plain")

    @property
    def pieces(self) -> int:
        """Chunks or sub-slices."""
        return int(self.name.split()[1]) if self.is_slicing else 1

    @property
    def is_restructured(self) -> bool:
        return self.name in ("ours", "restructured plain")

    @property
    def is_slicing(self) -> bool:
        return self.name.startswith("slicing")

    @property
    def is_silent(self) -> bool:
        return self.name in ("compute", "ideal")


class Model:
    """A Llama made parallel; subclasses say how, and how a way is set."""

    carries = False
    """Whether messages of a step are still under way in the next."""

    def __init__(self, shape: Shape) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        self.shape = shape
        self.llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=shape.vocabulary,
                hidden_size=shape.hidden,
                intermediate_size=shape.intermediate,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.kv_heads,
                max_position_embeddings=shape.length,
                use_cache=False,
            )
        )
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1), generator=generator)
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:]
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.swaps: list[tuple[nn.Module, type, type]] = []

    @contextmanager
    def restructured(self) -> Iterator[None]:
        """Note which modules' classes change within: they are ours', and until then the others'."""
        modules = list(self.llama.modules())
        before = [type(module) for module in modules]
        yield
        self.swaps = [(m, old, type(m)) for m, old in zip(modules, before) if type(m) is not old]

    def restructure(self, way: Way) -> None:
        """Give modules the classes that a way has."""
        for module, before, after in self.swaps:
            module.__class__ = after if way.is_restructured else before

    def use(self, way: Way, training: bool) -> None:
        """Communicate so from now on."""
        raise NotImplementedError

    def forward(self) -> Tensor:
        """Logits of the own tokens, or of the own vocabulary."""
        return self.llama(self.inputs).logits

    def loss(self, logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), self.targets.flatten())

    def train(self) -> None:
        self.loss(self.forward()).backward()
        self.update()

    @torch.no_grad()
    def infer(self) -> None:
        self.forward()

    def update(self) -> None:
        raise NotImplementedError

    def rest(self) -> None:
        """Nothing is under way when this returns."""


class TensorParallel(Model):
    """All tokens everywhere, own features; "tpsp": own rows between layers.

    Without rows of its own every rank has the whole embedding: a sum of looked-up rows has no product beside it.
    """

    def __init__(self, shape: Shape, *, rows: bool) -> None:
        super().__init__(shape)
        self.rows = rows
        self.options = LinearOptions(sequence_parallel=rows, schedule="plain")
        plan = LLAMA if rows else {name: style for name, style in LLAMA_TP.items() if "embed" not in name}
        parallelize(self.llama, plan, dist.group.WORLD, self.options)
        with self.restructured():
            if rows:
                from llm_query_split import use_query_split

                use_query_split(self.llama)
            else:
                from llm_halves import use_halves

                use_halves(self.llama)
        self.pairs = [(p, nn.Parameter(part(p).detach())) for p in self.llama.parameters()]
        self.optimizer = torch.optim.AdamW([mine for _, mine in self.pairs], 1e-5, fused=True)

    def use(self, way: Way, training: bool) -> None:
        options = replace(
            self.options,
            schedule=way.schedule,
            num_subslices=way.pieces,
            check=not way.is_silent,
            keep_gathered=False,
        )
        self.restructure(way)
        for module in self.llama.modules():
            if isinstance(getattr(module, "options", None), LinearOptions):
                module.options = options

    def loss(self, logits: Tensor) -> Tensor:
        return vocab_cross_entropy(logits, self.targets, dist.group.WORLD, check=False)

    def update(self) -> None:
        for parameter, mine in self.pairs:
            mine.grad, parameter.grad = part(parameter.grad), None
        self.optimizer.step()


class Replicated(Model):
    """Whole weights: gradients go to the owners of shards, which update them and publish them."""

    carries = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.group = dist.new_group()
        self.reducer: GradientReducer | None = None

    def use(self, way: Way, training: bool) -> None:
        self.rest()
        if self.reducer is not None:
            self.reducer.close()
            self.reducer = None
        self.wait = way.schedule == "plain"
        if not training and not self.publishes:
            return
        size = sum(p.nbytes for p in self.llama.parameters())
        layers = self.llama.model.layers
        whole: dict[str, Any] = {"bucket_bytes": size}
        if way.is_slicing:
            whole = {"bucket_bytes": -(-size // way.pieces)}
        if way.name.startswith("ours"):
            mlp = layers[0].mlp
            whole = {"bucket_bytes": BUCKET_BYTES, "last": [mlp.gate_proj, mlp.up_proj, mlp.down_proj]}
        units = [layer.self_attn for layer in layers]
        check = not way.is_silent
        self.reducer = GradientReducer(self.llama, self.group, sharded=True, units=units, check=check, **whole)
        self.optimizer = torch.optim.AdamW(self.reducer.owned, 1e-5, fused=True)

    publishes = True
    """Forward passes come after an update, as those of data parallelism do."""

    def update(self) -> None:
        assert self.reducer is not None
        self.reducer.finish()
        self.optimizer.step()
        self.reducer.publish(wait=self.wait)

    def infer(self) -> None:
        if self.reducer is not None:
            self.reducer.publish(wait=self.wait)
        super().infer()

    def rest(self) -> None:
        if self.reducer is not None:
            self.reducer._published.receive()


class DataParallel(Replicated):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.inputs, self.targets = (t.chunk(self.world_size)[self.rank] for t in (self.inputs, self.targets))


class Ulysses(Replicated):
    publishes = False

    def __init__(self, shape: Shape) -> None:
        from llm_ulysses import use_ulysses
        from llm_ulysses_halves import use_ulysses_halves

        super().__init__(shape)
        use_ulysses(self.llama, dist.group.WORLD)
        with self.restructured():
            use_ulysses_halves(self.llama, dist.group.WORLD)
        self.inputs, self.targets = (t.chunk(self.world_size, 1)[self.rank] for t in (self.inputs, self.targets))
        self.positions = torch.arange(shape.length).unsqueeze(0)

    def use(self, way: Way, training: bool) -> None:
        super().use(way, training)
        self.restructure(way)
        for layer in self.llama.model.layers:
            layer.self_attn.how = {
                "schedule": way.schedule,
                "num_subslices": way.pieces,
                "check": not way.is_silent,
            }

    def forward(self) -> Tensor:
        return self.llama(self.inputs, position_ids=self.positions).logits


def part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


MODELS: dict[str, Callable[[Shape], Model]] = {
    "tpsp": lambda shape: TensorParallel(shape, rows=True),
    "tp": lambda shape: TensorParallel(shape, rows=False),
    "up": Ulysses,
    "dp": DataParallel,
}
