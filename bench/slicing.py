"""What the library is compared with: slicing, and compute beside bytes that nobody needs.

Slicing in k cuts a tensor in k chunks and moves each beside the product of its neighbour (Megatron, MindSpeed
CoC). Chunks go by direct sends, which on gloo are faster than its collectives; k = 1 is no overlap at all. To
its advantage a chunk holds rows of every rank, side by side, so that a chunk is one product and nothing is
copied, and there are no headers. The hazard is a sum in the order of arrival: here it is by rank.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.overlap.queries import Attention

__all__ = ["Sends", "beside", "slice_columns", "slice_gather", "slice_queries", "slice_reduction", "slice_scatter"]

Run = Callable[[], Any]


class Sends:
    """Direct messages to and from every peer, and the seconds spent waiting for them."""

    exposed_s = 0.0

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.world_size = group, dist.get_rank(group), dist.get_world_size(group)
        self.peers = [(self.rank + hop) % self.world_size for hop in range(1, self.world_size)]

    def post(self, out: Callable[[int], Tensor], into: Callable[[int], Tensor]) -> list[dist.Work]:
        """Send `out(peer)` to every peer and receive `into(peer)` from it."""
        batch = []
        for hop in range(1, self.world_size):
            to, source = (self.rank + hop) % self.world_size, (self.rank - hop) % self.world_size
            batch.append(dist.P2POp(dist.irecv, into(source), group=self.group, group_peer=source))
            batch.append(dist.P2POp(dist.isend, out(to), group=self.group, group_peer=to))
        return dist.batch_isend_irecv(batch) if batch else []

    @classmethod
    def wait(cls, works: Sequence[dist.Work]) -> None:
        start = time.perf_counter()
        for work in works:
            work.wait()
        cls.exposed_s += time.perf_counter() - start


def beside(sends: Sends, num_bytes: int, compute: Run) -> Run:
    """`compute` while `num_bytes`, equally divided, go to the peers and come from them unneeded."""
    size = num_bytes // max(1, len(sends.peers))
    out, into = (torch.zeros(sends.world_size, size, dtype=torch.uint8) for _ in range(2))

    def run() -> None:
        works = sends.post(out.__getitem__, into.__getitem__)
        compute()
        sends.wait(works)

    return run


def slice_gather(sends: Sends, own: Tensor, k: int, product: Callable[[int, Tensor], Any]) -> None:
    """Gather `own` (rows, wide) in chunks; `product(chunk, gathered)` gets (world_size * rows / k, wide)."""
    chunks = own.chunk(k)
    gathered = [own.new_empty(sends.world_size, *chunk.shape) for chunk in chunks]
    works = sends.post(lambda _: chunks[0], lambda peer: gathered[0][peer])
    for c, (mine, place) in enumerate(zip(chunks, gathered)):
        place[sends.rank] = mine
        sends.wait(works)
        if c + 1 < k:
            works = sends.post(lambda _, c=c: chunks[c + 1], lambda peer, c=c: gathered[c + 1][peer])
        product(c, place.flatten(0, 1))


def slice_scatter(sends: Sends, shape: tuple[int, int], k: int, product: Callable[[int], Tensor]) -> Tensor:
    """Sum over ranks the chunks (world_size * rows / k, wide) of `product(chunk)`: own (rows, wide) of `shape`."""
    total = torch.empty(shape).chunk(k)
    under_way: list[tuple[list[dist.Work], Tensor, dict[int, Tensor]]] = []
    for c in range(k):
        partial = product(c).view(sends.world_size, -1, shape[1])
        into = {peer: torch.empty_like(partial[peer]) for peer in sends.peers}
        works = sends.post(lambda peer, p=partial: p[peer], lambda peer, i=into: i[peer])
        under_way.append((works, partial, into))
    for place, (works, partial, into) in zip(total, under_way):
        sends.wait(works)
        place.copy_(partial[sends.rank])
        for peer in sends.peers:
            place += into[peer]
    return torch.cat(total) if k > 1 else total[0]


def slice_columns(sends: Sends, x: Tensor, weight: Tensor, k: int) -> None:
    """Ulysses before attention: chunks of own rows times the weight (N, features of a rank, K), by owner."""
    n = sends.world_size
    rows, width = x.shape[0], weight.shape[1]
    out = x.new_empty(k, n, rows // k, width)
    works = []
    for c, mine in enumerate(x.chunk(k)):
        made = [mine @ weight[peer].t() for peer in range(n)]
        out[c, sends.rank] = made[sends.rank]
        works += sends.post(made.__getitem__, lambda peer, c=c: out[c, peer])
    sends.wait(works)


def slice_queries(sends: Sends, q: Tensor, k_: Tensor, v: Tensor, k: int, attention: Attention) -> None:
    """Ulysses after attention: chunks of every owner's queries, q (batch, heads, rows, d), to their owners."""
    n = sends.world_size
    batch, heads, rows, d = q.shape
    received = q.new_empty(k, n, rows // n // k, batch * heads * d)
    works = []
    for c, queries in enumerate(q.chunk(k, 2)):
        out = attention(queries, k_, v, None).permute(2, 0, 1, 3).reshape(n, rows // n // k, -1)
        received[c, sends.rank] = out[sends.rank]
        works += sends.post(out.__getitem__, lambda peer, c=c: received[c, peer])
    sends.wait(works)
    received.permute(0, 2, 1, 3).reshape(rows // n, -1)


def slice_reduction(sends: Sends, layers: Sequence[nn.Linear], k: int, backward: Run) -> Run:
    """Gradients in k buckets of layers, each sent to the owners of its shards as soon as backward made it."""
    weights = [layer.weight for layer in reversed(layers)]
    per = len(weights) // k
    state: dict[str, Any] = {"count": 0, "under_way": []}

    def send(_: Tensor) -> None:
        state["count"] += 1
        if state["count"] % per:
            return
        grads = [w.grad for w in weights[state["count"] - per : state["count"]]]
        flat = torch.cat([g.flatten() for g in grads if g is not None]).view(sends.world_size, -1)
        into = {peer: torch.empty_like(flat[peer]) for peer in sends.peers}
        works = sends.post(flat.__getitem__, into.__getitem__)
        state["under_way"].append((works, flat, into))

    for weight in weights:
        weight.register_post_accumulate_grad_hook(send)

    def run() -> list[Tensor]:
        state.update(count=0, under_way=[])
        backward()
        for works, flat, into in state["under_way"]:
            sends.wait(works)
            for peer in sends.peers:
                flat[sends.rank] += into[peer]
        return [flat for _, flat, _ in state["under_way"]]

    return run
