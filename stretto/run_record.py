"""What the loop leaves on disk and on the screen, and how it takes up again.

One object between the loop and the record room: evaluations, grids, metrics, checkpoints, the table at the end. Every
rank has one, because checkpoints and evaluations are made together; the first alone writes and speaks. The hazard is
the order in `write`.
"""

import time
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from stretto.choose import Choice
from stretto.config import Config
from stretto.evaluation import Evaluation, Evaluator
from stretto.learner import Learner
from stretto.models.trainable import save_full, save_lora
from stretto.policy.schedules import Late
from stretto.recipe import dump_recipe
from stretto.record.checkpoint import Checkpoint, Checkpoints
from stretto.record.environment import as_json, environment
from stretto.record.media import save_grid
from stretto.record.run_folder import RunFolder
from stretto.record.trackers import Trackers, open_trackers
from stretto.rewards.failures import JudgeError, RewardError

__all__ = ["RunRecord"]

SHOWN = (
    "reward",
    "zero_spread",
    "skipped_groups",
    "grad_norm",
    "kl",
    "evaluation/reward",
    "evaluation/judge/accuracy",
)
GRID_COLUMNS = 8


class RunRecord:
    """The record of a run; `take_up` comes first, on every rank, as does every other call.

    folder: rank 0's, None on the others. finished: iterations done. history: evaluations by "first", "last" and
    "best", evaluations since the best, and the choice of schedule; part of the checkpoint.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder | None,
        learner: Learner,
        evaluator: Evaluator,
        checkpoints: Checkpoints,
    ) -> None:
        self.config, self.folder, self.learner, self.evaluator = config, folder, learner, evaluator
        self.checkpoints, self.ranks = checkpoints, learner.ranks
        self.finished = self._saved = 0
        self.history: dict[str, Any] = {"since_best": 0}
        self.evaluation_s = 0.0
        self.seconds: Counter[str] = Counter()
        self.trackers: Trackers | None = None

    def take_up(self, loaded: Checkpoint | None, choice: Choice) -> None:
        """Go on from a checkpoint, or begin; open the trackers, and say what will run and why."""
        if loaded is not None:
            self.finished = self._saved = loaded.iteration
            self.history = dict(loaded.plain["history"])
            self.learner.take_up(self.checkpoints, loaded)
        self.history["choice"] = asdict(choice)
        self._on_first(lambda: self._open(loaded, choice))

    def _open(self, loaded: Checkpoint | None, choice: Choice) -> None:
        assert self.folder is not None
        notes = [*loaded.notes, *self._changed_settings(self.folder)] if loaded is not None else []
        self.folder.write_config(dump_recipe(self.config))
        self.folder.write_environment(as_json(environment()))
        self.trackers = open_trackers(
            self.folder.path,
            iterations=self.config.run.iterations,
            shown=SHOWN,
            from_iteration=self.finished,
            tensorboard=self.config.run.tensorboard,
        )
        for note in notes:
            self._say(f"note: {note}")
        self._greet(choice)

    def _greet(self, choice: Choice) -> None:
        config, policy = self.config, self.learner.policy
        if self.finished:
            self._say(f"going on from iteration {self.finished} of {config.run.iterations} in {config.run.folder}")
        num_trained = sum(p.numel() for p in policy.parameters.values())
        num_all = sum(p.numel() for p in policy.module.parameters())
        self._say(f"{config.model.adapter}: {num_trained:,} of {num_all:,} weights train ({config.tuning.method})")
        self._say(f"schedule: {choice.name}: {choice.reason}")
        if self.ranks.world_size > 1:
            axes = " x ".join(f"{axis} {size}" for axis, size in self.ranks.sizes.items() if size > 1)
            self._say(f"{self.ranks.world_size} ranks: {axes}; reduction: {self.learner.reduction.kind}")
        rows = config.sampling.samples_per_forward
        if rows > 1 and isinstance(self.learner.schedule, Late):
            self._say(
                f"note: samples are rolled out one by one, for each one's gradient leaves by itself; "
                f"sampling.samples_per_forward = {rows} holds for evaluation alone"
            )
        self._say("on-policy: one forward gives both log-probabilities, so the ratio is 1 by design")
        updates = config.optimizer.updates_per_rollout
        if updates > 1:
            self._say(
                f"{updates} optimizer steps a rollout: the first is recompute-free, the others native, with the clip"
            )

    def _changed_settings(self, folder: RunFolder) -> list[str]:
        """What differs from the settings that the run was last started with, a line a setting."""
        if not folder.config.is_file():
            return []
        before, now = (_flat(tomllib.loads(t)) for t in (folder.config.read_text(), dump_recipe(self.config)))
        return [
            f"{key} is now {now.get(key, 'unset')}, it was {before.get(key, 'unset')}"
            for key in sorted({*before, *now} - {"run.resume"})
            if before.get(key) != now.get(key)
        ]

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
            try:
                metrics["evaluation"], is_best = self._evaluate()
            except (RewardError, JudgeError):  # on every rank, and the iteration is not lost with it
                self._on_first(lambda: self._track(metrics))
                self.save_as_it_stands("evaluation")
                raise
            metrics["seconds"]["evaluation"] = self.evaluation_s
        self.seconds.update(metrics["seconds"])
        self._on_first(lambda: self._track(metrics))
        every = self.config.checkpoint.every
        is_last = must_stop or self.finished == self.config.run.iterations or self.patience_ended
        if is_last or is_best or (every and self.finished % every == 0):
            self._save(is_best)

    def _track(self, metrics: dict[str, Any]) -> None:
        assert self.trackers is not None
        self.trackers.write(metrics)

    @property
    def patience_ended(self) -> bool:
        """Whether evaluation has not improved for long enough."""
        patience = self.config.evaluation.patience
        return 0 < patience <= int(self.history["since_best"])

    def finish(self) -> None:
        """Save the weights for use elsewhere, and show before and after."""
        self.checkpoints.wait()
        with self.learner.reduction.averaged(None):
            self._save_weights("live")
        if self.learner.ema is not None:
            with self.learner.reduction.averaged(self.learner.ema):
                self._save_weights("ema")
        self._on_first(self._show_end)

    def _show_end(self) -> None:
        assert self.folder is not None
        if "first" in self.history:
            self._say(f"{'':<24}{'before':>10}{'after':>10}")
            for name, before in self.history["first"].items():
                self._say(f"{name:<24}{before:>10.3f}{self.history['last'].get(name, float('nan')):>10.3f}")
            self._say(f"pictures in {self.folder.grids}")
        self._say(f"weights in {self.folder.weights}")
        shown = {name: seconds for name, seconds in self.seconds.most_common() if seconds >= 0.05}
        self._say("seconds: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in shown.items()))

    def close(self) -> None:
        """Close the trackers."""
        if self.trackers is not None:
            self.trackers.close()

    def _say(self, text: str) -> None:
        assert self.trackers is not None
        self.trackers.say(text)

    def __enter__(self) -> "RunRecord":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _evaluate(self) -> tuple[dict[str, float], bool]:
        """Evaluate now; the figures, and whether their reward is the best so far."""
        self.ranks.phase("evaluation")
        start = time.perf_counter()
        evaluation = self.evaluator.evaluate(self.learner.ema)
        self._on_first(lambda: self._save_pictures(evaluation))
        self.evaluation_s = time.perf_counter() - start
        figures, history = evaluation.figures, self.history
        history.setdefault("first", figures)
        history["last"] = figures
        is_best = figures["reward"] > history.get("best", {"reward": float("-inf")})["reward"]
        history["since_best"] = 0 if is_best else int(history["since_best"]) + 1
        if is_best:
            history["best"] = {"reward": figures["reward"], "iteration": self.finished}
        return figures, is_best

    def _save_pictures(self, evaluation: Evaluation) -> None:
        assert self.folder is not None
        count = self.config.evaluation.samples
        shown = [group[:GRID_COLUMNS] for group in evaluation.media.split(count)]
        save_grid(
            torch.cat(shown),
            self.folder.grids / f"iteration-{self.finished:06d}",
            columns=min(count, GRID_COLUMNS),
            captions=evaluation.prompts,
        )

    def save_as_it_stands(self, phase: str) -> None:
        """Leave a checkpoint of the finished iterations, unless there is one or nothing is finished.

        phase: where the error struck that is told next.
        """
        if self.finished and self._saved != self.finished:
            self._save(False)
        self.checkpoints.wait()
        self.ranks.phase(phase)

    def _save(self, is_best: bool) -> None:
        self.ranks.phase("checkpoint")
        self._saved = self.finished
        plain = self.learner.plain() | {"history": self.history}
        self.checkpoints.save(self.finished, self.learner.tensors(), plain, is_best=is_best)

    def _save_weights(self, name: str) -> None:
        save = save_lora if self.config.tuning.method == "lora" else save_full
        save(self.learner.adapter, Path(self.config.run.folder) / "weights" / name, writes=self.ranks.is_first)

    def _on_first(self, function: Callable[[], None]) -> None:
        self.ranks.on_first(function)


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested table as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
