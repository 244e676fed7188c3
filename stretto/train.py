"""THE loop: roll, score, credit, reduce, step, record.

Everything that an iteration depends on is in the config, the checkpoint and the iteration's number, so a run that was
killed goes on as one that never stopped, on as many ranks as there then are. The hazard is the order at an
iteration's end: the metrics line first, then the checkpoint, so that a checkpoint never knows more than the metrics.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from stretto.attempt import store_of_all_attempts
from stretto.build import assemble, build_device, build_scoring
from stretto.choose import choose
from stretto.config import Config
from stretto.engine import make_reduction
from stretto.evaluation import Evaluator
from stretto.learner import Learner
from stretto.ranks import Ranks
from stretto.record.checkpoint import Checkpoints
from stretto.record.run_folder import RunFolder
from stretto.record.signals import Signals
from stretto.rewards.behind import Scorer
from stretto.rewards.failures import RewardError
from stretto.run_record import RunRecord

__all__ = ["train"]

ECHO_S = 2.0
"""Seconds in which torchrun and a terminal may give a rank the same signal twice."""


def train(config: Config) -> None:
    """Run a recipe to its end, or to a signal. Raises ValueError for what the user can mend, on every rank."""
    device = build_device(config)
    with Ranks.open(config.parallel, device.type) as ranks, ExitStack() as stack, ranks.failing_fast():
        folder = stack.enter_context(open_folder(config, ranks))
        signals = stack.enter_context(Signals(echo_s=ECHO_S if ranks.mesh is not None else 0.0))
        run = assemble(config, ranks)
        run.policy.stopwatch.tell = ranks.phase
        checkpoints = stack.enter_context(open_checkpoints(config, ranks, run.identity))
        loaded = checkpoints.newest_whole()
        kept = loaded.plain["history"].get("choice") if loaded else None
        choice = choose(config, run, ranks.world_size, kept)
        reduction = make_reduction(config, run.policy, ranks, choice)
        stack.callback(reduction.close)
        scorer = stack.enter_context(Scorer(run.rewards, behind=config.scoring.behind, scoring=build_scoring(config)))
        schedule = reduction.make_schedule(choice, config, run.rule)
        schedule.prepare(run.feed.first_wave()[0])
        learner = Learner(config, run, ranks, reduction, schedule, scorer)
        evaluator = Evaluator(config, run, ranks, reduction)
        record = stack.enter_context(RunRecord(config, folder, learner, evaluator, checkpoints))
        record.take_up(loaded, choice)
        caught = loop(config, learner, record, signals)
        checkpoints.wait()
        signals.reraise(caught)
        record.finish()


@contextmanager
def open_folder(config: Config, ranks: Ranks) -> Iterator[RunFolder | None]:
    """Rank 0 holds the run folder; every rank learns why it cannot.

    A restart by torchrun goes on with the run that its job began here, and with none that was there before.
    """
    held: list[RunFolder] = []

    def hold() -> None:
        store, path = store_of_all_attempts(), Path(config.run.folder)
        key = f"began/{path.resolve()}"
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        began = restarts > 0 if store is None else store.check([key])
        held.append(RunFolder.open(path, "auto" if began else config.run.resume))
        if store is not None:
            store.set(key, "")

    ranks.on_first(hold)
    ranks.before_leaving += [folder.remove_if_empty for folder in held]
    with held[0] if held else nullcontext() as folder:
        yield folder


def open_checkpoints(config: Config, ranks: Ranks, identity: dict[str, Any]) -> Checkpoints:
    """The checkpoints in the run folder, for all ranks together."""
    return Checkpoints(
        Path(config.run.folder) / "checkpoints",
        identity,
        keep=config.checkpoint.keep,
        asynchronous=config.checkpoint.asynchronous,
        group=ranks.new_control_group(),
    )


def loop(config: Config, learner: Learner, record: RunRecord, signals: Signals) -> int | None:
    """From where the record stands to the last iteration, to the end of patience, or to a signal: its number."""
    record.evaluate_at_start()
    while record.finished < config.run.iterations and not record.patience_ended:
        try:
            metrics = learner.learn(record.finished)
        except RewardError:  # on every rank, and before the weights have moved
            record.save_as_it_stands("reward")
            raise
        caught = learner.ranks.most(signals.caught or 0)
        record.write(metrics, must_stop=caught > 0)
        if caught:
            return caught
    return None
