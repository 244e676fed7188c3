"""The example of a model of one's own does over several ranks what it does in one process."""

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _examples_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def loss_and_norm():
    import own_model

    return own_model.loss_and_norm()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_losses_and_gradient_norms_are_those_of_one_process(ranks, num_ranks):
    expected = loss_and_norm()
    for found in ranks.run(num_ranks, loss_and_norm):
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-10)
        assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=1e-10)
