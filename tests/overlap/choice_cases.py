"""What every rank does in the tests of the automatic choice, of the report and of traces."""

import json
import re
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.overlap import (
    GradientReducer,
    OverlapWarning,
    all_gather_matmul,
    attention_all_to_all,
    matmul_reduce_scatter,
    replicate_matmul,
    report,
    scaled_dot_product_attention,
    trace,
    tracing,
    tuning,
)
from stretto.overlap.law import Choice
from stretto.overlap.p2p import Call, peers_of


def warned(messages: list[Any]) -> list[str]:
    return [str(w.message) for w in messages if issubclass(w.category, OverlapWarning)]


def one_step(group: dist.ProcessGroup, rows: int = 64, schedule: str = "auto", **options: Any) -> None:
    x = torch.randn(rows, 32, requires_grad=True)
    weight = torch.randn(16, 32, requires_grad=True)
    hidden = all_gather_matmul(x, weight, group, schedule=schedule, **options)
    matmul_reduce_scatter(hidden, torch.randn(8, 16), group, schedule=schedule, **options).sum().backward()


def measured_once() -> tuple[list[str], list[int], list[tuple[str, int]]]:
    """The operations that were measured, the number of messages of equal steps, the choices by operation."""
    group = dist.new_group()
    posts: list[int] = []
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for rows in (64, 64, 60, 64):
            with mock.patch.object(Call, "post", autospec=True, side_effect=Call.post) as post:
                one_step(group, rows)
            posts.append(post.call_count)
    choices = peers_of(group).choices
    dist.destroy_process_group(group)
    return [key[0] for key in choices], posts, [(c.schedule, c.num_subslices) for c in choices.values()]


def measured_as(
    seconds: dict[tuple[str, int], tuple[float, float]], noise: float = 0.0, num_noisy: int = 100
) -> tuple[str, int, list[str], str, int]:
    """The choice where each way took `seconds`, total and waiting, what was said, the report, the trials of a way.

    With `noise` the second trial of each took so much longer, as a share, the third twice that, up to `num_noisy`.
    """
    group = dist.new_group()
    trials: Counter[tuple[str, int]] = Counter()

    def timed(call: Call, run: Any) -> tuple[float, float]:
        run()
        way = run.args[0].schedule, run.args[0].num_subslices
        trials[way] += 1
        longer = 1 + noise * (trials[way] - 1) if trials[way] <= num_noisy else 1
        return longer * seconds[way][0], longer * seconds[way][1]

    with warnings.catch_warnings(record=True) as messages, mock.patch.object(tuning, "_timed", timed):
        warnings.simplefilter("always")
        for _ in range(3):
            all_gather_matmul(torch.randn(8, 4), torch.randn(4, 4), group, schedule="auto", tuned_as="a layer")
    (choice,) = peers_of(group).choices.values()
    table = str(report(group))
    dist.destroy_process_group(group)
    return choice.schedule, choice.num_subslices, warned(messages), table, trials["plain", 1]


def said_once(reducer: bool) -> tuple[list[str], str]:
    """What is warned of on one rank, by products or by a gradient reduction, and the group's report."""
    group = dist.new_group()
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        for _ in range(2 * reducer):
            GradientReducer(nn.Linear(2, 2), group).close()
        for schedule in () if reducer else ("direct", "auto", "ring"):
            one_step(group, schedule=schedule)
        one_step(group, schedule="plain")
    table = str(report(group))
    dist.destroy_process_group(group)
    return warned(messages), table


def disagreeing_times() -> tuple[str, int]:
    """Ranks that measure different times come to the same choice."""
    group = dist.new_group()
    greatest = tuning.greatest

    def own_view(call: Call, numbers: Any, device: Any) -> Any:
        return greatest(call, [value * (1 + 50 * dist.get_rank()) for value in numbers], device)

    with mock.patch.object(tuning, "greatest", own_view), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one_step(group)
        one_step(group)
    found = [(c.schedule, c.num_subslices) for c in peers_of(group).choices.values()]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, found)
    dist.destroy_process_group(group)
    return str(found), len({str(one) for one in everyones})


def drawn_in_trials() -> tuple[bool, bool]:
    """An attention with dropout: whether auto draws what direct draws, and leaves the generator where it does."""
    drawn, states = [], []
    for schedule in ("direct", "auto"):
        group = dist.new_group()

        def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            return F.dropout(scaled_dot_product_attention(q, k, v, mask), 0.5)

        with mock.patch.object(tuning, "_believed", return_value=Choice("direct", 1, 0.0, 0.0)):
            torch.manual_seed(3)
            q = torch.ones(1, 8, 2, 4)
            drawn.append(attention_all_to_all(q, q, q, group, attention=attention, schedule=schedule))
        states.append(torch.get_rng_state())
        dist.destroy_process_group(group)
    return torch.equal(*drawn), torch.equal(*states)


def nested_traces() -> list[bool]:
    """Two traces that hold the same are two: the inner ends, the outer goes on."""
    group = dist.new_group()
    x = torch.randn(4, 4)
    with trace() as outer:
        with trace() as inner:
            all_gather_matmul(x, x, group)
        ended = len(inner.spans)
        all_gather_matmul(x, x, group)
    dist.destroy_process_group(group)
    return [0 < ended == len(inner.spans) < len(outer.spans), tracing.is_tracing()]


def deterministic() -> list[tuple[str, int]]:
    group = dist.new_group()
    torch.use_deterministic_algorithms(True)
    try:
        one_step(group)
    finally:
        torch.use_deterministic_algorithms(False)
    found = [(c.schedule, c.num_subslices) for c in peers_of(group).choices.values()]
    dist.destroy_process_group(group)
    return found


def traced(folder: str, schedule: str) -> dict[str, Any]:
    """A traced step: what the trace holds, and whether the products lie beside the transfers."""
    group = dist.new_group()
    n = dist.get_world_size()
    x = torch.randn(16384, 256, requires_grad=True)
    weight = torch.randn(256, 256, requires_grad=True)
    path = Path(folder) / f"{schedule}.json"
    dist.barrier(group)  # a rank that comes late finds everything there
    with trace(path) as recorded:
        y = all_gather_matmul(x, weight, group, schedule=schedule, num_subslices=1 if schedule == "plain" else 2)
        y.sum().backward()
    written = json.loads(path.with_name(f"{schedule}.rank{dist.get_rank()}.json").read_text())
    events = [event for event in written["traceEvents"] if event["ph"] == "X"]
    forward = [s for s in recorded.spans if s.operation == "all_gather_matmul"]
    products = [s for s in forward if s.what == "product"]
    payload = re.compile(r"(sending to|receiving from) rank \d \((8192|16384), 1, 256\)")
    payloads = [s for s in forward if s.what == "transfer" and payload.match(s.name)]
    beside = any(p.start_s < t.end_s and t.start_s < p.end_s for p in products for t in payloads)
    calls = recorded.calls()
    untraced = torch.equal(y, all_gather_matmul(x, weight, group, schedule=schedule))
    (record, *_) = report(group).records
    dist.destroy_process_group(group)
    return {
        "events": len(events) == len(recorded.spans) > 0,
        "products": len(products),
        "payloads": len(payloads),
        "beside": beside,
        "operations": [call.operation for call in calls],
        "exposed": abs(sum(call.exposed_s for call in calls) - recorded.exposed_s()) < 1e-9,
        "sums": all(call.products_s > 0 and call.transfers_s > 0 for call in calls) if n > 1 else True,
        "equal": untraced,
        "record": (record.operation, record.schedule, record.num_calls),
    }


def products_of_a_backward() -> tuple[float, float]:
    """Of a column layer's backward that gathers again: seconds of products and waits, and from first to last."""
    x, weight = torch.randn(2048, 256, requires_grad=True), torch.randn(512, 256, requires_grad=True)
    y = all_gather_matmul(x, weight, dist.group.WORLD, keep_gathered=False, num_subslices=2)
    with trace() as recorded:
        y.sum().backward()
    spans = [span for span in recorded.spans if span.what in ("product", "wait")]
    lasted = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    assert sum(span.what == "product" for span in spans) == 3 * dist.get_world_size() - 1
    return sum(span.seconds for span in spans), lasted


def empty_products(seconds: float, differ: float) -> tuple[str, int]:
    """The choice where one rank has no product, and the trials of its launches differ by much."""
    group = dist.new_group()
    rank, trials = dist.get_rank(), Counter[tuple[str, int]]()

    def timed(call: Call, run: Any) -> tuple[float, float]:
        run()
        way = run.args[0].schedule, run.args[0].num_subslices
        trials[way] += 1
        product = seconds if rank == 0 else differ * (trials[way] - 1)
        waits = 0.8 * seconds if way == ("plain", 1) else 0.0
        return product + waits, waits

    with mock.patch.object(tuning, "_timed", timed):
        all_gather_matmul(torch.randn(8, 4), torch.randn(4 if rank == 0 else 0, 4), group, schedule="auto")
    (choice,) = peers_of(group).choices.values()
    dist.destroy_process_group(group)
    return choice.schedule, choice.num_subslices


def reducer_exposed() -> tuple[float, float, str]:
    """Seconds that `finish` was blocked, by the reducer and by the report."""
    group = dist.new_group()
    model = nn.Linear(64, 64)
    reducer = GradientReducer(model, group)
    loss = model(torch.randn(4, 64)).sum()
    time.sleep(0.05 if dist.get_rank() == 0 else 0.0)
    loss.backward()
    reducer.finish()
    reducer.close()
    records = [r for r in report(group).records if r.operation == "gradient reduction"]
    table = str(report(group))
    exposed = sum(r.exposed_s for r in records)
    dist.destroy_process_group(group)
    return reducer.exposed_s, exposed, table


def replicate_is_measured() -> list[str]:
    group = dist.new_group()
    x, w = torch.randn(6, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (y,) = replicate_matmul(x, [w], group, schedule="auto")
        y.sum().backward()
    found = [key[0] for key in peers_of(group).choices]
    dist.destroy_process_group(group)
    return found
