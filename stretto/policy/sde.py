"""The ODE step and the four stochastic steps, all over any velocity.

Every step's mean is linear in the latent and the velocity, mean = a*x + b*v, so that a `Process` is a table of
scalars, made once in float64 and cast: no formula is evaluated in the latents' dtype and Dance-SDE's cancellation
does not happen. The hazard is `std`: it is the diffusion coefficient of the paper (KL and Guard use it), while
`noise_std` is the standard deviation of the noise that is added, std*sqrt(-dt) (std itself for CPS).
Source: Flow-GRPO (arXiv 2505.05470), DanceGRPO (2505.07818), CPS (2509.05952), their published code.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Dynamics", "Process"]

Dynamics = Literal["flow_sde", "dance_sde", "cps", "wan_flow_sde"]


@dataclass(frozen=True)
class _Step:
    """The scalars of one transition, float64."""

    latent: float
    velocity: float
    std: float
    noise_std: float


class Process:
    """A sigma schedule with its dynamics: means, noise and log-probabilities of T transitions.

    Args:
        sigmas: (T + 1,) noise levels, falling from 1 to 0.
        dynamics: which stochastic step.
        noise_level: a (flow_sde, cps) or eta (dance_sde); unused by wan_flow_sde.
        noise_untrained: keep the noise on steps that are not trained; else they are ODE steps.

    Row i of every (B, ...) argument is at transition `steps[i]` ((B,) int64, on the CPU), so rows of different
    steps share a call.
    """

    def __init__(
        self,
        sigmas: Tensor | Sequence[float],
        dynamics: Dynamics,
        noise_level: float = 0.7,
        *,
        noise_untrained: bool = False,
    ) -> None:
        values = torch.as_tensor(sigmas, dtype=torch.float64)
        falls = values.ndim == 1 and len(values) > 1 and bool((values.diff() < 0).all())
        if not falls or float(values[0]) > 1 or float(values[-1]) < 0:
            raise ValueError(f"sigmas must fall strictly, from at most 1 to at least 0, got {values.tolist()}")
        if dynamics == "cps" and not 0 < noise_level <= 1:
            raise ValueError(f"noise_level = {noise_level}: cps takes a level in (0, 1]")
        self.sigmas, self.dynamics, self.noise_level = values, dynamics, noise_level
        self.noise_untrained = noise_untrained
        stochastic = [_stochastic_step(dynamics, values.tolist(), i, noise_level) for i in range(len(values) - 1)]
        self._stochastic = {
            name: torch.tensor([getattr(s, name) for s in stochastic], dtype=torch.float64)
            for name in ("latent", "velocity", "std", "noise_std")
        }
        self._dt = values.diff()

    @property
    def num_steps(self) -> int:
        """T, the number of transitions."""
        return len(self.sigmas) - 1

    def sigma(self, steps: Tensor, like: Tensor) -> Tensor:
        """The noise level that the network is fed at each row, (B,) in the dtype and on the device of `like`."""
        return self.sigmas[steps].to(like)

    def ode_mean(self, latents: Tensor, velocity: Tensor, steps: Tensor) -> Tensor:
        """x + v*dt, (B, *latent_shape)."""
        return latents + velocity * self._rows(self._dt, steps, latents)

    def mean(self, latents: Tensor, velocity: Tensor, steps: Tensor) -> Tensor:
        """The mean of the stochastic transition, (B, *latent_shape); differentiable in the velocity."""
        a = self._rows(self._stochastic["latent"], steps, latents)
        b = self._rows(self._stochastic["velocity"], steps, latents)
        return latents * a + velocity * b

    def noise_std(self, steps: Tensor, like: Tensor) -> Tensor:
        """Standard deviation of the added noise, (B, 1, ...) in the dtype of `like`."""
        return self._rows(self._stochastic["noise_std"], steps, like)

    def log_prob(self, mean: Tensor, latents_next: Tensor, steps: Tensor) -> Tensor:
        """Log-probability of `latents_next`, averaged over a sample's elements, (B,).

        CPS has no normaliser and no 1/std^2: its log-probability is -(x_next - mean)^2, averaged.
        """
        squared = (latents_next - mean).square().flatten(1).mean(dim=1)
        if self.dynamics == "cps":
            return -squared
        noise_std = self._stochastic["noise_std"][steps]
        scale = (1 / (2 * noise_std.square())).to(squared)
        offset = (noise_std.log() + 0.5 * math.log(2 * math.pi)).to(squared)
        return -squared * scale - offset

    def kl(self, mean: Tensor, mean_reference: Tensor, steps: Tensor, convention: str) -> Tensor:
        """mean((mean - mean_ref)^2) / (2 std^2), also divided by -dt under `wan`, (B,)."""
        squared = (mean - mean_reference).square().flatten(1).mean(dim=1)
        denominator = 2 * self._stochastic["std"][steps].square()
        if convention == "wan":
            denominator = denominator * -self._dt[steps]
        return squared / denominator.to(squared)

    def guard(self, mean: Tensor, mean_old: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """GRPO-Guard's correction b, ratio exponent sqrt(-dt)*std, and loss weight 1/(-dt); each (B,).

        Source: GRPO-Guard (arXiv 2510.22319). Refused for CPS, whose log-probability has no 1/std^2 to level.
        """
        if self.dynamics == "cps":
            raise ValueError("guard levels the 1/std^2 of a log-probability, which cps does not have; turn it off")
        squared = (mean - mean_old).square().flatten(1).mean(dim=1)
        noise_std = self._stochastic["noise_std"][steps]
        b = squared / (2 * noise_std.square()).to(squared)
        return b, noise_std.to(squared), (1 / -self._dt[steps]).to(squared)

    def on_policy_cotangent(self, noise: Tensor, steps: Tensor) -> Tensor:
        """-d log_prob / d velocity at the point that was sampled, in closed form; (B, *latent_shape).

        Known as soon as the noise is drawn, hence an exact oracle for every schedule.
        """
        b, noise_std = self._stochastic["velocity"][steps], self._stochastic["noise_std"][steps]
        scale = -2 * b * noise_std if self.dynamics == "cps" else -b / noise_std
        scale = scale / noise[0].numel()
        return noise * scale.to(noise).view(-1, *[1] * (noise.ndim - 1))

    def check_trained(self, trained_steps: Sequence[int]) -> None:
        """Refuse trained steps that add no noise: their log-probability does not exist."""
        for step in trained_steps:
            if not self._stochastic["noise_std"][step] > 0:
                raise ValueError(
                    f"trained step {step} of {self.num_steps} adds no noise under {self.dynamics} "
                    f"(noise_level = {self.noise_level}); leave it out of trained_steps or raise noise_level"
                )

    def _rows(self, table: Tensor, steps: Tensor, like: Tensor) -> Tensor:
        return table[steps].to(like).view(-1, *[1] * (like.ndim - 1))


def _stochastic_step(dynamics: Dynamics, sigmas: Sequence[float], step: int, noise_level: float) -> _Step:
    sigma, sigma_next = sigmas[step], sigmas[step + 1]
    dt = sigma_next - sigma
    if dynamics == "cps":
        std = sigma_next * math.sin(noise_level * math.pi / 2)
        rest = math.sqrt(max(sigma_next**2 - std**2, 0.0))
        return _Step(1 - sigma_next + rest, -sigma * (1 - sigma_next) + (1 - sigma) * rest, std, std)
    match dynamics:
        case "flow_sde":
            std = noise_level * math.sqrt(sigma / (1 - (sigmas[1] if sigma == 1 else sigma)))
        case "dance_sde":
            std = noise_level
        case "wan_flow_sde":
            std = sigmas[-1] + (sigmas[1] - sigmas[-1]) * sigma
        case _:
            raise ValueError(f"dynamics = {dynamics!r}: choose flow_sde, dance_sde, cps or wan_flow_sde")
    k = std**2 / (2 * sigma)
    return _Step(1 + k * dt, (1 + k * (1 - sigma)) * dt, std, std * math.sqrt(-dt))
