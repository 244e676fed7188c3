"""Calls the rewards of a run and believes nothing they return until it has been checked.

A reward that fails, or returns something that is not one finite number a sample, stops the run with the name
of the reward, the sample and the value; nothing is retried and nothing is made up. The hazard this guards
against is an exception or a failed parse that becomes a plausible number and is then trained on.
"""

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["RewardError", "score"]


class RewardError(ValueError):
    """A reward failed; the message is one line.

    Attributes:
        reward: its name.
        sample: the name of the sample, or of the first and last where it is not one sample's fault.
        value: what was returned for it; None where nothing was.
    """

    def __init__(self, reward: str, sample: str, value: Any, problem: str) -> None:
        super().__init__(f"reward {reward!r}, {sample}: {problem}")
        self.reward = reward
        self.sample = sample
        self.value = value


def score(
    rewards: Mapping[str, Callable[..., Any]],
    media: Tensor,
    prompts: list[str],
    sample_names: list[str],
    metadata: Mapping[str, Any] | None = None,
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

    Returns:
        (B, K) float64 on the CPU, in the order of `rewards`; no gradient.

    Raises:
        RewardError: an exception in a reward (chained as the cause; on a failed batch the samples are scored
            one by one to find which it was), NaN or infinity, a wrong length or shape, or something that is
            not a number.
    """
    assert len(media) == len(prompts) == len(sample_names), (len(media), len(prompts), len(sample_names))
    columns = []
    for name, function in rewards.items():
        result = _call(name, function, media, prompts, sample_names, dict(metadata or {}))
        columns.append(_checked(name, result, sample_names))
    return torch.tensor(columns, dtype=torch.float64).reshape(len(rewards), len(media)).T.contiguous()


def _call(
    name: str,
    function: Callable[..., Any],
    media: Tensor,
    prompts: list[str],
    sample_names: list[str],
    metadata: dict[str, Any],
) -> Any:
    accepted = _accepted(function, metadata)
    try:
        with torch.no_grad():
            return function(media, prompts, **accepted)
    except Exception as error:
        row = _failing_row(function, media, prompts, accepted) if len(media) > 1 else 0
        sample = _span(sample_names) if row is None else f"sample {sample_names[row]}"
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise RewardError(name, sample, None, f"the function raised {told}") from error


def _failing_row(
    function: Callable[..., Any], media: Tensor, prompts: list[str], metadata: dict[str, Any]
) -> int | None:
    """The first row on which the function raises alone; None where it raises on none."""
    for row in range(len(media)):
        alone = {
            key: value[row : row + 1] if _per_row(value, len(media)) else value for key, value in metadata.items()
        }
        try:
            with torch.no_grad():
                function(media[row : row + 1], prompts[row : row + 1], **alone)
        except Exception:
            return row
    return None


def _per_row(value: Any, rows: int) -> bool:
    return isinstance(value, list | tuple | Tensor) and len(value) == rows


def _accepted(function: Callable[..., Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """The part of the metadata that the function's signature takes."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return metadata
    keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [key for key, parameter in list(parameters.items())[2:] if parameter.kind in keywords]
    return {key: value for key, value in metadata.items() if key in named}


def _checked(name: str, result: Any, sample_names: list[str]) -> list[float]:
    """What a reward returned, as B finite floats, or a RewardError."""
    if not hasattr(result, "__len__") or isinstance(result, str | bytes | Mapping | set):
        raise RewardError(
            name,
            _span(sample_names),
            result,
            f"returned {_shown(result)}, {type(result).__name__}; it must return {len(sample_names)} numbers",
        )
    shape = tuple(result.shape) if hasattr(result, "shape") else (len(result),)
    if shape != (len(sample_names),):
        problem = f"returned shape {shape}, not ({len(sample_names)},): one number a sample"
        raise RewardError(name, _span(sample_names), result, problem)
    values = result.tolist() if hasattr(result, "tolist") else list(result)
    return [_number(name, value, sample) for value, sample in zip(values, sample_names)]


def _number(name: str, value: Any, sample: str) -> float:
    if isinstance(value, Tensor) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise RewardError(
            name, f"sample {sample}", value, f"returned {_shown(value)}, {type(value).__name__}, not a number"
        )
    if not math.isfinite(value):
        raise RewardError(name, f"sample {sample}", value, f"returned {float(value)}, not a finite number")
    return float(value)


def _span(sample_names: list[str]) -> str:
    if len(sample_names) == 1:
        return f"sample {sample_names[0]}"
    return f"samples {sample_names[0]} to {sample_names[-1]}"


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
