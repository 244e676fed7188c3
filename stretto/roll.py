"""Prompt groups rolled out over the ranks, scored, and credited with their advantages.

Every data rank makes its samples of a wave; their rewards are gathered, so that every rank forms the same advantages;
each rank then gives its own samples theirs. While the rewards of one wave are computed the next is rolled out. The
hazard is a rank that runs more or fewer rollouts than another: where ranks must run in step, one without a sample
runs another's along, with weight 0 and no reward.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.build import Assembly
from stretto.config import Config
from stretto.policy import Batch, Trajectory
from stretto.policy.layout import Place, Round, Wave
from stretto.policy.schedules import Late, Schedule, UpdateStats
from stretto.ranks import Ranks
from stretto.reduction import Reduction
from stretto.rewards.behind import Pending, Scorer
from stretto.rewards.failures import RewardError, SkippedGroup

__all__ = ["Rolled", "Roller"]


@dataclass
class Rolled:
    """A part of a rollout with its advantages: what one optimizer step learns from.

    scale: what the loss of one sample and trained step counts. trajectories, advantages: of this rank's rollouts.
    rewards: (groups, samples, K) of every scored prompt group, on every rank. skipped: prompt groups without rewards.
    """

    scale: float
    trajectories: list[Trajectory] = field(default_factory=list)
    advantages: list[Tensor] = field(default_factory=list)
    rewards: list[Tensor] = field(default_factory=list)
    num_zero_spread: int = 0
    skipped: list[int] = field(default_factory=list)


@dataclass
class _Flight:
    """A wave that was rolled out and waits for its rewards.

    made: this rank's trajectory of every round, or a companion's, or None where it had no sample.
    """

    wave: Wave
    made: list[Trajectory | None] = field(default_factory=list)
    num_folded: int = 0


class Roller:
    """Rolls prompt groups out over the ranks."""

    def __init__(self, config: Config, run: Assembly, ranks: Ranks, reduction: Reduction, scorer: Scorer) -> None:
        self.config, self.ranks, self.scorer = config, ranks, scorer
        self.in_step, self.columns = reduction.in_step, reduction.columns
        self.adapter, self.policy, self.feed, self.rule = run.adapter, run.policy, run.feed, run.rule
        self.metadata_keys = list(run.prompts.metadata)

    def roll(self, iteration: int, prompts: range, schedule: Schedule, stats: UpdateStats | None) -> Rolled:
        """Roll these prompt groups out; with `stats`, also add their gradient as soon as their rewards are in."""
        rolled = Rolled(self.scale_of(prompts, iteration))
        rows = 1 if isinstance(schedule, Late) else self.config.sampling.samples_per_forward
        num_ranks, together = self.ranks.num_data_ranks, self.rule.std == "global"
        before: _Flight | None = None
        for wave in self.feed.waves(iteration, prompts, rows, num_ranks, together=together):
            flight = _Flight(wave)
            for number, batches in enumerate(wave.rounds, start=1):
                self._run(iteration, batches, flight, schedule)
                folds = self._folds(schedule, wave)
                if before is not None and (folds or number == len(wave.rounds)):
                    self._credit(before, schedule, rolled, stats)
                    before = None
                if folds:
                    self._fold(flight, schedule, up_to=number - 1)
            before = flight
            if not self.scorer.behind:
                self._credit(flight, schedule, rolled, stats)
                before = None
        if before is not None:
            self._credit(before, schedule, rolled, stats)
        return rolled

    def scale_of(self, prompts: range, iteration: int) -> float:
        """What the loss of one sample and trained step counts in an optimizer step over `prompts`."""
        if self.config.objective.reduction == "sum":
            return 1.0
        num_trained = sum(len(self.feed.trained_steps(iteration, prompt)) for prompt in prompts)
        return 1 / (num_trained * self.config.prompts.samples)

    def _run(self, iteration: int, batches: Round, flight: _Flight, schedule: Schedule) -> None:
        """Make this rank's samples of a round; their rewards are then on their way."""
        places = batches[self.ranks.data_rank]
        made = None
        if places:
            made = schedule.rollout(self.feed.batch(iteration, places), self._score)
        elif self.in_step:
            other = self.feed.batch(iteration, next(batch for batch in batches if batch))
            made = schedule.rollout(replace(other, is_companion=True), self._no_score)
        elif isinstance(schedule, Late):
            schedule.idle()
        flight.made.append(made)

    def _credit(self, flight: _Flight, schedule: Schedule, rolled: Rolled, stats: UpdateStats | None) -> None:
        """Gather a wave's rewards and give every sample its advantage."""
        if self._folds(schedule, flight.wave):
            self._fold(flight, schedule, up_to=len(flight.wave.rounds))
        made = [trajectory for trajectory in flight.made if trajectory is not None]
        advantages = self._advantages(flight.wave, self._gathered(made), rolled)
        values = [self._values(trajectory.batch, advantages) for trajectory in made]
        if stats is not None and isinstance(schedule, Late):
            weights = self._round_weights(flight.wave, advantages)
            stats.merge(schedule.update(made, values, rolled.scale, rounds=weights))
        elif stats is not None:
            stats.merge(schedule.update(made, values, rolled.scale))
        rolled.trajectories += made
        rolled.advantages += values

    def _values(self, batch: Batch, advantages: Mapping[Place, float]) -> Tensor:
        """The advantages of a batch's rows, (B,) float64; zeros of a companion's."""
        rows = [0.0 if batch.is_companion else advantages[Place(key.prompt, key.sample)] for key in batch.samples]
        return torch.tensor(rows, dtype=torch.float64)

    def _score(self, batch: Batch, latents: Tensor) -> Pending | Tensor:
        """Decode and judge: (B, K) raw rewards, float64, when they are asked for."""
        if not self.ranks.speaks:
            return self._no_score(batch, latents)
        with self.policy.stopwatch.phase("decode"):
            media = self.adapter.decode(latents)
        names = [f"{key.sample} of prompt group {key.prompt} (iteration {key.iteration})" for key in batch.samples]
        metadata = {key: [row[key] for row in batch.metadata] for key in self.metadata_keys}
        return self.scorer.submit(media, list(batch.prompts), names, metadata)

    def _no_score(self, batch: Batch, latents: Tensor) -> Tensor:
        """Of samples that another rank scores."""
        return torch.zeros(len(batch.samples), len(self.rule.weights), dtype=torch.float64)

    def _gathered(self, trajectories: Iterable[Trajectory]) -> dict[Place, list[float] | None]:
        """The rewards of these trajectories and of those that the other ranks give; None of a sample without.

        Raises RewardError on every rank where a reward failed on one.
        """
        mine: dict[Place, list[float] | None] = {}
        failure: RewardError | None = None
        own = [t for t in trajectories if not t.batch.is_companion and self.ranks.speaks]
        for trajectory in own:
            rows: Sequence[list[float] | None] = [None] * len(trajectory.batch.samples)
            try:
                with self.policy.stopwatch.phase("reward"):
                    rows = trajectory.rewards.tolist()
            except SkippedGroup:
                pass
            except RewardError as error:
                failure = failure or error
            mine |= {Place(key.prompt, key.sample): row for key, row in zip(trajectory.batch.samples, rows)}
        with self.policy.stopwatch.phase("gather_rewards"):
            told = None if failure is None else (failure.reward, failure.sample, None, failure.problem)
            parts = self.ranks.gather((mine, told))
        if failure is not None:
            raise failure
        for _, theirs in parts:
            if theirs is not None:
                raise RewardError(*theirs) from dist.DistError("another rank raised it")
        return {place: row for part, _ in parts for place, row in part.items()}

    def _advantages(
        self, wave: Wave, rewards: Mapping[Place, list[float] | None], rolled: Rolled
    ) -> dict[Place, float]:
        """The advantage of every sample of a wave; exactly 0 in a prompt group that was skipped."""
        num_samples = self.config.prompts.samples
        assert len(rewards) == len(wave.prompts) * num_samples
        places = {prompt: [Place(prompt, sample) for sample in range(num_samples)] for prompt in wave.prompts}
        whole = [prompt for prompt in wave.prompts if all(rewards[place] is not None for place in places[prompt])]
        rolled.skipped += [prompt for prompt in wave.prompts if prompt not in whole]
        advantages = dict.fromkeys(rewards, 0.0)
        if not whole:
            return advantages
        rows = [[rewards[place] for place in places[prompt]] for prompt in whole]
        by_group = torch.tensor(rows, dtype=torch.float64)
        result = self.rule(by_group)
        rolled.rewards.append(by_group)
        rolled.num_zero_spread += int(result.zero_spread.sum())
        for prompt, values in zip(whole, result.values.tolist()):
            advantages |= dict(zip(places[prompt], values))
        return advantages

    def _round_weights(self, wave: Wave, advantages: Mapping[Place, float]) -> Tensor:
        """(rounds, ranks of the reduction) float64: what every rank's sample of every round is worth."""
        weights = [[advantages[batch[0]] if batch else 0.0 for batch in batches] for batches in wave.rounds]
        return torch.tensor(weights, dtype=torch.float64)[:, self.columns]

    def _folds(self, schedule: Schedule, wave: Wave) -> bool:
        """Whether a wave's gradients are folded round by round, as rewards come in."""
        may_skip = self.config.scoring.on_failure == "skip"
        is_long = len(wave.prompts) == 1 and len(wave.rounds) > 1
        return isinstance(schedule, Late) and schedule.folds and is_long and not may_skip

    def _fold(self, flight: _Flight, schedule: Schedule, *, up_to: int) -> None:
        """Fold the rounds before `up_to` that are not yet: their rewards are in, or waited for."""
        assert isinstance(schedule, Late)
        for number in range(flight.num_folded, up_to):
            made = flight.made[number]
            rewards = self._gathered([] if made is None else [made])
            batches = flight.wave.rounds[number]
            rows = [rewards[batch[0]] if batch else [0.0] * len(self.rule.weights) for batch in batches]
            has_sample = torch.tensor([bool(batch) for batch in batches])
            values = torch.tensor(rows, dtype=torch.float64)
            schedule.fold_round(values[self.columns], has_sample[self.columns])
        flight.num_folded = max(flight.num_folded, up_to)
