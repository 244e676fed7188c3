"""The demo's reward and its judge, against the real digits and against what a cheating policy would draw."""

import importlib
import math

import pytest
import torch

from stretto.rewards import load_judge, load_reward
from stretto.rewards.digits_judge import real_digits

reward = load_reward("digits")
judge = load_judge("digits")
UNSEEN_BY_JUDGE = 0
UNSEEN_BY_REWARD = 1
CHECKERBOARD = ((torch.arange(8)[:, None] + torch.arange(8)) % 2).float()


def test_the_reward_reads_real_digits_that_it_has_not_seen():
    pictures, prompts = real_digits(UNSEEN_BY_REWARD)
    values = reward(pictures, prompts)
    assert values.shape == (898,)
    assert values.dtype == torch.float32
    assert (values > -0.7).float().mean() > 0.96
    assert values.max() <= 0


def test_the_reward_of_a_wrong_digit_is_low_and_never_below_minus_ten():
    pictures, prompts = real_digits(UNSEEN_BY_REWARD)
    wrong = [str((int(prompt) + 1) % 10) for prompt in prompts]
    values = reward(pictures, wrong)
    assert values.min() == -10
    assert values.mean() < -5


def test_the_rewards_of_the_ten_prompts_are_the_logarithms_of_one_distribution():
    pictures, _ = real_digits(UNSEEN_BY_REWARD)
    noise = torch.randn(200, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    noisy = (pictures[:200] + 0.3 * noise).clamp(0, 1)
    every = torch.stack([reward(noisy, [str(digit)] * 200) for digit in range(10)], 1)
    total = every.double().exp().sum(1)
    assert total.min() > 1 - 1e-5
    assert total.max() < 1 + 10 * math.exp(-10) + 1e-5
    assert (every.max(1).values < -0.01).any()


def test_the_reward_of_a_picture_does_not_depend_on_the_others():
    pictures, prompts = real_digits(UNSEEN_BY_REWARD)
    alone = torch.cat([reward(pictures[i : i + 1], prompts[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(alone, reward(pictures[:5], prompts[:5]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 1, 16, 16), (2, 1, 1, 8, 8), (2, 64)])
def test_the_reward_refuses_pictures_of_another_shape(shape):
    with pytest.raises(ValueError, match=r"needs pictures of shape \(B, 1, 8, 8\), not"):
        reward(torch.zeros(shape), ["1", "2"])


@pytest.mark.parametrize("prompt", ["ten", "10", "", "x"])
def test_the_reward_refuses_a_prompt_that_is_no_digit(prompt):
    with pytest.raises(ValueError, match=f"not '{prompt}'"):
        reward(torch.zeros(1, 1, 8, 8), [prompt])


def test_the_two_halves_of_the_real_digits_share_no_picture():
    even, odd = (real_digits(half)[0].flatten(1) for half in (0, 1))
    assert len(even) + len(odd) == 1797
    assert (torch.cdist(even, odd).min(1).values > 0).all()


def test_the_judge_finds_real_digits_right_close_and_varied():
    verdict = judge(*real_digits(UNSEEN_BY_JUDGE))
    assert verdict["accuracy"] > 0.98
    assert verdict["frechet"] < 0.03
    assert 0.19 < verdict["spread"] < 0.22


def test_two_hundred_real_digits_are_enough_for_the_judge():
    pictures, prompts = real_digits(UNSEEN_BY_JUDGE)
    verdict = judge(pictures[::4][:200], prompts[::4][:200])
    assert verdict["accuracy"] > 0.97
    assert verdict["frechet"] < 0.12


def test_the_frechet_distance_of_the_judges_own_digits_is_zero():
    assert abs(judge(*real_digits(1))["frechet"]) < 1e-9


def test_the_frechet_distance_is_that_of_shifted_gaussians():
    """All pictures moved by a vector within the principal directions: the distance is its squared length."""
    from stretto.rewards.digits_judge import _judge

    pictures, prompts = real_digits(1)
    moved = pictures.double() + 0.3 * torch.tensor(_judge().principal[:, 2].copy()).reshape(1, 1, 8, 8)
    assert judge(moved, prompts)["frechet"] == pytest.approx(0.09, abs=1e-9)


def test_accuracy_counts_the_prompted_digit():
    pictures, prompts = real_digits(UNSEEN_BY_JUDGE)
    right = judge(pictures, prompts)
    half_wrong = [p if i % 2 else str((int(p) + 3) % 10) for i, p in enumerate(prompts)]
    verdict = judge(pictures, half_wrong)
    assert verdict["accuracy"] == pytest.approx(0.5, abs=0.02)
    assert verdict["frechet"] == right["frechet"]
    assert verdict["spread"] == right["spread"]


@pytest.mark.parametrize(("strength", "times"), [(0.1, 1.5), (0.2, 4), (0.3, 10)])
def test_a_checkerboard_behind_every_digit_raises_the_frechet_distance_and_not_the_accuracy(strength, times):
    pictures, prompts = real_digits(UNSEEN_BY_JUDGE)
    cheating = torch.where(pictures < 0.1, strength * CHECKERBOARD, pictures)
    assert judge(cheating, prompts)["frechet"] > times * judge(pictures, prompts)["frechet"]
    assert judge(cheating, prompts)["accuracy"] > 0.97


def test_one_picture_drawn_again_and_again_has_no_spread_and_a_large_frechet_distance():
    pictures, prompts = real_digits(UNSEEN_BY_JUDGE)
    first = [prompts.index(str(digit)) for digit in range(10)]
    verdict = judge(pictures[first].repeat(40, 1, 1, 1), [prompts[i] for i in first] * 40)
    assert verdict["spread"] < 1e-6
    assert verdict["frechet"] > 0.5


@pytest.mark.parametrize(
    ("pictures", "prompts", "told"),
    [
        (torch.zeros(30, 3, 8, 8), ["1"] * 30, "not (30, 3, 8, 8)"),
        (torch.zeros(25, 1, 8, 8), ["1"] * 25, "at least 26"),
        (torch.zeros(30, 1, 8, 8), ["1"] * 29, "30 pictures and 29 prompts"),
    ],
)
def test_the_judge_refuses_what_it_cannot_judge(pictures, prompts, told):
    with pytest.raises(ValueError, match="the judge `digits`") as raised:
        judge(pictures, prompts)
    assert told in str(raised.value)


def test_loading_the_classifier_does_not_move_the_random_state():
    digits_reward = importlib.import_module("stretto.rewards.digits")
    digits_reward._classifier.cache_clear()
    before = torch.get_rng_state()
    digits_reward.digits(torch.zeros(1, 1, 8, 8), ["3"])
    assert torch.equal(torch.get_rng_state(), before)
