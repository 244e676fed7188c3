"""The trivial reward, on pictures and on video."""

import pytest
import torch

from stretto.rewards.brightness import brightness


@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (2, 3, 8, 8), (2, 5, 3, 8, 8)])
def test_brightness_is_the_mean_of_any_media(shape):
    media = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    values = brightness(media, ["a", "b"], unused=1)
    assert values.shape == (2,)
    assert values[1].item() == pytest.approx(media[1].mean().item(), abs=1e-6)
