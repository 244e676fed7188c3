"""The loss of one trained step, the same for every schedule.

A schedule decides when this is differentiated and with which advantage, never what it is. On-policy the ratio is
exactly 1 (one forward serves both log-probabilities), the clip is inactive, and the gradient is -A * d log_prob.
The KL term carries no advantage; it is a loss of its own. Source: GRPO; Flow-GRPO; GRPO-Guard (arXiv 2510.22319).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from stretto.policy.sde import Process

__all__ = ["Objective", "StepLoss", "TrainedStep", "step_loss"]


@dataclass(frozen=True)
class Objective:
    """What is minimised: clipped ratio, KL to the reference, Guard; see the fields of `stretto.config.Objective`."""

    clip_range: float = 1e-4
    kl_beta: float = 0.0
    kl_convention: Literal["flow_grpo", "wan"] = "flow_grpo"
    guard: bool = False


@dataclass
class TrainedStep:
    """What a rollout stores of a trained transition: enough to run it again.

    steps: (B,) int64 on the CPU, the transition of each row.
    latents, latents_next, mean: (B, *latent_shape) float32; `mean` is the rollout policy's.
    log_prob: (B,) under the rollout policy.
    reference_velocity: (B, *latent_shape), or None without KL.
    cotangent: (B,) norm of the loss's gradient with respect to the velocity, once it is known.
    counts: (B,) float64, 0 for rows that are run but are no term of the loss; None where all count.
    """

    steps: Tensor
    latents: Tensor
    latents_next: Tensor
    mean: Tensor
    log_prob: Tensor
    reference_velocity: Tensor | None = None
    cotangent: Tensor | None = None
    counts: Tensor | None = None

    def rows(self, index: Tensor) -> "TrainedStep":
        """The same for the rows in `index` alone."""
        reference = self.reference_velocity
        return TrainedStep(
            self.steps[index.cpu()],
            self.latents[index],
            self.latents_next[index],
            self.mean[index],
            self.log_prob[index],
            None if reference is None else reference[index],
            counts=None if self.counts is None else self.counts[index.cpu()],
        )

    @staticmethod
    def cat(parts: "list[TrainedStep]") -> "TrainedStep":
        """Rows of several records in one."""
        references = [p.reference_velocity for p in parts if p.reference_velocity is not None]
        counts = [torch.ones(len(p.steps)).double() if p.counts is None else p.counts for p in parts]
        return TrainedStep(
            torch.cat([p.steps for p in parts]),
            torch.cat([p.latents for p in parts]),
            torch.cat([p.latents_next for p in parts]),
            torch.cat([p.mean for p in parts]),
            torch.cat([p.log_prob for p in parts]),
            torch.cat(references) if references else None,
            counts=torch.cat(counts) if any(p.counts is not None for p in parts) else None,
        )


class StepLoss(NamedTuple):
    """Losses of B rows and what is logged of those that count; (B,) each, the last two of as many as count."""

    policy: Tensor
    kl: Tensor | None
    ratio: Tensor
    log_prob_difference: Tensor


def step_loss(
    process: Process, objective: Objective, step: TrainedStep, velocity: Tensor, advantages: Tensor
) -> StepLoss:
    """Clipped policy loss and KL of B rows, differentiable in `velocity` (B, *latent_shape).

    `advantages`: (B,), carrying every factor that scales the policy loss (a schedule may pass 1 and scale the
    gradient later). The KL comes without its weight. Rows may be at different transitions.
    """
    mean = process.mean(step.latents, velocity, step.steps)
    log_prob = process.log_prob(mean, step.latents_next, step.steps)
    difference = log_prob - step.log_prob
    advantages = advantages.to(log_prob)
    if step.counts is not None:
        advantages = advantages * step.counts.to(advantages)
    exponent = difference
    if objective.guard:
        b, power, weight = process.guard(mean, step.mean, step.steps)
        exponent, advantages = (difference + b) * power, advantages * weight
    ratio = exponent.exp()
    clipped = ratio.clamp(1 - objective.clip_range, 1 + objective.clip_range)
    policy = torch.maximum(-advantages * ratio, -advantages * clipped)
    kl = None
    if step.reference_velocity is not None:
        reference = process.mean(step.latents, step.reference_velocity, step.steps)
        kl = process.kl(mean, reference, step.steps, objective.kl_convention)
    ratio, difference = ratio.detach(), difference.detach()
    if step.counts is None:
        return StepLoss(policy, kl, ratio, difference)
    counted = step.counts.to(ratio.device) != 0
    return StepLoss(policy, None if kl is None else kl * step.counts.to(kl), ratio[counted], difference[counted])
