"""What every rank does in the tests of wires: the library's operations staged through buffers, as on a device."""

import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.overlap import OverlapWarning, all_gather_matmul, p2p, trace
from stretto.overlap.p2p import Call, Peers, peers_of
from stretto.overlap.staged import HostCopies, Staged
from stretto.overlap.wires import HOST, Direct, Wire, staged_wire
from tests.overlap import attention_cases, choice_cases, fault_cases, gradient_cases, matmul_cases

CASES = {
    name: getattr(module, name)
    for module, names in (
        (matmul_cases, ("column", "row", "all_reduce", "replicate", "weight_gather")),
        (attention_cases, ("ulysses", "query_split")),
        (gradient_cases, ("summed", "sharded", "late_bound", "hook")),
        (fault_cases, ("fail_and_stay", "disagree")),
        (choice_cases, ("traced",)),
    )
    for name in names
}
_opened: "weakref.WeakKeyDictionary[Peers, dict[torch.device, Wire]]" = weakref.WeakKeyDictionary()


def open_staged(
    group: dist.ProcessGroup, rank: int, world_size: int, backends: dict[str, str], device: torch.device
) -> Staged:
    assert device == HOST
    return staged_wire(group, rank, world_size, backends, HostCopies())


def poison(self: object, buffer: Tensor) -> None:
    buffer.fill_(float("nan") if buffer.is_floating_point() else -1)


@contextmanager
def staged() -> Iterator[None]:
    """Host tensors go the way of a device's; what a call or a wire lets go of is poisoned."""
    peers = peers_of(dist.group.WORLD)
    before, peers.wires = peers.wires, _opened.setdefault(peers, {})
    releases = (mock.patch.object(Call, "release", poison), mock.patch.object(Staged, "release", poison))
    try:
        with mock.patch.object(p2p, "open_wire", open_staged), releases[0], releases[1]:
            yield
    finally:
        peers.wires = before


def run_staged(name: str, *args: Any) -> Any:
    with staged():
        return CASES[name](*args)


def sends_wait_for_their_product() -> tuple[float, bool]:
    """Seconds that a call took to post, and whether the message came before its copy was let go."""
    let_go = threading.Event()

    class Slow:
        def __init__(self, copy: Any) -> None:
            self.copy = copy

        def synchronize(self) -> None:
            let_go.wait(20)
            self.copy.synchronize()

    class SlowCopies(HostCopies):
        def leave(self, tensor: Tensor, buffer: Tensor) -> Any:
            return Slow(super().leave(tensor, buffer))

    group = dist.new_group()
    peers = peers_of(group)
    wire = staged_wire(group, peers.rank, peers.world_size, peers.backends, SlowCopies())
    out, into, peer = torch.zeros(3), torch.zeros(3), 1 - peers.rank
    start = time.perf_counter()
    works = wire.post([("receiving from", into, peer), ("sending to", out, peer)])
    posted_s = time.perf_counter() - start
    out += 1 + peers.rank  # the product ends after the send was posted
    let_go.set()
    for work in works:
        wire.end(work)
        early = bool(into.any())
        wire.settle(work)
        assert not early or work.leaving is not None
    dist.destroy_process_group(group)
    return posted_s, torch.equal(into, torch.full((3,), 1.0 + peer))


def companion() -> list[str]:
    """A group that carries no host tensors: headers and payloads go to its companion."""
    group, n = dist.new_group(backend="cuda:gloo"), dist.get_world_size()
    peers = peers_of(group)
    x, w = torch.full((2, 3), 1.0 + peers.rank), torch.ones(1, 3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            y = all_gather_matmul(x, w, group, sizes="exchange")
    expected = torch.tensor([3.0 * (1 + rank) for rank in range(n) for _ in range(2)]).unsqueeze(1)
    assert torch.equal(y, expected)
    assert set(peers.wires) == {HOST, "words"}
    assert isinstance(peers.wires[HOST], Direct)
    dist.destroy_process_group(group)
    return [str(w.message) for w in said if issubclass(w.category, OverlapWarning)]


def words_of_devices() -> list[str]:
    """Where headers beside tensors of a device live, by backend."""
    peers, device = Peers(dist.group.WORLD), torch.device("cuda", 0)
    found = []
    for backends in ({"cuda": "nccl"}, {"cpu": "gloo", "cuda": "gloo"}, {"cuda": "other"}):
        peers.backends = backends
        found.append(str(peers.words(device)))
    return found


def traced_with_wires() -> bool:
    """A traced call over staged messages gives what an untraced one does."""
    x, w = torch.arange(6.0).view(2, 3) + dist.get_rank(), torch.ones(2, 3)
    with staged():
        untraced = all_gather_matmul(x, w, dist.group.WORLD)
        with trace() as recorded:
            traced = all_gather_matmul(x, w, dist.group.WORLD)
    transfers = [span for span in recorded.spans if span.what == "transfer"]
    return torch.equal(traced, untraced) and len(transfers) == 4 * (dist.get_world_size() - 1)
