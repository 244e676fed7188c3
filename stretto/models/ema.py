"""A moving average of the trained weights, used for evaluation and saved beside them.

The hazard is a swap that does not come back whole: `swapped` exchanges storages and copies nothing, so the
live weights return bit for bit, whatever happens inside. Only sharded ones are copied: FSDP2 gathers from the storage
that it knows.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.overlap.buckets import local

__all__ = ["Ema"]


class Ema:
    """average <- d * average + (1 - d) * live, with d = min((1 + n) / (10 + n), decay) at update n = 1, 2, ...

    parameters: the live weights by name, kept by reference; the average has their dtype and device and starts
    as a copy. The growing d lets early updates forget the start (as TensorFlow's ExponentialMovingAverage).
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.parameters = dict(parameters)
        self.decay = decay
        self.num_updates = 0
        self.average = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the live weights, in place."""
        self.num_updates += 1
        decay = min((1 + self.num_updates) / (10 + self.num_updates), self.decay)
        live = [local(parameter.detach()) for parameter in self.parameters.values()]
        torch._foreach_lerp_([local(average) for average in self.average.values()], live, 1 - decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The live modules hold the average inside the context, and their own weights again after it."""
        live = {name: parameter.data for name, parameter in self.parameters.items()}
        copies = {name: local(data).clone() for name, data in live.items() if isinstance(data, DTensor)}
        try:
            for name, parameter in self.parameters.items():
                _put(parameter, self.average[name])
            yield
        finally:
            for name, parameter in self.parameters.items():
                _put(parameter, copies.get(name, live[name]))

    def state_dict(self) -> dict[str, Any]:
        """{"num_updates": int, "average": {name: tensor}}; the tensors are not copies."""
        return {"num_updates": self.num_updates, "average": dict(self.average)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of the same names and shapes, else raise ValueError and change nothing."""
        average: Mapping[str, Tensor] = state["average"]
        expected = {name: tuple(tensor.shape) for name, tensor in self.average.items()}
        found = {name: tuple(tensor.shape) for name, tensor in average.items()}
        if found != expected:
            odd = sorted(dict(found.items() ^ expected.items()))[0]
            raise ValueError(f"the EMA belongs to another model: {odd} is {found.get(odd)}, not {expected.get(odd)}")
        for name, tensor in self.average.items():
            tensor.copy_(average[name])
        self.num_updates = int(state["num_updates"])


@torch.no_grad()
def _put(parameter: nn.Parameter, value: Tensor) -> None:
    if isinstance(parameter, DTensor):
        parameter.to_local().copy_(local(value))
    else:
        parameter.data = value
