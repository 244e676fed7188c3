"""What the loop leaves on disk and on the screen, and how it takes up again.

One object between the loop and the record room: evaluations, grids, metrics, checkpoints, the table at the end. Its
`history` (first, last and best evaluation) is part of the checkpoint. The hazard is the order in `write`.
"""

import random
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from stretto.choose import Choice
from stretto.config import Config
from stretto.evaluation import Evaluator
from stretto.learner import Learner
from stretto.models.trainable import save_full, save_lora
from stretto.policy import fingerprint
from stretto.recipe import dump_recipe
from stretto.record import checkpoint
from stretto.record.environment import as_json, environment
from stretto.record.media import save_grid
from stretto.record.run_folder import RunFolder
from stretto.record.trackers import open_trackers

__all__ = ["RunRecord"]

SHOWN = ("reward", "zero_spread", "grad_norm", "kl", "evaluation/reward", "evaluation/judge/accuracy")
GRID_COLUMNS = 8


class RunRecord:
    """The record of a run, opened at its newest whole checkpoint.

    finished: iterations done. history: evaluations by "first", "last" and "best", and evaluations since the best.
    """

    def __init__(self, config: Config, folder: RunFolder, learner: Learner, evaluator: Evaluator) -> None:
        self.config, self.folder, self.learner, self.evaluator = config, folder, learner, evaluator
        self.identity = _identity(config, learner)
        loaded = checkpoint.load_newest(folder.checkpoints, self.identity)
        self.finished = loaded.iteration if loaded else 0
        self.history: dict[str, Any] = {"since_best": 0}
        self.evaluation_s = 0.0
        self.notes = loaded.notes if loaded else []
        if loaded:
            self._restore(loaded.state)
        folder.write_config(dump_recipe(config))
        folder.write_environment(as_json(environment()))
        self.trackers = open_trackers(
            folder.path,
            iterations=config.run.iterations,
            shown=SHOWN,
            from_iteration=self.finished,
            tensorboard=config.run.tensorboard,
        )

    def greet(self, choice: Choice) -> None:
        """Say what will run, and why."""
        config, policy = self.config, self.learner.policy
        say = self.trackers.say
        for note in self.notes:
            say(f"note: {note}")
        if self.finished:
            say(f"going on from iteration {self.finished} of {config.run.iterations} in {self.folder.path}")
        num_trained = sum(p.numel() for p in policy.parameters.values())
        num_all = sum(p.numel() for p in policy.module.parameters())
        say(f"{config.model.adapter}: {num_trained:,} of {num_all:,} weights train ({config.tuning.method})")
        say(f"schedule: {choice.name}: {choice.reason}")
        say("on-policy: one forward gives both log-probabilities, so the ratio is 1 by design")
        updates = config.optimizer.updates_per_rollout
        if updates > 1:
            say(f"{updates} optimizer steps a rollout: the first is recompute-free, the others native, with the clip")

    def evaluate_at_start(self) -> None:
        """Before the first iteration: the grid and the figures to compare with."""
        if self.finished == 0 and self.config.evaluation.every:
            self._evaluate()

    def write(self, metrics: dict[str, Any], *, must_stop: bool) -> None:
        """Take one iteration: evaluate if due, write the metrics, then the checkpoint if due."""
        self.finished = metrics["iteration"] + 1
        is_best = False
        if self.finished == 1 and "first" in self.history:
            metrics["evaluation_at_start"] = self.history["first"]
        if self.evaluator.is_due(self.finished):
            metrics["evaluation"], is_best = self._evaluate()
            metrics["seconds"]["evaluation"] = self.evaluation_s
        self.trackers.write(metrics)
        every = self.config.checkpoint.every
        is_last = must_stop or self.finished == self.config.run.iterations or self.patience_ended
        if is_last or is_best or (every and self.finished % every == 0):
            self._save(is_best)

    @property
    def patience_ended(self) -> bool:
        """Whether evaluation has not improved for long enough."""
        patience = self.config.evaluation.patience
        return 0 < patience <= int(self.history["since_best"])

    def finish(self) -> None:
        """Save the weights for use elsewhere, and show before and after."""
        self._save_weights(self.folder.weights / "live")
        if self.learner.ema is not None:
            with self.learner.ema.swapped():
                self._save_weights(self.folder.weights / "ema")
        say = self.trackers.say
        if "first" in self.history:
            say(f"{'':<24}{'before':>10}{'after':>10}")
            for name, before in self.history["first"].items():
                say(f"{name:<24}{before:>10.3f}{self.history['last'].get(name, float('nan')):>10.3f}")
        say(f"pictures in {self.folder.grids}, weights in {self.folder.weights}")

    def close(self) -> None:
        """Close the trackers."""
        self.trackers.close()

    def __enter__(self) -> "RunRecord":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _evaluate(self) -> tuple[dict[str, float], bool]:
        """Evaluate now; the figures, and whether their reward is the best so far."""
        start = time.perf_counter()
        evaluation = self.evaluator.evaluate(self.learner.ema)
        count = self.config.evaluation.samples
        shown = [group[:GRID_COLUMNS] for group in evaluation.media.split(count)]
        save_grid(
            torch.cat(shown),
            self.folder.grids / f"iteration-{self.finished:06d}",
            columns=min(count, GRID_COLUMNS),
            captions=evaluation.prompts,
        )
        self.evaluation_s = time.perf_counter() - start
        figures, history = evaluation.figures, self.history
        history.setdefault("first", figures)
        history["last"] = figures
        is_best = figures["reward"] > history.get("best", {"reward": float("-inf")})["reward"]
        history["since_best"] = 0 if is_best else int(history["since_best"]) + 1
        if is_best:
            history["best"] = {"reward": figures["reward"], "iteration": self.finished}
        return figures, is_best

    def _save(self, is_best: bool) -> None:
        state = self.learner.state_dict() | {
            "history": self.history,
            "random": {"torch": torch.get_rng_state(), "python": _flat(random.getstate())},
        }
        checkpoint.save(
            self.folder.checkpoints,
            self.finished,
            state,
            identity=self.identity,
            keep=self.config.checkpoint.keep,
            is_best=is_best,
        )

    def _restore(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state)
        self.history = dict(state["history"])
        torch.set_rng_state(state["random"]["torch"])
        version, *numbers, gauss = state["random"]["python"]
        random.setstate((version, tuple(numbers), gauss))

    def _save_weights(self, folder: Path) -> None:
        save = save_lora if self.config.tuning.method == "lora" else save_full
        save(self.learner.adapter, folder)


def _flat(state: Any) -> list[Any]:
    """Python's random state as one list."""
    version, numbers, gauss = state
    return [version, *numbers, gauss]


def _identity(config: Config, learner: Learner) -> dict[str, Any]:
    """What a checkpoint must agree on to be of this model: names and shapes of what trains, and a frozen weight."""
    policy = learner.policy
    shapes = {name: list(p.shape) for name, p in policy.parameters.items()}
    frozen = next((p for p in policy.module.parameters() if not p.requires_grad), None)
    base = "all trained" if frozen is None else f"{fingerprint(frozen):08x}"
    return {"adapter": config.model.adapter, "method": config.tuning.method, "parameters": shapes, "base": base}
