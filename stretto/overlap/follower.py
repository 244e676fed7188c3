"""A row layer's last half in flight behind another module: tensor parallelism without sequence sharding.

An all-reduce is a scatter, which its own product hides, and a gather, which nothing in the layer hides. Where
the next module does not read the layer's output, as in blocks that run attention and MLP side by side, the
gather is left in flight until that module, the follower, returns. The hazard: code that reads the output
before then reads what has not arrived.
"""

from typing import Any

from torch import Tensor, nn

from stretto.overlap.pending import Pending

__all__ = ["Follower"]


class Follower:
    """What is in flight behind one module, of which it is told by the row layer."""

    def __init__(self, module: nn.Module) -> None:
        self._pending: Pending | None = None
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after, always_call=True)

    def behind(self, pending: Pending) -> Tensor:
        """Leave `pending` in flight; its tensor is complete when the module has returned."""
        self._wait()
        self._pending = pending
        return pending.out

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self._pending is None:
            return
        arriving = self._pending.out.untyped_storage().data_ptr()
        for given in (*args, *kwargs.values()):
            if isinstance(given, Tensor) and given.untyped_storage().data_ptr() == arriving:
                self._wait()
                return

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._wait()

    def _wait(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait()
