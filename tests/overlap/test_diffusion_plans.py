"""FLUX and Wan of diffusers, parallel by the shipped plans, equal one process: output and every gradient."""

import pytest

from tests.overlap import diffusion_cases
from tests.ranks import Ranks


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded rows", "whole rows"])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("family", ["flux", "wan", "wan i2v"])
def test_a_diffusion_transformer_equals_one_process(ranks: Ranks, num_ranks: int, family: str, sharded: bool) -> None:
    ranks.run(num_ranks, diffusion_cases.trained, family, sharded, num_ranks == 3, False, timeout_s=120)


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded rows", "whole rows"])
@pytest.mark.parametrize("family", ["flux", "wan"])
def test_an_adapted_diffusion_transformer_equals_one_process(ranks: Ranks, family: str, sharded: bool) -> None:
    ranks.run(3, diffusion_cases.trained, family, sharded, False, True, timeout_s=120)
