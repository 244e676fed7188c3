"""The reduction as a hook of `DistributedDataParallel`: replicated gradients, each summed by its owner.

gloo's point-to-point works have no future, so one thread does the transfers and completes the futures that
DDP waits for. The hazard: the group must be the hook's own, not the one that DDP was made with.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.overlap.buckets import Bucket, spread, sum_in_order, trade_pieces
from stretto.overlap.inputs import can_overlap
from stretto.overlap.p2p import peers_of
from stretto.overlap.routes import Slices, slice_sizes
from stretto.overlap.streams import Worker, made

__all__ = ["ReductionThread", "reduce_bucket"]


class ReductionThread:
    """The state that `reduce_bucket` needs: a group of its own and the thread that uses it.

    Args:
        group: the same ranks as DDP's group, and used by nothing else.
        check: precede payloads by headers.
    """

    def __init__(self, group: dist.ProcessGroup, *, check: bool = True) -> None:
        self._peers, self._check = peers_of(group), check
        self._thread = Worker("stretto reduction")

    def start(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce one of DDP's buckets; the future holds its average over ranks, flat."""
        flat = bucket.buffer()
        can_overlap(self._peers, flat.device)  # or says why not
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
        sizes = Slices(tuple(slice_sizes(len(flat), self._peers.world_size)))
        whole = Bucket(list(bucket.parameters()), sizes)
        self._thread.submit(flat.device, self._average, whole, made(flat), future)
        return future

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _average(self, bucket: Bucket, flat: Tensor, future: torch.futures.Future[Tensor]) -> Tensor:
        peers = self._peers
        try:
            pieces = trade_pieces(peers, bucket, lambda peer: flat[bucket.slices.rows(peer)], check=self._check)
            shard = sum_in_order(pieces, peers.rank).div_(peers.world_size)
            flat = spread(peers, bucket, shard, check=self._check)
            future.set_result(flat)
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]
        return flat


def reduce_bucket(state: ReductionThread, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For `ddp.register_comm_hook(ReductionThread(group), reduce_bucket)`: averages over ranks.

    Every shard of a bucket goes straight to its owner, is summed there in a fixed order in float32 (float64
    for float64), and is sent back to every rank, bitwise the same on each.
    """
    return state.start(bucket)
