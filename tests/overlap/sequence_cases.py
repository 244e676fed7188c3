"""What every rank does in long runs: many operations, random pauses, several groups, poisoned buffers."""

import random
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from stretto.overlap import all_gather_matmul, matmul_all_reduce_start, matmul_reduce_scatter
from stretto.overlap.p2p import Call, Peers, peers_of
from stretto.overlap.transfers import Transfer
from tests.overlap import attention_cases, gradient_cases, matmul_cases

OPERATIONS = (
    matmul_cases.column,
    matmul_cases.row,
    matmul_cases.all_reduce,
    matmul_cases.replicate,
    matmul_cases.weight_gather,
)


def random_case(draw: random.Random, num_ranks: int) -> dict[str, Any]:
    rows = [draw.randrange(5) for _ in range(num_ranks)]
    inner = draw.choice([(), (2,)])
    return {
        "rows": rows,
        "inner": inner,
        "dim": draw.randint(0, len(inner)),
        "k": draw.randint(1, 3),
        "features": [[draw.randint(1, 3) for _ in rows] for _ in range(draw.randint(1, 2))],
        "bias": draw.random() < 0.5,
        "needs": (1, 1, 1),
        "sizes": draw.choice(["given", "exchange"]),
        "schedule": draw.choice(["direct", "ring"]),
        "num_subslices": draw.choice([1, 2, 4]),
        "keep_gathered": draw.random() < 0.5,
        "seed": draw.randrange(10**6),
    }


def random_attention(draw: random.Random, num_ranks: int) -> dict[str, Any]:
    kv_heads = draw.randint(num_ranks, num_ranks + 2)
    return {
        "rows": [draw.randrange(4) for _ in range(num_ranks - 1)] + [1],
        "batch": 1,
        "heads": kv_heads * draw.randint(1, 2),
        "kv_heads": kv_heads,
        "fused": draw.random() < 0.5,
        "causal": draw.random() < 0.5,
        "mask": draw.choice(["none", "keys"]),
        "started": draw.random() < 0.5,
        "recompute": draw.random() < 0.5,
        "by_hand": False,
        "schedule": draw.choice(["direct", "plain"]),
        "num_subslices": draw.choice([1, 2, 4]),
        "seed": draw.randrange(10**6),
    }


def random_reduction(draw: random.Random) -> dict[str, Any]:
    last = draw.choice([[], ["first"], ["first", "out"]])
    return {"bucket_bytes": draw.choice([1, 300]), "last": last, "average": True, "seed": draw.randrange(10**6)}


def random_operation(draw: random.Random, num_ranks: int) -> None:
    """A product, an attention or a reduction, its forward and its backward, beside what one process computes."""
    kind = draw.randrange(len(OPERATIONS) + 3)
    if kind < len(OPERATIONS):
        case = random_case(draw, num_ranks)
        case["schedule"] = draw.choice([case["schedule"], case["schedule"], "plain", "auto"])
        OPERATIONS[kind](case)
    elif kind == len(OPERATIONS):
        attention_cases.ulysses(random_attention(draw, num_ranks))
    elif kind == len(OPERATIONS) + 1:
        attention_cases.query_split(random_attention(draw, num_ranks))
    else:
        draw.choice([gradient_cases.summed, gradient_cases.late_bound])(random_reduction(draw))


def random_sequences(first_seed: int, num_sequences: int) -> None:
    """Each sequence is the same on every rank; each rank pauses when it likes."""
    pause = random.Random(dist.get_rank())
    start = Call._start

    def late_start(call: Call, messages: Any, wire: Any) -> Transfer:
        if pause.random() < 0.2:
            time.sleep(pause.random() * 0.004)
        return start(call, messages, wire)

    with mock.patch.object(Call, "_start", late_start):
        for seed in range(first_seed, first_seed + num_sequences):
            draw = random.Random(seed)
            for _ in range(draw.randint(1, 3)):
                random_operation(draw, dist.get_world_size())


def two_groups(seed: int) -> None:
    """Rows and columns of a 2 x N/2 mesh and the world: operations of one in flight beside others'."""
    rank, n = dist.get_rank(), dist.get_world_size()
    halves = [dist.new_group(list(range(0, n // 2))), dist.new_group(list(range(n // 2, n)))]
    pairs = [dist.new_group([i, i + n // 2]) for i in range(n // 2)]
    half, pair = halves[rank // (n // 2)], pairs[rank % (n // 2)]
    x, w = torch.ones(5, 2), torch.ones(3, 2)
    for index in range(8):
        draw = random.Random(seed + index)
        pending = matmul_all_reduce_start(x, w, half)
        draw.choice(OPERATIONS)(random_case(draw, 2), pair)
        draw.choice(OPERATIONS)(random_case(draw, n // 2), half)
        draw.choice(OPERATIONS)(random_case(draw, n))
        assert torch.equal(pending.wait(), torch.full((5, 3), float(n)))
    assert peers_of(half) is not peers_of(pair)
    for group in (*halves, *pairs):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def two_models(seed: int) -> None:
    """Two graphs on one group, their forwards and backwards interleaved."""
    group, n = dist.group.WORLD, dist.get_world_size()
    torch.manual_seed(seed)
    weights = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    x = torch.randn(3, 4, dtype=torch.float64)

    def losses() -> list[torch.Tensor]:
        hidden = [all_gather_matmul(x, w, group) for w in weights[::2]]
        return [matmul_reduce_scatter(h, w, group).square().sum() for h, w in zip(hidden, weights[1::2])]

    first, second = losses()
    second.backward()
    first.backward()
    for loss, pair in zip(losses(), (weights[:2], weights[2:])):
        alone = torch.autograd.grad(loss, pair)
        for grad, weight in zip(alone, pair):
            assert torch.equal(grad, weight.grad), n


def poisoned(seed: int, num_cases: int) -> None:
    """Every buffer is filled with nan when its call lets go of it; results must not notice."""
    released = []

    def poison(call: Call, buffer: torch.Tensor) -> None:
        released.append(buffer.numel())
        buffer.fill_(float("nan"))

    with mock.patch.object(Call, "release", poison):
        for index in range(num_cases):
            draw = random.Random(seed + index)
            draw.choice(OPERATIONS)(random_case(draw, dist.get_world_size()))
            attention_cases.ulysses(random_attention(draw, dist.get_world_size()))
            attention_cases.query_split(random_attention(draw, dist.get_world_size()))
    assert sum(released) > 0


def buffers_of_transfers() -> None:
    """No transfer is forgotten: what was started was waited for, and nothing is left when a call ends."""
    started: list[Transfer] = []
    waited: list[Transfer] = []
    start, wait = Call._start, Call.wait

    def note_start(call: Call, messages: Any, wire: Any) -> Transfer:
        started.append(start(call, messages, wire))
        return started[-1]

    def note_wait(call: Call, transfer: Transfer) -> None:
        waited.append(transfer)
        wait(call, transfer)

    with mock.patch.object(Call, "_start", note_start), mock.patch.object(Call, "wait", note_wait):
        for operation in OPERATIONS:
            operation(random_case(random.Random(7), dist.get_world_size()))
    assert {id(t) for t in started} == {id(t) for t in waited}
    assert len(started) == len(waited)
    assert not peers_of(dist.group.WORLD).unfinished


def most_in_flight(schedule: str, num_subslices: int) -> int:
    """The largest number of payload elements that are posted and not yet waited for, headers left out."""
    most = now = 0
    start, wait = Call._start, Call.wait

    def payload(transfer: Transfer) -> int:
        return sum(t.numel() for _, t, _ in transfer.messages if t.dtype != torch.uint8)

    def note_start(call: Call, messages: Any, wire: Any) -> Transfer:
        nonlocal most, now
        transfer = start(call, messages, wire)
        now += payload(transfer)
        most = max(most, now)
        return transfer

    def note_wait(call: Call, transfer: Transfer) -> None:
        nonlocal now
        wait(call, transfer)
        now -= payload(transfer)

    with mock.patch.object(Call, "_start", note_start), mock.patch.object(Call, "wait", note_wait):
        x, w = torch.ones(8 * dist.get_world_size(), 4), torch.ones(2, 4)
        matmul_reduce_scatter(x, w, dist.group.WORLD, schedule=schedule, num_subslices=num_subslices)
    return most


def state_goes_with_its_group() -> None:
    import gc

    from stretto.overlap import p2p

    gc.collect()
    before = len(p2p._peers)
    group = dist.new_group()
    peers = peers_of(group)
    assert isinstance(peers, Peers)
    assert len(p2p._peers) == before + 1
    del peers
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert len(p2p._peers) == before
