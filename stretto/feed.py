"""What an iteration asks for: which prompts, in which batches, with which trained steps.

A pure function of the config and the iteration's number, so that there is no state to save. A prompt group is an
index: two equal prompts of one iteration are two groups.
"""

from collections.abc import Sequence

import torch

from stretto.config import Config
from stretto.models.base import Adapter
from stretto.policy import Batch, Condition, SampleKey, TrainedStepsRule
from stretto.policy.layout import Place, Wave, waves
from stretto.policy.noise import generator
from stretto.prompts import Prompts

__all__ = ["Feed"]


KEPT_CONDITIONS = 256


class Feed:
    """The batches of every iteration of a run."""

    def __init__(self, config: Config, adapter: Adapter, prompts: Prompts, steps_rule: TrainedStepsRule) -> None:
        self.config, self.adapter, self.prompts, self.steps_rule = config, adapter, prompts, steps_rule
        self._conditions: dict[str, Condition] = {}

    def waves(
        self, iteration: int, prompts: range, num_rows: int, num_ranks: int = 1, *, together: bool
    ) -> list[Wave]:
        """Which rank makes which samples of these prompt groups in which round, at most `num_rows` a forward."""
        trained = {prompt: self.trained_steps(iteration, prompt) for prompt in prompts}
        return waves(trained, self.config.prompts.samples, num_rows, num_ranks, together=together)

    def first_wave(self) -> list[Batch]:
        """The batches of the run's first wave, as one rank makes them."""
        rows = self.config.sampling.samples_per_forward
        first = self.waves(0, range(self.config.prompts.per_iteration), rows, together=False)[0]
        return [self.batch(0, batches[0]) for batches in first.rounds]

    def trained_steps(self, iteration: int, prompt: int) -> tuple[int, ...]:
        """The trained steps of one prompt group."""
        return self.steps_rule.draw(self.config.run.seed, self.config.sampling.steps, iteration, prompt)

    def batch(self, iteration: int, places: Sequence[Place]) -> Batch:
        """The rows of one forward: their keys, prompts, conditions and trained steps."""
        order = self.prompt_order(iteration)
        chosen = [order[place.prompt] for place in places]
        texts = [self.prompts.texts[i] for i in chosen]
        conditions = [self._condition(text) for text in texts]
        return Batch(
            tuple(SampleKey(iteration, place.prompt, place.sample) for place in places),
            {name: torch.cat([c[name] for c in conditions]) for name in conditions[0]},
            self.trained_steps(iteration, places[0].prompt),
            tuple(texts),
            tuple({key: column[i] for key, column in self.prompts.metadata.items()} for i in chosen),
        )

    def prompt_order(self, iteration: int) -> list[int]:
        """Which prompt each group of an iteration asks for: passes over all prompts, each in a fresh order."""
        count, total = self.config.prompts.per_iteration, len(self.prompts.texts)
        result = []
        for position in range(iteration * count, (iteration + 1) * count):
            turn, place = divmod(position, total)
            if self.config.prompts.shuffle:
                order = torch.randperm(total, generator=generator(self.config.run.seed, "prompt_order", turn))
                place = int(order[place])
            result.append(place)
        return result

    def _condition(self, text: str) -> Condition:
        """The prompt encoded, one row; the last texts are kept, so that a group's is encoded once."""
        if text not in self._conditions:
            if len(self._conditions) >= KEPT_CONDITIONS:
                del self._conditions[next(iter(self._conditions))]
            self._conditions[text] = self.adapter.encode([text])
        return self._conditions[text]
