"""What a reward may return, and what it is told when it returns something else."""

import math

import numpy as np
import pytest
import torch

from stretto.rewards.scoring import JudgeError, RewardError, judge, score

MEDIA = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
PROMPTS = ["4", "4", "7"]
NAMES = ["prompt 0 sample 0", "prompt 0 sample 1", "prompt 1 sample 0"]


def score_one(function, **metadata):
    return score({"mine": function}, MEDIA, PROMPTS, NAMES, metadata)


def fails(function, **metadata):
    with pytest.raises(RewardError) as raised:
        score_one(function, **metadata)
    assert "\n" not in str(raised.value)
    assert raised.value.reward == "mine"
    return raised.value


@pytest.mark.parametrize(
    "returned",
    [
        [1, 2.5, -3],
        (1, 2.5, -3),
        torch.tensor([1, 2.5, -3]),
        torch.tensor([1, 2.5, -3], requires_grad=True),
        torch.tensor([1, 2.5, -3], dtype=torch.bfloat16),
        np.array([1, 2.5, -3], dtype=np.float32),
        [torch.tensor(1), np.float64(2.5), np.float32(-3)],
    ],
)
def test_every_kind_of_three_numbers_is_taken(returned):
    scores = score_one(lambda media, prompts: returned)
    assert scores.dtype == torch.float64
    assert scores.tolist() == [[1.0], [2.5], [-3.0]]
    assert not scores.requires_grad


def test_a_float64_reward_keeps_its_digits():
    assert score_one(lambda media, prompts: [1e5 + 1e-9, 0.0, 0.0])[0, 0].item() == 1e5 + 1e-9


def test_rewards_become_columns_in_their_order():
    rewards = {"b": lambda media, prompts: [1, 2, 3], "a": lambda media, prompts: [4, 5, 6]}
    assert score(rewards, MEDIA, PROMPTS, NAMES).tolist() == [[1, 4], [2, 5], [3, 6]]


def test_no_reward_gives_no_column():
    assert score({}, MEDIA, PROMPTS, NAMES).shape == (3, 0)


def test_a_reward_sees_media_prompts_and_metadata_as_they_are():
    seen = {}

    def reward(media, prompts, **metadata):
        seen.update(media=media, prompts=prompts, grad=torch.is_grad_enabled(), **metadata)
        return [0.0] * len(media)

    score_one(reward, style=["a", "b", "c"])
    assert seen["media"] is MEDIA
    assert seen["prompts"] == PROMPTS
    assert seen["style"] == ["a", "b", "c"]
    assert not seen["grad"]


def test_a_reward_without_metadata_works_when_there_is_some():
    assert score_one(lambda media, prompts: [1, 2, 3], style=["a", "b", "c"]).shape == (3, 1)


def test_a_reward_gets_the_metadata_that_its_signature_names():
    def reward(media, prompts, weight, *, style="none"):
        return [len(style) + weight] * 3

    assert score_one(reward, style="abc", weight=2, other=1).tolist() == [[5.0]] * 3


def test_a_function_without_a_signature_is_called_with_media_and_prompts():
    class Odd:
        __signature__ = "not a signature"

        def __call__(self, media, prompts):
            return [1.0, 2.0, 3.0]

    assert score_one(Odd(), style="x").shape == (3, 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_names_its_sample_and_value(bad):
    error = fails(lambda media, prompts: [1.0, bad, bad])
    assert error.sample == "sample prompt 0 sample 1"
    assert str(error) == f"reward 'mine', sample prompt 0 sample 1: returned {bad}, not a finite number"


@pytest.mark.parametrize(
    ("bad", "told"),
    [("0.7", "'0.7', str"), (None, "None, NoneType"), (1j, "1j, complex"), ([1.0], "[1.0], list")],
)
def test_something_that_is_not_a_number_names_its_sample_and_value(bad, told):
    error = fails(lambda media, prompts: [1.0, 2.0, bad])
    assert error.value == bad
    assert str(error) == f"reward 'mine', sample prompt 1 sample 0: returned {told}, not a number"


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ([1.0, 2.0], "shape (2,), not (3,)"),
        ([], "shape (0,), not (3,)"),
        (torch.zeros(3, 1), "shape (3, 1), not (3,)"),
        (np.zeros((1, 3)), "shape (1, 3), not (3,)"),
        (torch.tensor(1.0), "shape (), not (3,)"),
    ],
)
def test_a_wrong_length_or_shape_is_told_with_the_right_one(returned, told):
    assert told in str(fails(lambda media, prompts: returned))


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (None, "returned None, NoneType"),
        (0.5, "returned 0.5, float"),
        ("abc", "returned 'abc', str"),
        ({"score": 1}, "returned {'score': 1}, dict"),
        ("x" * 500, "..., str"),
    ],
)
def test_a_result_that_is_no_list_of_numbers_is_shown(returned, told):
    error = fails(lambda media, prompts: returned)
    assert error.sample == "samples prompt 0 sample 0 to prompt 1 sample 0"
    assert told in str(error)
    assert len(str(error)) < 250


def test_an_exception_names_the_sample_that_raises_and_keeps_its_cause():
    def reward(media, prompts):
        if "7" in prompts:
            raise KeyError("no target\nfor 7")
        return [0.0] * len(prompts)

    error = fails(reward)
    assert error.sample == "sample prompt 1 sample 0"
    assert "the function raised KeyError" in str(error)
    assert isinstance(error.__cause__, KeyError)


def test_an_exception_of_the_batch_alone_names_the_batch():
    def reward(media, prompts):
        if len(prompts) > 1:
            raise RuntimeError("too many")
        return [0.0]

    assert fails(reward).sample == "samples prompt 0 sample 0 to prompt 1 sample 0"


def test_the_search_for_the_failing_sample_cuts_the_metadata_too():
    def reward(media, prompts, target):
        assert len(target) == len(prompts)
        return [1.0 / value for value in target]

    assert fails(reward, target=[1, 0, 2]).sample == "sample prompt 0 sample 1"


def test_a_keyboard_interrupt_is_not_a_failed_reward():
    def reward(media, prompts):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_one(reward)


def test_a_reward_error_is_a_value_error():
    assert issubclass(RewardError, ValueError)


def _exits(media, prompts):
    raise SystemExit(3)


async def _waits(media, prompts):
    return [1.0] * len(prompts)


def test_a_reward_that_exits_is_a_failed_reward():
    with pytest.raises(RewardError, match="the function raised SystemExit: 3"):
        score({"exits": _exits}, torch.zeros(2, 1, 2, 2), ["a", "b"], ["0", "1"])


@pytest.mark.filterwarnings("error")
def test_an_async_reward_is_refused_with_the_way_out():
    with pytest.raises(RewardError, match="it is async; write it with a plain def"):
        score({"waits": _waits}, torch.zeros(1, 1, 2, 2), ["a"], ["0"])


def test_an_integer_that_no_float_holds_names_its_sample():
    with pytest.raises(RewardError, match="sample b: returned a number too large for a float"):
        score({"huge": lambda media, prompts: [1, 10**5000]}, torch.zeros(2, 1, 2, 2), ["p", "p"], ["a", "b"])


def test_a_judges_figures_come_back_as_floats_in_order():
    returned = {"b": np.float32(0.5), "a": torch.tensor(2), "c": 1}
    figures = judge("j", lambda media, prompts: returned, torch.zeros(1, 1, 2, 2), ["p"])
    assert list(figures.items()) == [("b", 0.5), ("a", 2.0), ("c", 1.0)]
    assert all(type(value) is float for value in figures.values())


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (0.5, "judge 'j': returned 0.5, float; it must return a dict"),
        ({"a": 1.0, "b": math.nan}, "judge 'j', figure 'b': returned nan, not a finite number"),
        ({"a": None}, "judge 'j', figure 'a': returned None, NoneType, not a number"),
        ({"a": torch.zeros(2)}, "judge 'j', figure 'a': returned .*, not a number"),
        ({"a": 10**5000}, "figure 'a': returned a number too large for a float"),
        ({1: 0.5}, "returned a figure named 1; names are text"),
    ],
)
def test_a_judge_that_returns_something_else_names_the_figure(returned, told):
    with pytest.raises(JudgeError, match=told) as caught:
        judge("j", lambda media, prompts: returned, torch.zeros(1, 1, 2, 2), ["p"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("function", "told"), [(_exits, "raised SystemExit: 3"), (_waits, "it is async")])
def test_a_judge_that_fails_is_named(function, told):
    with pytest.raises(JudgeError, match=f"judge 'j': the function.*{told}"):
        judge("j", function, torch.zeros(1, 1, 2, 2), ["p"])
