"""What an iteration cost: forwards and backwards counted at the transformer, seconds per phase, bytes kept.

Counts are rows at the transformer's top, taken by module hooks, so that a schedule cannot miscount its own work.
A guided forward carries two rows a sample; they are divided out and reported apart. The recomputation inside
activation checkpointing happens below the top and is not a forward. Seconds are exclusive: a backward inside the
rollout counts as backward. On CUDA they are what the host waited, without device-wide synchronisation.
"""

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["KeptBytes", "Stopwatch", "WorkCounter"]


class WorkCounter:
    """Counts rows through `module` by a hook, which goes when the counter goes.

    `forwards` (with gradient or without), `forwards_with_grad`, `backwards` and `reference_forwards` are per
    sample: rows divided by `rows_per_sample`.
    """

    def __init__(self, module: nn.Module, rows_per_sample: int = 1) -> None:
        self.rows_per_sample = rows_per_sample
        self.is_reference = False
        self._rows: dict[str, int] = defaultdict(int)
        this = weakref.ref(self)
        hook = module.register_forward_hook(lambda _module, _inputs, output: _count(this(), output))
        weakref.finalize(self, hook.remove)

    @contextmanager
    def reference(self, rows: int) -> Iterator[None]:
        """Inside, `rows` samples pass through the reference policy: this module with its adapter off, or a copy."""
        self.is_reference = True
        self._rows["reference_forwards"] += rows * self.rows_per_sample
        try:
            yield
        finally:
            self.is_reference = False

    def take(self) -> dict[str, float]:
        """Counts since the last call, per sample-row, and start again at zero."""
        counts = {
            name: self._rows[name] / self.rows_per_sample
            for name in ("forwards", "forwards_with_grad", "backwards", "reference_forwards")
        }
        counts["branches"] = self.rows_per_sample
        self._rows.clear()
        return counts

    def count(self, tensor: Tensor) -> None:
        """Count one forward by its output, and its backward by a hook on it."""
        rows = tensor.shape[0]
        if self.is_reference:
            return
        self._rows["forwards"] += rows
        if tensor.requires_grad:
            self._rows["forwards_with_grad"] += rows
            tensor.register_hook(lambda _: self._add_backward(rows))

    def _add_backward(self, rows: int) -> None:
        self._rows["backwards"] += rows


def _count(counter: WorkCounter | None, output: Any) -> None:
    if counter is not None:
        counter.count(next(t for t in tree_leaves(getattr(output, "sample", output)) if isinstance(t, Tensor)))


class Stopwatch:
    """Exclusive seconds per phase: entering an inner phase stops the outer one's clock.

    tell: called with the phase that begins, or goes on.
    """

    def __init__(self) -> None:
        self.tell: Callable[[str], None] = lambda _name: None
        self._seconds: dict[str, float] = defaultdict(float)
        self._running: list[str] = []
        self._since = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time inside to `name`."""
        self._charge()
        self._running.append(name)
        self.tell(name)
        try:
            yield
        finally:
            self._charge()
            self._running.pop()
            if self._running:
                self.tell(self._running[-1])

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call, and start again at zero."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._running:
            self._seconds[self._running[-1]] += now - self._since
        self._since = now


class KeptBytes:
    """Bytes that autograd keeps for a backward: unique storages seen by saved-tensor hooks.

    Storages in `excluded` (the weights) do not count. Use as a context around forwards; a storage that two of them
    keep counts once. total: bytes, known on leaving.
    """

    def __init__(self, excluded: list[Tensor]) -> None:
        with torch.no_grad():  # of a DTensor, this rank's part
            local = [getattr(t, "to_local", lambda t=t: t)() for t in excluded]
        self._excluded = {t.untyped_storage().data_ptr() for t in local}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._context: Any = None
        self.total = 0

    def __enter__(self) -> "KeptBytes":
        self._context = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)
        self._context.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        """Count, and let go: a hook that kept the storages would keep the graphs' memory."""
        self._context.__exit__(*exc)
        self._context = None
        self.total = sum(storage.nbytes() for storage in self._storages.values())
        self._storages.clear()

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if pointer and pointer not in self._excluded:
            self._storages[pointer] = storage
        return tensor
