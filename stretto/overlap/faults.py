"""What the ranks of a group tell each other when something disagrees or dies.

Before every payload a small header says what is coming; the receiver compares it with what it expects before
it posts the payload's receive. It must: on gloo a message longer than its receive aborts the receiving
process, uncatchably, and a shorter one is accepted in silence. A rank that fails writes one line to the
group's store by compare-and-set and reports the line it finds there, so that all ranks name the same first
cause. The hazard is a store whose host died with the fault: then each rank can only tell its own side.
"""

import struct
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Header", "PeerError"]

_MOST_DIMS = 6
_LAYOUT = struct.Struct(f"<7Bx2I2Q{_MOST_DIMS}q")
"""Places in the tables below and small counts, then step and sub-slices, call and gradients, then the shape."""
_FAULT, _REFUSED = "stretto/fault", "stretto/refused"
_NO_TAG = 1 << 20  # nothing is ever sent under this tag

_OPERATIONS = (
    "all_gather_matmul",
    "all_gather_matmul backward",
    "matmul_reduce_scatter",
    "matmul_reduce_scatter backward",
    "matmul_all_reduce",
    "replicate_matmul",
    "replicate_matmul backward",
    "matmul_all_to_all",
    "matmul_all_to_all backward",
    "attention_all_to_all",
    "attention_all_to_all backward",
    "attention_reduce_scatter",
    "attention_reduce_scatter backward",
    "gradient reduction",
    "parameter gather",
    "weight_gather_matmul",
    "weight_gather_matmul backward",
    "sizes",
    "shared weight rows",
    "shared weight rows backward",
    "packed weight columns",
    "packed weight columns backward",
    "vocab_embedding",
    "vocab_embedding backward",
    "vocab_cross_entropy",
    "split rows backward",
    "join rows",
    "replicated gradients",
    "modulation gradients",
    "adapter gradients",
    "features_rms_norms",
    "features_rms_norms backward",
)
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
_SCHEDULES = ("plain", "ring", "direct", "auto")
_LANES = ("sizes", "gather", "scatter")


class PeerError(RuntimeError):
    """Ranks disagreed, or one of them died or never came. The group cannot be used again."""


@dataclass(frozen=True)
class Header:
    """One payload's description, 80 bytes on the wire: as its receiver expects it, or the call fails."""

    operation: str
    call: int
    """The how-manieth call on this group."""
    lane: str
    """The loop within the call: "gather", "scatter", or "sizes" where shapes may still differ."""
    step: int
    shape: tuple[int, ...]
    """Of the whole slice, rows first."""
    dtype: torch.dtype
    num_subslices: int
    schedule: str
    gradients: tuple[bool, ...]
    """Which inputs of the operation need a gradient."""
    keep_gathered: bool = False

    def pack(self, device: torch.device) -> Tensor:
        """The header as a uint8 tensor of shape (80,)."""
        assert len(self.shape) <= _MOST_DIMS, self.shape
        packed = _LAYOUT.pack(
            _OPERATIONS.index(self.operation),
            _LANES.index(self.lane),
            _DTYPES.index(self.dtype),
            _SCHEDULES.index(self.schedule),
            len(self.gradients),
            self.keep_gathered,
            len(self.shape),
            self.step,
            self.num_subslices,
            self.call,
            sum(1 << i for i, needed in enumerate(self.gradients) if needed),
            *self.shape,
            *[0] * (_MOST_DIMS - len(self.shape)),
        )
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(device)

    @staticmethod
    def blank(device: torch.device) -> Tensor:
        """A buffer to receive a header into."""
        return torch.zeros(_LAYOUT.size, dtype=torch.uint8, device=device)

    @classmethod
    def unpack(cls, received: Tensor) -> "Header":
        """The inverse of `pack`; what no `pack` wrote raises `ValueError`."""
        words = _LAYOUT.unpack(bytes(received.tolist()))
        operation, lane, dtype, schedule, num_inputs, keep, ndim, step, num_subslices, call, bits, *shape = words
        try:
            return cls(
                operation=_OPERATIONS[operation],
                call=call,
                lane=_LANES[lane],
                step=step,
                shape=tuple(shape[:ndim]),
                dtype=_DTYPES[dtype],
                num_subslices=num_subslices,
                schedule=_SCHEDULES[schedule],
                gradients=tuple(bool(bits >> i & 1) for i in range(num_inputs)),
                keep_gathered=bool(keep),
            )
        except IndexError:
            raise ValueError(f"received a header that no rank of this version writes: {words}") from None

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.operation}, call {self.call}, {self.lane} step {self.step}, shape {self.shape}, {dtype}, "
            f"num_subslices={self.num_subslices}, {self.schedule}, gradients {self.gradients}, "
            f"keep_gathered={self.keep_gathered}"
        )

    def differences(self, other: "Header") -> list[str]:
        """The names of the fields in which two headers differ."""
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]


def enter(store: dist.Store, fault: str, call: int) -> str:
    """Enter `fault` as the group's first fault unless there is one; the entry that stands.

    Where another rank refused its input in the same call, before anything was sent, its refusal is the first
    cause.
    """
    try:
        refused = f"{_REFUSED}/{call}"
        if store.check([refused]):
            fault = store.get(refused).decode()
        return store.compare_set(_FAULT, "", fault).decode()
    except RuntimeError:
        return fault


def refuse(store: dist.Store, refusal: str, call: int) -> None:
    """Note for waiting peers that this rank raised in `call` before it sent anything."""
    try:
        store.compare_set(f"{_REFUSED}/{call}", "", refusal)
    except RuntimeError:
        return


def hang_up(backend: Any, rank: int, world_size: int) -> None:
    """Close this rank's connections, so that its peers fail now and not at the group's timeout (gloo only).

    gloo closes every pair of a context in which a wait timed out: so one receive that a peer, the first that is not
    gone, does not answer is timed out.
    """
    if backend.name() != "gloo":
        return
    for hop in range(1, world_size):
        try:
            work = backend.recv([torch.empty(1, device="cpu")], (rank + hop) % world_size, _NO_TAG)
        except RuntimeError:
            continue  # that peer is gone
        try:
            work.wait(timedelta(milliseconds=1))
        except RuntimeError:
            return
