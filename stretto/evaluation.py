"""Evaluation: fixed prompts, fixed noise, the ODE, the averaged weights.

The same pictures are drawn each time, so that grids and figures compare across iterations and runs. The judge is
another than the reward where the recipe names one: a reward that rises while the judge falls is being exploited.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stretto.build import Assembly, build_device, build_scoring, build_sigmas
from stretto.config import Config
from stretto.models.ema import Ema
from stretto.policy import KeyedNoise, SampleKey, ode
from stretto.prompts import Prompts
from stretto.ranks import Ranks
from stretto.reduction import Reduction
from stretto.rewards import load_judge
from stretto.rewards.behind import Scorer
from stretto.rewards.scoring import judge

__all__ = ["Evaluation", "Evaluator"]

MAX_PROMPTS = 10
EVALUATION = -1
"""The iteration that keys evaluation's noise."""


@dataclass(frozen=True)
class Evaluation:
    """Figures, and the pictures they are of.

    media: (P * M, ...) in [0, 1], M samples of each prompt in a row.
    """

    figures: dict[str, float]
    media: Tensor
    prompts: list[str]


class Evaluator:
    """Draws `evaluation.samples` samples of each evaluation prompt over the ranks; the first one judges them."""

    def __init__(self, config: Config, run: Assembly, ranks: Ranks, reduction: Reduction) -> None:
        self.ranks, self.reduction = ranks, reduction
        self.config, self.adapter, prompts = config, run.adapter, run.prompts
        self.scorer = Scorer(run.rewards, behind=False, scoring=build_scoring(config))
        self.texts, self.metadata = _chosen(config.evaluation.prompts, prompts)
        if config.evaluation.every and config.evaluation.prompts:
            self.adapter.encode(self.texts)  # one that the model does not know is told before anything is written
        self.judge = load_judge(config.evaluation.judge) if config.evaluation.judge else None
        self.sigmas = build_sigmas(config, run.adapter, config.evaluation.steps or config.sampling.steps)
        self.noise = KeyedNoise(config.run.seed, run.adapter.latent_shape)
        self.weights = torch.tensor([reward.weight for reward in config.rewards], dtype=torch.float64)

    def is_due(self, finished: int) -> bool:
        """Whether to evaluate after `finished` iterations."""
        every = self.config.evaluation.every
        return every > 0 and (finished % every == 0 or finished == self.config.run.iterations)

    def evaluate(self, ema: Ema | None) -> Evaluation:
        """Draw with the averaged weights (the live ones where there are none) and judge.

        Raises RewardError or JudgeError, the same on every rank; services are asked again as in training.
        """
        count = self.config.evaluation.samples
        keys = [SampleKey(EVALUATION, p, m) for p in range(len(self.texts)) for m in range(count)]
        with torch.no_grad(), self.reduction.averaged(ema):
            media = self._drawn(_chunks(keys, self.config.sampling.samples_per_forward))
        return Evaluation(self.ranks.on_first(lambda: self._figures(keys, media)), media, list(self.texts))

    def _drawn(self, chunks: list[list[SampleKey]]) -> Tensor:
        """The pictures of all chunks, dealt to the ranks; all draw equally often, so that they stay in step."""
        number, mine = self.ranks.num_data_ranks, {}
        for start in range(0, len(chunks), number):
            place = start + self.ranks.data_rank
            if place < len(chunks):
                mine[place] = self._draw(chunks[place])
            elif self.reduction.in_step:
                self._draw(chunks[start])
        drawn = {place: media for part in self.ranks.gather(mine) for place, media in part.items()}
        return torch.cat([drawn[place] for place in sorted(drawn)])

    def _figures(self, keys: list[SampleKey], media: Tensor) -> dict[str, float]:
        texts = [self.texts[key.prompt] for key in keys]
        names = [f"{key.sample} of evaluation prompt {key.prompt}" for key in keys]
        metadata = {name: [column[key.prompt] for key in keys] for name, column in self.metadata.items()}
        rewards = self.scorer.submit(media, texts, names, metadata).result()
        figures = {"reward": float((rewards * self.weights).sum(dim=1).mean())}
        figures |= {f"reward/{name}": float(rewards[:, k].mean()) for k, name in enumerate(self.scorer.rewards)}
        if self.judge is not None:
            judged = judge(self.config.evaluation.judge, self.judge, media, texts)
            figures |= {f"judge/{name}": value for name, value in judged.items()}
        return figures

    def _draw(self, keys: list[SampleKey]) -> Tensor:
        latents = self.noise.initial(keys).to(build_device(self.config))
        condition = self.adapter.encode([self.texts[key.prompt] for key in keys])
        with torch.autocast(latents.device.type, torch.bfloat16, enabled=self.config.model.autocast != "none"):
            latents = ode(self.adapter.velocity, self.sigmas, latents, condition)
        return self.adapter.decode(latents).cpu()


def _chosen(texts: list[str], prompts: Prompts) -> tuple[list[str], dict[str, list[Any]]]:
    """The evaluation prompts and their metadata: the first of the file by index, or those named by text.

    Raises ValueError for a named one that is not in a file whose columns the rewards may read.
    """
    places: list[int | None] = [*range(len(prompts.texts))][:MAX_PROMPTS]
    if texts:
        places = [prompts.texts.index(text) if text in prompts.texts else None for text in texts]
        strangers = [text for text, place in zip(texts, places) if place is None]
        if strangers and prompts.metadata:
            raise ValueError(
                f"evaluation.prompts: {strangers[0]!r} is not in prompts.file, whose columns "
                f"({', '.join(prompts.metadata)}) the rewards may read; add it there"
            )
    chosen = texts or [prompts.texts[place] for place in places if place is not None]
    metadata = {
        name: [column[place] for place in places if place is not None] for name, column in prompts.metadata.items()
    }
    return chosen, metadata


def _chunks(keys: list[SampleKey], size: int) -> list[list[SampleKey]]:
    return [keys[i : i + size] for i in range(0, len(keys), size)]
