"""Per-sample gradients of the trained weights, from one backward over a batch.

One backward of a batch mixes its samples, and the mixture cannot be undone. Inside `PerSampleGradients` the linear
layers that train keep their samples apart: the weight's gradient of sample m is dY_m^T X_m, one batched product
that costs what the summed one costs; biases and the scales of norms are sums over a sample's tokens. The hazard is
a layer whose rows are not samples: every trained layer must see rows on dim 0, row r belonging to sample r % B
(classifier-free guidance stacks its branches). What is not covered is named by `uncovered`, and the caller falls
back to one sample a forward. Exact under reuse of a module and non-reentrant activation checkpointing. Source of
the product: Goodfellow, "Efficient per-example gradient computations" (arXiv 1510.01799).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["PerSampleGradients"]


class PerSampleGradients:
    """Patches the trained layers of `module` while active; collects gradients by parameter.

    Only parameters in `parameters` (by name) that require a gradient are collected. Layers whose parameters are
    all frozen are left alone.
    """

    def __init__(self, module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        trained = {id(p): name for name, p in parameters.items() if p.requires_grad}
        self._layers: list[tuple[nn.Module, Any]] = []
        covered: set[int] = set()
        for layer in () if _is_compiled(module) else module.modules():
            own = {name: p for name, p in layer.named_parameters(recurse=False) if id(p) in trained}
            forward = _patched(layer, self) if own else None
            if forward is not None:
                self._layers.append((layer, forward))
                covered.update(id(p) for p in own.values())
        self.uncovered = [name for key, name in trained.items() if key not in covered]
        self.num_samples = 0
        self.is_collecting = False
        self._gradients: dict[int, Tensor] = {}

    @contextmanager
    def active(self, num_samples: int) -> Iterator[None]:
        """Patch the layers and enable gradients, for a forward of `num_samples` samples and its backward."""
        assert not self.uncovered
        self.num_samples = num_samples
        for layer, forward in self._layers:
            layer.forward = forward
        try:
            with torch.enable_grad():
                yield
        finally:
            for layer, _ in self._layers:
                del layer.forward

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Backwards inside add to the per-sample gradients and leave `.grad` alone; outside they are ordinary."""
        self.is_collecting = True
        try:
            yield
        finally:
            self.is_collecting = False

    def take(self, parameters: list[nn.Parameter]) -> list[Tensor | None]:
        """The gradients collected so far, (B, *parameter.shape) each, or None where none arrived; starts again."""
        gradients = [self._gradients.get(id(p)) for p in parameters]
        self._gradients.clear()
        return gradients

    def add_product(self, weight: nn.Parameter, grad_output: Tensor, inputs: Tensor) -> None:
        """Add dY_m^T X_m of every sample; grad_output (R, ..., out), inputs (R, ..., in)."""
        left, right = self._by_sample(grad_output), self._by_sample(inputs)
        dtype = weight.dtype
        for dy, x in zip(left, right):
            into = self._gradients.get(id(weight))
            if into is not None and dy.dtype == dtype:
                into.baddbmm_(dy.transpose(1, 2), x)
                continue
            product = torch.bmm(dy.transpose(1, 2), x).to(dtype)
            self._gradients[id(weight)] = product if into is None else into.add_(product)

    def add_sum(self, parameter: nn.Parameter, grad_output: Tensor) -> None:
        """Add the sum of grad_output (R, ..., d) over each sample's tokens, for a bias or a scale of shape (d,)."""
        for part in self._by_sample(grad_output):
            total = part.to(parameter.dtype).sum(dim=1)
            into = self._gradients.get(id(parameter))
            self._gradients[id(parameter)] = total if into is None else into.add_(total)

    def _by_sample(self, tensor: Tensor) -> tuple[Tensor, ...]:
        rows = tensor.shape[0]
        if rows == self.num_samples and tensor.ndim == 3:
            return (tensor,)
        if tensor.ndim < 2 or rows % self.num_samples:
            raise RuntimeError(
                f"a trained layer saw {rows} rows in a batch of {self.num_samples} samples, so its gradient cannot "
                "be told apart by sample; set sampling.samples_per_forward = 1"
            )
        return tensor.reshape(rows, -1, tensor.shape[-1]).split(self.num_samples)


def _is_compiled(module: nn.Module) -> bool:
    """Whether any part runs compiled code, which does not see a patched forward."""
    return any(
        getattr(m, "_compiled_call_impl", None) or type(m).__name__ == "OptimizedModule" for m in module.modules()
    )


def _patched(layer: nn.Module, gradients: PerSampleGradients) -> Any:
    """A forward for `layer` that tells its samples apart, or None where the kind of layer is not covered."""
    own = dict(layer.named_parameters(recurse=False))
    if not set(own) <= {"weight", "bias"} or "forward" in vars(layer):
        return None
    if type(layer) is nn.Linear:
        return lambda x: _linear(gradients, layer, x)
    if _is_norm(layer) and all(p.ndim == 1 for p in own.values()):
        original = type(layer).forward
        return lambda x, *args, **kwargs: _norm(gradients, layer, original, own, x, *args, **kwargs)
    return None


def _is_norm(layer: nn.Module) -> bool:
    """Norms over the last dim, linear in their scale: torch's own, and diffusers' by name, which is not imported."""
    kind = type(layer)
    if kind.__module__ == "diffusers.models.normalization":
        return kind.__name__ in ("RMSNorm", "FP32LayerNorm")
    return kind in (nn.LayerNorm, nn.RMSNorm)


def _linear(gradients: PerSampleGradients, layer: nn.Linear, x: Tensor) -> Tensor:
    if not torch.is_autocast_enabled(x.device.type):
        output: Tensor = _Linear.apply(gradients, x, layer.weight, layer.bias)
        return output
    x = x.to(torch.get_autocast_dtype(x.device.type))
    with torch.autocast(x.device.type, enabled=False):
        output = _Linear.apply(gradients, x, layer.weight, layer.bias)
    return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.gradients, ctx.weight, ctx.bias = gradients, weight, bias
        ctx.save_for_backward(x)
        return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x,) = grad_outputs, ctx.saved_tensors
        _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dx = dy @ ctx.weight.to(dy.dtype) if needs_x else None
        if ctx.gradients.is_collecting:
            if needs_weight:
                ctx.gradients.add_product(ctx.weight, dy, x)
            if needs_bias:
                ctx.gradients.add_sum(ctx.bias, dy)
            return None, dx, None, None
        dy, x = dy.flatten(0, -2), x.flatten(0, -2)
        d_weight = (dy.T @ x).to(ctx.weight.dtype) if needs_weight else None
        d_bias = dy.sum(dim=0).to(ctx.bias.dtype) if needs_bias else None
        return None, dx, d_weight, d_bias


def _norm(
    gradients: PerSampleGradients,
    layer: nn.Module,
    original: Any,
    own: dict[str, Any],
    x: Tensor,
    *args: Any,
    **kw: Any,
) -> Tensor:
    """The norm without its scale and shift (it is linear in both), then these as ops that keep samples apart."""
    neutral = {name: torch.full_like(p, float(name == "weight")) for name, p in own.items()}
    for name, value in neutral.items():
        layer._parameters[name] = value  # type: ignore[assignment]
    try:
        output: Tensor = original(layer, x, *args, **kw)
    finally:
        layer._parameters.update(own)
    if "weight" in own:
        output = _Scale.apply(gradients, output, own["weight"])
    if "bias" in own:
        output = _Shift.apply(gradients, output, own["bias"])
    return output


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.gradients, ctx.weight = gradients, weight
        ctx.save_for_backward(x)
        return x * weight.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x,) = grad_outputs, ctx.saved_tensors
        dx = dy * ctx.weight.to(dy.dtype)
        if ctx.gradients.is_collecting:
            ctx.gradients.add_sum(ctx.weight, dy * x)
            return None, dx, None
        return None, dx, (dy * x).flatten(0, -2).sum(dim=0).to(ctx.weight.dtype)


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.gradients, ctx.bias = gradients, bias
        return x + bias.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grad_outputs
        if ctx.gradients.is_collecting:
            ctx.gradients.add_sum(ctx.bias, dy)
            return None, dy, None
        return None, dy, dy.flatten(0, -2).sum(dim=0).to(ctx.bias.dtype)
