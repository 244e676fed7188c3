"""A rollout: noise becomes a sample in T transitions, some of which carry gradient.

`roll` is the one loop of the room. What happens at a trained step (store it, keep its graph, backpropagate it at
once) is the schedule's; the latent handed to the next step is always detached, so no graph spans two steps. Latents
are float32 throughout and log-probabilities are those of the stored latents: with bf16 latents the ratio is biased.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stretto.policy.loss import Objective, TrainedStep
from stretto.policy.noise import Noise, SampleKey
from stretto.policy.sde import Process
from stretto.policy.work import Stopwatch, WorkCounter

__all__ = [
    "Batch",
    "Condition",
    "NonFiniteError",
    "Policy",
    "Score",
    "Scored",
    "Trajectory",
    "Velocity",
    "roll",
]

Condition = dict[str, Tensor]
"""What the model is conditioned on; every tensor is (B, ...), row i for sample i."""

Velocity = Callable[[Tensor, Tensor, Condition], Tensor]
"""(latents (B, *latent_shape) float32, sigma (B,) float32, condition) -> velocity (B, *latent_shape) float32."""


class NonFiniteError(ValueError):
    """A latent or log-probability that is not a finite number; names step, sample and dtype."""


@dataclass(frozen=True)
class Batch:
    """The samples of one forward: B rows that share their trained steps.

    prompts: one text a row; condition: (B, ...) tensors; trained_steps: S, ascending.
    is_companion: run so that this rank stays in lockstep with the others, and no term of any loss or statistic.
    """

    samples: tuple[SampleKey, ...]
    condition: Condition
    trained_steps: tuple[int, ...]
    prompts: tuple[str, ...] = ()
    metadata: tuple[dict[str, Any], ...] = ()
    is_companion: bool = False

    def row(self, i: int) -> "Batch":
        """Row i as a batch of its own."""
        condition = {name: value[i : i + 1] for name, value in self.condition.items()}
        return Batch(
            self.samples[i : i + 1],
            condition,
            self.trained_steps,
            self.prompts[i : i + 1],
            self.metadata[i : i + 1],
            self.is_companion,
        )


@dataclass
class Trajectory:
    """What a rollout leaves behind.

    latents: (B, *latent_shape) float32 at sigma 0. steps: one record for each trained step, ascending.
    scored: the rewards, or what gives them when they are asked for. policy_version: of the weights that made it.
    kept: the schedule's own. collection: names the rollouts between two resets of the schedule.
    """

    batch: Batch
    latents: Tensor
    steps: list[TrainedStep]
    scored: "Tensor | Scored"
    policy_version: int
    kept: Any = None
    collection: int = 0

    @property
    def rewards(self) -> Tensor:
        """(B, K) float64, raw; waited for where they are still computed."""
        return self.scored if isinstance(self.scored, Tensor) else self.scored.result()


class Scored(Protocol):
    """Rewards that are on their way."""

    def result(self) -> Tensor:
        """(B, K) float64, waited for."""


Score = Callable[[Batch, Tensor], Tensor | Scored]
"""(batch, latents at sigma 0) -> rewards (B, K) float64: decode and judge, owned by the caller."""


@dataclass
class Policy:
    """A flow model as RL sees it.

    velocity: the model. parameters: what is trained, by name. process: its transitions. objective: the loss.
    module: the network that `velocity` calls (for counting and for per-sample gradients).
    reference: the reference policy's velocity, without gradient; needed with KL.
    autocast: compute dtype, or None. rows_per_sample: 2 under classifier-free guidance.
    in_lockstep: every forward and backward is run, also one whose gradient is known to be zero: where ranks shard the
    weights, each takes part in all of them. around_backward: a context for each backward of a step whose advantage
    is known: where gradients are summed over ranks at every step.
    """

    velocity: Velocity
    parameters: dict[str, nn.Parameter]
    process: Process
    objective: Objective
    noise: Noise
    module: nn.Module
    reference: Velocity | None = None
    autocast: torch.dtype | None = None
    rows_per_sample: int = 1
    in_lockstep: bool = False
    around_backward: Callable[[], AbstractContextManager[Any]] = nullcontext
    counter: WorkCounter = field(init=False)
    _num_moves: int = field(init=False, default=0)
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    def __post_init__(self) -> None:
        if not self.parameters:
            raise ValueError("nothing to train: no parameter of the policy requires a gradient")
        if self.objective.kl_beta and self.reference is None:
            raise ValueError(f"kl_beta = {self.objective.kl_beta} needs a reference policy")
        dropping = [n for n, m in self.module.named_modules() if isinstance(m, _Dropout) and m.p > 0 and m.training]
        if dropping:
            raise ValueError(
                f"dropout is active in {dropping[0]} ({len(dropping)} layers): two forwards of the same weights "
                "would differ and no ratio be 1; call module.eval() or set its probability to 0"
            )
        if self.objective.guard and self.process.dynamics == "cps":
            raise ValueError("guard levels the 1/std^2 of a log-probability, which cps does not have; turn it off")
        self.counter = WorkCounter(self.module, self.rows_per_sample)

    @property
    def device(self) -> torch.device:
        """Where the trained parameters are."""
        return next(iter(self.parameters.values())).device

    @property
    def version(self) -> int:
        """Names the trained weights as they are: in-place changes, exchanged storages and `moved` change it.

        What changes a parameter behind autograd's back is not seen (a fused optimizer, `p.data.add_`): call `moved`.
        """
        parameters = list(self.parameters.values())
        with torch.no_grad():  # of a DTensor, this rank's part; an empty one has no storage to keep
            local = [getattr(p, "to_local", lambda p=p: p)() for p in parameters]
        storages = [t.untyped_storage()._cdata for t in local if t.numel()]
        return hash((self._num_moves, *(p._version for p in parameters), *storages))

    def has_gradient(self, advantages: Tensor, *, with_kl: bool = True) -> bool:
        """Whether rows with these advantages (B,) are differentiated: some have a gradient, or all ranks do it."""
        return self.in_lockstep or bool(advantages.any()) or (with_kl and bool(self.objective.kl_beta))

    def moved(self) -> None:
        """Say that the weights were changed: gradients made before are then refused."""
        self._num_moves += 1

    def forward(self, latents: Tensor, steps: Tensor, condition: Condition) -> Tensor:
        """Velocity of B rows at transitions `steps` ((B,) on the CPU), float32, in the ambient grad mode."""
        sigma = self.process.sigma(steps, latents)
        with self._autocast():
            return self.velocity(latents, sigma, condition)

    def forward_reference(self, latents: Tensor, steps: Tensor, condition: Condition) -> Tensor:
        """The reference policy's velocity, without gradient."""
        assert self.reference is not None
        sigma = self.process.sigma(steps, latents)
        with torch.no_grad(), self._autocast(), self.counter.reference(len(latents)):
            return self.reference(latents, sigma, condition)

    def _autocast(self) -> Any:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)


_Dropout = nn.modules.dropout._DropoutNd


class AtTrainedStep(Protocol):
    """What a schedule does at a trained step."""

    def during(self, index: int, batch: Batch) -> AbstractContextManager[Any]:
        """Holds around the forward of the `index`-th trained step and around `trained`: sets the grad mode."""

    def trained(self, index: int, step: TrainedStep, velocity: Tensor, batch: Batch) -> None:
        """Take the velocity (with its graph if tracked) and the record of the `index`-th trained step."""


def roll(policy: Policy, batch: Batch, at: AtTrainedStep) -> tuple[Tensor, list[TrainedStep]]:
    """Run T transitions of B samples; returns the latents at sigma 0 and the records of the trained steps.

    Runs exactly T forwards a sample (and, with KL, one of the reference at each trained step). Trained steps draw
    noise; the others are ODE steps unless the process keeps noise on them.
    """
    process = policy.process
    process.check_trained(batch.trained_steps)
    with policy.stopwatch.phase("rollout"):
        latents = policy.noise.initial(batch.samples).to(policy.device)
        records: list[TrainedStep] = []
        finite: list[Tensor] = []
        for i in range(process.num_steps):
            steps = torch.full((len(batch.samples),), i)
            if i in batch.trained_steps:
                latents = _trained(policy, batch, latents, steps, at, records)
            else:
                latents = _untrained(policy, batch, latents, steps)
            finite.append(latents.flatten(1).isfinite().all(dim=1))
        _require_finite(torch.stack(finite), batch.samples, latents.dtype)
    return latents, records


def _trained(
    policy: Policy,
    batch: Batch,
    latents: Tensor,
    steps: Tensor,
    at: AtTrainedStep,
    records: list[TrainedStep],
) -> Tensor:
    index = len(records)
    with at.during(index, batch):
        velocity = policy.forward(latents, steps, batch.condition)
        records.append(_record(policy, batch, latents, velocity.detach(), steps))
        at.trained(index, records[index], velocity, batch)
    return records[index].latents_next


@torch.no_grad()
def _untrained(policy: Policy, batch: Batch, latents: Tensor, steps: Tensor) -> Tensor:
    process = policy.process
    velocity = policy.forward(latents, steps, batch.condition)
    if not process.noise_untrained:
        return process.ode_mean(latents, velocity, steps)
    noise = policy.noise.step(batch.samples, int(steps[0])).to(latents)
    return process.mean(latents, velocity, steps) + process.noise_std(steps, latents) * noise


@torch.no_grad()
def _record(policy: Policy, batch: Batch, latents: Tensor, velocity: Tensor, steps: Tensor) -> TrainedStep:
    process = policy.process
    mean = process.mean(latents, velocity, steps)
    noise = policy.noise.step(batch.samples, int(steps[0])).to(latents)
    latents_next = mean + process.noise_std(steps, latents) * noise
    log_prob = process.log_prob(mean, latents_next, steps)
    reference = None
    if policy.objective.kl_beta:
        reference = policy.forward_reference(latents, steps, batch.condition)
    counts = torch.zeros(len(steps), dtype=torch.float64) if batch.is_companion else None
    return TrainedStep(steps, latents, latents_next, mean, log_prob, reference, counts=counts)


def _require_finite(finite: Tensor, samples: Sequence[SampleKey], dtype: torch.dtype) -> None:
    """`finite` is (T, B); looked at once a rollout, so that no step waits for the device."""
    if bool(finite.all()):
        return
    step, row = (~finite).nonzero()[0].tolist()
    key = samples[row]
    raise NonFiniteError(
        f"sample {key.sample} of prompt group {key.prompt} (iteration {key.iteration}) is not finite after "
        f"step {step} in {dtype}; lower optimizer.lr or sampling.noise_level, or drop autocast"
    )
