"""Calls the rewards of a run and believes nothing they return until it has been checked.

A reward that fails, or returns something that is not one finite number a sample, stops the run with the name
of the reward, the sample and the value; nothing is made up, and nothing is asked twice here (a service may be:
`stretto.rewards.retries`). The hazard this guards against is an exception or a failed parse that becomes a plausible
number and is then trained on.
"""

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.rewards.failures import JudgeError, RefusedError, RewardError, ServiceError, span

__all__ = ["Ask", "JudgeError", "RewardError", "ask", "judge", "score"]


class Ask(Protocol):
    """How one reward is asked for one batch: `ask`, or one that asks again (`stretto.rewards.retries`)."""

    def __call__(
        self,
        name: str,
        function: Callable[..., Any],
        media: Tensor,
        prompts: list[str],
        sample_names: list[str],
        metadata: Mapping[str, Any],
    ) -> list[float]:
        """B finite floats."""
        ...


def score(
    rewards: Mapping[str, Callable[..., Any]],
    media: Tensor,
    prompts: list[str],
    sample_names: list[str],
    metadata: Mapping[str, Any] | None = None,
    *,
    how: Ask | None = None,
) -> Tensor:
    """Every reward of every sample, as the functions gave them: no weight, no normalisation.

    Args:
        rewards: K functions `f(media, prompts, **metadata)` by name; each returns B numbers (a sequence, an
            array or a Tensor of shape (B,)). One that does not take **metadata gets the keys that its
            signature names.
        media: (B, C, H, W), or (B, F, C, H, W) for video, float32 in [0, 1]. Rewards must not write to it.
        prompts: B prompts.
        sample_names: B names, for the error messages.
        metadata: further keyword arguments, such as the other columns of a prompt file, each a list of B
        values.
        how: how each reward is asked; once where it is None.

    Returns:
        (B, K) float64 on the CPU, in the order of `rewards`; no gradient.

    Raises:
        RewardError: an exception in a reward (chained as the cause; on a failed batch the samples are scored
            one by one to find which it was), NaN or infinity, a wrong length or shape, something that is
            not a number, or a service that did not answer.
    """
    assert len(media) == len(prompts) == len(sample_names), (len(media), len(prompts), len(sample_names))
    columns = []
    for name, function in rewards.items():
        try:
            columns.append((how or ask)(name, function, media, prompts, sample_names, metadata or {}))
        except ServiceError as error:
            raise RewardError(name, span(sample_names), None, f"the service {error}") from error
    return torch.tensor(columns, dtype=torch.float64).reshape(len(rewards), len(media)).T.contiguous()


def ask(
    name: str,
    function: Callable[..., Any],
    media: Tensor,
    prompts: list[str],
    sample_names: list[str],
    metadata: Mapping[str, Any],
) -> list[float]:
    """One reward of every sample of one batch, asked once: B finite floats, without gradient.

    Arguments as of `score`. Raises RewardError as `score` does, and lets the ServiceError of a reward that asks a
    service through: only that may be asked again.
    """
    accepted = _accepted(function, metadata)
    try:
        with torch.no_grad():
            result = _called(function, media, prompts, accepted)
    except ServiceError:
        raise
    except RefusedError as error:
        sample = span(sample_names) if error.row is None else f"sample {sample_names[error.row]}"
        raise RewardError(name, sample, None, f"the service {error}") from error
    except (Exception, SystemExit) as error:
        row = _failing_row(function, media, prompts, accepted) if len(media) > 1 else 0
        sample = span(sample_names) if row is None else f"sample {sample_names[row]}"
        raise RewardError(name, sample, None, f"the function raised {_told(error)}") from error
    return _checked(name, result, sample_names)


def judge(name: str, function: Callable[..., Any], media: Tensor, prompts: list[str]) -> dict[str, float]:
    """A judge's figures, checked as rewards are.

    Args:
        name: of the judge, for the error messages.
        function: `f(media, prompts)`; returns a dict of figures by name, each a number or a Tensor of one.
        media: (B, C, H, W), or (B, F, C, H, W) for video, float32 in [0, 1].
        prompts: B prompts.

    Returns:
        The figures as finite floats, in the judge's order.

    Raises:
        JudgeError: an exception in the judge (chained as the cause), something else than a dict by names, or a
            value that is not one finite number.
    """
    assert len(media) == len(prompts), (len(media), len(prompts))
    try:
        with torch.no_grad():
            result = _called(function, media, prompts, {})
    except (Exception, SystemExit) as error:
        raise JudgeError(name, "", f"the function raised {_told(error)}") from error
    if not isinstance(result, Mapping):
        problem = f"returned {_shown(result)}, {type(result).__name__}; it must return a dict of figures by name"
        raise JudgeError(name, "", problem)
    figures = {}
    for figure, value in result.items():
        if not isinstance(figure, str):
            raise JudgeError(name, "", f"returned a figure named {_shown(figure)}; names are text")
        number, problem = _as_number(value)
        if problem:
            raise JudgeError(name, figure, f"returned {problem}")
        figures[figure] = number
    return figures


def _called(function: Callable[..., Any], media: Tensor, prompts: list[str], metadata: dict[str, Any]) -> Any:
    """What the function returns; TypeError for one that is async, which nobody would await."""
    result = function(media, prompts, **metadata)
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError("it is async; write it with a plain def (asyncio.run inside, if it must wait)")
    return result


def _failing_row(
    function: Callable[..., Any], media: Tensor, prompts: list[str], metadata: dict[str, Any]
) -> int | None:
    """The first row on which the function raises alone; None where it raises on none, or a service is in the way."""
    for row in range(len(media)):
        alone = {
            key: value[row : row + 1] if _per_row(value, len(media)) else value for key, value in metadata.items()
        }
        try:
            with torch.no_grad():
                _called(function, media[row : row + 1], prompts[row : row + 1], alone)
        except ServiceError:
            return None
        except (Exception, SystemExit):
            return row
    return None


def _per_row(value: Any, rows: int) -> bool:
    return isinstance(value, list | tuple | Tensor) and len(value) == rows


def _accepted(function: Callable[..., Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the metadata that the function's signature takes."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(metadata)
    keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [key for key, parameter in list(parameters.items())[2:] if parameter.kind in keywords]
    return {key: value for key, value in metadata.items() if key in named}


def _checked(name: str, result: Any, sample_names: list[str]) -> list[float]:
    """What a reward returned, as B finite floats, or a RewardError."""
    if not hasattr(result, "__len__") or isinstance(result, str | bytes | Mapping | set):
        raise RewardError(
            name,
            span(sample_names),
            result,
            f"returned {_shown(result)}, {type(result).__name__}; it must return {len(sample_names)} numbers",
        )
    shape = tuple(result.shape) if hasattr(result, "shape") else (len(result),)
    if shape != (len(sample_names),):
        problem = f"returned shape {shape}, not ({len(sample_names)},): one number a sample"
        raise RewardError(name, span(sample_names), result, problem)
    values = result.tolist() if hasattr(result, "tolist") else list(result)
    return [_number(name, value, sample) for value, sample in zip(values, sample_names)]


def _number(name: str, value: Any, sample: str) -> float:
    number, problem = _as_number(value)
    if problem:
        raise RewardError(name, f"sample {sample}", value, f"returned {problem}")
    return number


def _as_number(value: Any) -> tuple[float, str]:
    """The value as a finite float and "", or NaN and what is wrong with it."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        return math.nan, f"{_shown(value)}, {type(value).__name__}, not a number"
    try:
        number = float(value)
    except OverflowError:
        return math.nan, "a number too large for a float"
    return number, "" if math.isfinite(number) else f"{number}, not a finite number"


def _told(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _shown(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"a {type(value).__name__} without a repr"
    return text if len(text) <= 60 else text[:57] + "..."
