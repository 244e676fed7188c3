"""The numbers of autograd nodes that wait: lower than those of all others, so that autograd comes to them last.

Autograd runs the ready node of the greatest number, and numbers the nodes of a thread as they are made. Waits are
numbered among themselves. The hazard: whether a wait is above another node must not depend on what a rank's autograd
made before, or ranks would communicate in different orders. So all other nodes of a thread that has met a group have
a lead, which every wait's own nodes keep. Source: torch's engine, which compares sequence numbers.
"""

import threading
from typing import Any

import torch
from torch import Tensor

__all__ = ["keep_lead", "wait_late"]

_LEAD = 1 << 12
"""As many waits as a graph may have."""


class _Numbers(threading.local):
    next = 0
    has_lead = False


_numbers = _Numbers()


def keep_lead() -> None:
    """Before a thread's first operation on a group, some milliseconds once: nodes made after this are above waits."""
    if _numbers.has_lead:
        return
    _numbers.has_lead = True
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros((), requires_grad=True, device="cpu")
        for _ in range(_LEAD):
            x.view(())


def wait_late(out: Tensor) -> None:
    """Number the node that made `out`, if any, among the waits: the newest of them comes first, on every rank."""
    keep_lead()  # of a thread that meets a group which another has met
    node: Any = out.grad_fn
    if node is not None:
        node._set_sequence_nr(_numbers.next)
        _numbers.next += 1
