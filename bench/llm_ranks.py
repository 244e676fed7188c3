"""What a rank of `bench.llm` runs: training steps and forward passes of a Llama, communicating in every way.

A rank keeps its model between calls, so that the rate of the link may change in between and the parent can print as
repeats come in. Ways:

    compute   the arithmetic of "plain", every message replaced by a copy of what would have been sent
    ideal     the same while the messages' bytes move, needed by nobody
    plain     messages with nothing beside them
    restructured plain
              the same with ours' model structure: query-split attention, or halves of the batch
    slicing k chunks, each beside the product of its neighbour (`llm_slicing`); data parallel: k buckets
    ours      the library: no tail

The hazard is a message left over for the next way: every timed stretch begins and ends on all ranks together, with as
much on its way at its end as there was at its beginning.
"""

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bench.link import start_together
from bench.llm_slicing import sliced
from stretto.overlap import (
    LLAMA,
    LLAMA_TP,
    GradientReducer,
    LinearOptions,
    p2p,
    parallelize,
    report,
    vocab_cross_entropy,
)
from stretto.overlap.p2p import Call
from stretto.overlap.transfers import Transfer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

SMALLEST_BUCKET = 2 << 20
MESSAGE = 1 << 20


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


class Sent:
    """Messages replaced by copies, or counted."""

    num_bytes = 0

    @staticmethod
    def copied(call: Call, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> Transfer:
        for (tensor, _), (out, _) in zip(receives, sends):
            tensor.flatten().copy_(out.flatten()) if tensor.numel() == out.numel() else tensor.zero_()
        return Transfer([], [])

    @staticmethod
    @contextmanager
    def counted() -> Iterator[None]:
        post = Call.post

        def noted(call: Call, sends: Any, receives: Any) -> Transfer:
            Sent.num_bytes += sum(tensor.nbytes for tensor, _ in sends)
            return post(call, sends, receives)

        Sent.num_bytes = 0
        with mock.patch.object(Call, "post", noted):
            yield


class Unneeded:
    """As many bytes as a step sends, on their way beside it."""

    def __init__(self, num_bytes: int) -> None:
        self.group, self.num_bytes = dist.new_group(), num_bytes
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.out, self.into = torch.zeros(MESSAGE, dtype=torch.uint8), torch.zeros(MESSAGE, dtype=torch.uint8)

    @contextmanager
    def moving(self) -> Iterator[None]:
        works: list[dist.Work] = []
        each = self.num_bytes // (self.world_size - 1)
        for first in range(0, each, MESSAGE):
            size = min(MESSAGE, each - first)
            for hop in range(1, self.world_size):
                to, source = (self.rank + hop) % self.world_size, (self.rank - hop) % self.world_size
                receive = dist.P2POp(dist.irecv, self.into[:size], group=self.group, group_peer=source)
                send = dist.P2POp(dist.isend, self.out[:size], group=self.group, group_peer=to)
                works += dist.batch_isend_irecv([receive, send])
        yield
        for work in works:
            work.wait()


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
            whole = {"bucket_bytes": SMALLEST_BUCKET, "last": [mlp.gate_proj, mlp.up_proj, mlp.down_proj]}
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
_model: Model | None = None


def make(parallel: str, shape: dict[str, int]) -> int:
    """Build the model; the number of its parameters on this rank."""
    global _model
    _model = None
    gc.collect()
    _model = MODELS[parallel](Shape(**shape))
    return sum(part(p).numel() for p in _model.llama.parameters())


def bytes_of_a_step(training: bool) -> int:
    """What this rank sends in one step of "plain", in the steady state."""
    model = _model
    assert model is not None
    way = Way("plain")
    model.use(way, training)
    step = model.train if training else model.infer
    step()
    with Sent.counted():
        step()
        model.rest()
        return Sent.num_bytes


def measure(name: str, training: bool, num_steps: int, num_bytes: int, warm: bool = True) -> float:
    """Seconds of one step, of `num_steps`; after an untimed one if `warm`, or if a step reaches into the next."""
    model, way = _model, Way(name)
    assert model is not None
    with ExitStack() as stack:
        if way.is_slicing:
            stack.enter_context(sliced())
        if way.is_silent:
            stack.enter_context(mock.patch.object(Call, "post", Sent.copied))
        model.use(way, training)
        step = model.train if training else model.infer
        if warm or model.carries:
            step()
        unneeded = Unneeded(num_bytes * num_steps) if name == "ideal" else None
        gc.collect()
        gc.disable()
        start = start_together()
        with unneeded.moving() if unneeded is not None else ExitStack():
            for _ in range(num_steps):
                step()
        end = time.monotonic()
        gc.enable()
        model.rest()
    return (end - start) / num_steps


@torch.no_grad()
def decode(shape: dict[str, int], schedule: str, prompt: int = 32, num_tokens: int = 24) -> dict[str, Any]:
    """One sequence, a row a step, with a cache: fewer rows than ranks. Seconds a token, and calls by schedule."""
    shape = shape | {"batch": 1, "length": prompt + 2 * num_tokens}
    llama = Model(Shape(**shape)).llama.eval()
    options = LinearOptions(sequence_parallel=True, uneven=True, schedule=schedule)  # type: ignore[arg-type]
    parallelize(llama, {**LLAMA, "lm_head": "vocab whole"}, dist.group.WORLD, options)
    token, cache = torch.zeros(1, prompt, dtype=torch.int64), None

    def step() -> None:
        nonlocal token, cache
        out = llama(token, past_key_values=cache, use_cache=True)
        token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values

    def calls() -> Counter[str]:
        found: Counter[str] = Counter()
        for record in report(dist.group.WORLD).records:
            found[record.schedule] += record.num_calls
        return found

    for _ in range(1 + num_tokens):
        step()
    before, start = calls(), start_together()
    for _ in range(num_tokens):
        step()
    seconds = (time.monotonic() - start) / num_tokens
    return {"s_per_token": seconds, "calls": dict(calls() - before)}


def forget() -> None:
    """What the law chose for another rate of the link."""
    for peers in p2p._peers.values():
        peers.choices.clear()


def matrix_rate(shape: dict[str, int], seconds: float = 0.5) -> float:
    """Flops a second of one float32 product after another on one thread, all ranks at once, in the model's shape."""
    s = Shape(**shape)
    x, weight = torch.randn(s.tokens, s.hidden), torch.randn(s.intermediate, s.hidden)
    out = torch.empty(s.tokens, s.intermediate)
    torch.mm(x, weight.t(), out=out)
    start, count = start_together(), 0
    while time.monotonic() - start < seconds:
        torch.mm(x, weight.t(), out=out)
        count += 1
    return count * 2 * x.numel() * len(weight) / (time.monotonic() - start)
