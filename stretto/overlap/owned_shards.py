"""What a rank owns of the parameters that a reducer's ranks share out: shards out of whole tensors, and back.

One flat vector a bucket, in the sum's dtype. The hazard is a shard that is changed and not published: the others go
on with what they had. Source: ZeRO-1.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from torch import Tensor, nn

from stretto.overlap.buckets import Bucket, spread
from stretto.overlap.loops import sum_dtype
from stretto.overlap.p2p import Peers
from stretto.overlap.published import Published, shards_of, whole_of
from stretto.overlap.streams import Made, Worker, made

__all__ = ["OwnedShards"]


class OwnedShards:
    """The part of `GradientReducer` that knows shards of parameters."""

    owned: list[nn.Parameter]
    _buckets: list[Bucket]
    _parameters: list[Tensor]
    _peers: Peers
    _thread: Worker
    _published: Published
    _check: bool
    _awaited: Callable[["Future[Made]"], Tensor]

    def publish(self, *, wait: bool = False) -> None:
        """Send the own shards' new parameters to everyone, the first layers' first; sharded only.

        The next forward of each layer, and its state dict, wait for its parameters; `wait` waits for all here.
        """
        if not self.owned:
            raise ValueError("this rank owns no parameters to publish; make the reducer with sharded=True")
        self._published.send(self.owned, self._thread, self._peers, check=self._check)
        if wait:
            self._published.receive()

    def gather(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """What goes with `owned` (moments, averages), whole: one tensor a parameter in the module's order.

        Each shard is sent in its own dtype; parameters that are DTensors give DTensors.
        """
        submit, peers, pairs = self._thread.submit, self._peers, zip(self._buckets, shards)
        coming = [submit(b.device, spread, peers, b, made(s), check=self._check, dtype=s.dtype) for b, s in pairs]
        return whole_of(self._buckets, self._parameters, [self._awaited(future) for future in coming])

    def shards(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The way back from `gather`: a flat own shard a bucket; sends nothing."""
        return shards_of(self._buckets, self._parameters, values, self._peers.rank)

    def _wide_shards(self) -> list[Tensor]:
        shards = self.shards([p.detach() for p in self._parameters])
        return [shard.to(sum_dtype(shard.dtype)) for shard in shards]
