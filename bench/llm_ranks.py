"""What a rank of `bench.llm` runs: training steps and forward passes of a Llama, communicating in every way.

A rank keeps its model between calls, so that the rate of the link may change in between and the parent can print as
repeats come in. The hazard is a message left over for the next way: every timed stretch begins and ends on all ranks
together, with as much on its way at its end as there was at its beginning.
"""

import gc
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from bench.link import start_together
from bench.llm_models import MODELS, Model, Shape, Way, part
from bench.llm_slicing import sliced
from stretto.overlap import LLAMA, LinearOptions, p2p, parallelize, report
from stretto.overlap.p2p import Call
from stretto.overlap.transfers import Transfer

MESSAGE = 1 << 20


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
