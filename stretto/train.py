"""THE loop: roll, score, credit, step, record.

Everything that an iteration depends on is in the config, the checkpoint and the iteration's number, so a run that
was killed goes on as one that never stopped. The hazard is the order at an iteration's end: the metrics line first,
then the checkpoint, so that a checkpoint never knows more than the metrics do.
"""

from pathlib import Path

from stretto.build import assemble
from stretto.choose import choose, make_chosen
from stretto.config import Config
from stretto.evaluation import Evaluator
from stretto.learner import Learner
from stretto.record.checkpoint import Checkpoints
from stretto.record.run_folder import RunFolder
from stretto.record.signals import Signals
from stretto.run_record import RunRecord, identity_of

__all__ = ["train"]


def train(config: Config) -> None:
    """Run a recipe to its end, or to a signal. Raises ValueError for what the user can mend."""
    with RunFolder.open(Path(config.run.folder), config.run.resume) as folder, Signals() as signals:
        run = assemble(config)
        evaluator = Evaluator(config, run)
        identity = identity_of(config, run.policy)
        checkpoints = Checkpoints(folder.checkpoints, identity, keep=config.checkpoint.keep)
        checkpoint = checkpoints.newest_whole()
        kept = checkpoint.plain["history"].get("choice") if checkpoint else None
        choice = choose(config, run.policy, run.rule, run.feed.first_wave, kept)
        schedule = make_chosen(choice, config, run.policy, run.rule, run.feed.first_wave()[0])
        learner = Learner(config, run, schedule)
        with checkpoints, RunRecord(config, folder, learner, evaluator, checkpoints) as record:
            record.take_up(checkpoint, choice)
            loop(config, learner, record, signals)
            checkpoints.wait()
            signals.reraise()
            record.finish()


def loop(config: Config, learner: Learner, record: RunRecord, signals: Signals) -> None:
    """From where the record stands to the last iteration, to a signal, or until patience ends."""
    record.evaluate_at_start()
    while record.finished < config.run.iterations and not record.patience_ended:
        metrics = learner.learn(record.finished)
        must_stop = signals.caught is not None
        record.write(metrics, must_stop=must_stop)
        if must_stop:
            return
