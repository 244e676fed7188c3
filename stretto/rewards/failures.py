"""What goes wrong with a reward: five errors, each one line, told apart by what may be done about it.

A function that raises would raise again, so it ends the run (`RewardError`). A service that is slow or away may be
well a moment later (`ServiceError`, asked again by `stretto.rewards.retries`); one that has understood and says no
would say it again (`RefusedError`). The hazard is catching one as another: `SkippedGroup` is a `RewardError`, so that
who forgets it stops with one clear line and trains on nothing; catch it first.
"""

from typing import Any

__all__ = ["JudgeError", "RefusedError", "RewardError", "ServiceError", "SkippedGroup", "span"]


class RewardError(ValueError):
    """A reward failed; the message is one line.

    Attributes:
        reward: its name.
        sample: the name of the sample, or of the first and last where it is not one sample's fault.
        value: what was returned for it; None where nothing was.
        problem: the message without the two names.
    """

    def __init__(self, reward: str, sample: str, value: Any, problem: str) -> None:
        super().__init__(f"reward {reward!r}, {sample}: {problem}")
        self.reward = reward
        self.sample = sample
        self.value = value
        self.problem = problem

    def __reduce__(self) -> tuple[Any, ...]:
        """As another rank gets it: without the value, which may be anything."""
        return type(self), (self.reward, self.sample, None, self.problem)


class SkippedGroup(RewardError):
    """No attempt succeeded and the recipe says to go on without: these samples have no rewards, and none is made up.

    Raised in place of rewards under `on_failure = "skip"`, for the whole batch that was scored together.
    """


class ServiceError(Exception):
    """A service failed in a way that may pass: slow, away, answering 5xx or nonsense. Worth another attempt.

    A reward of your own that asks a service may raise it too. The message says what the service did ("refused the
    connection"), without naming the reward.
    """


class RefusedError(Exception):
    """A service understood what it was asked and refused: asking again would give the same.

    Attributes:
        row: the row of the batch that it could not score; None where it is not one row's fault.
    """

    def __init__(self, problem: str, row: int | None = None) -> None:
        super().__init__(problem)
        self.row = row


class JudgeError(ValueError):
    """A judge failed; the message is one line.

    Attributes:
        judge: its name.
        figure: the name of the figure; "" where it is not one figure's fault.
    """

    def __init__(self, judge: str, figure: str, problem: str) -> None:
        super().__init__(f"judge {judge!r}" + (f", figure {figure!r}" if figure else "") + f": {problem}")
        self.judge = judge
        self.figure = figure
        self.problem = problem

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.judge, self.figure, self.problem)


def span(sample_names: list[str]) -> str:
    """The samples of a batch in a message: the one, or the first and the last."""
    if len(sample_names) == 1:
        return f"sample {sample_names[0]}"
    return f"samples {sample_names[0]} to {sample_names[-1]}"
