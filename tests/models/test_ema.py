"""The moving average: its formula, its swap, its state."""

import pytest
import torch

from stretto.models.ema import Ema


def live_parameters():
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(len(name))))
        for name, shape in [("a", (3, 4)), ("bb", (5,))]
    }


def move(parameters):
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(torch.ones_like(parameter))


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_the_average_follows_its_formula(decay):
    parameters = live_parameters()
    ema = Ema(parameters, decay)
    expected = {name: parameter.detach().double() for name, parameter in parameters.items()}
    for n in range(1, 30):
        move(parameters)
        ema.update()
        d = min((1 + n) / (10 + n), decay)
        expected = {name: d * value + (1 - d) * parameters[name].double() for name, value in expected.items()}
    for name, value in expected.items():
        torch.testing.assert_close(ema.average[name].double(), value, atol=1e-5, rtol=1e-6)
        assert not ema.average[name].requires_grad


def test_swapping_shows_the_average_and_brings_the_weights_back_bit_for_bit():
    parameters = live_parameters()
    ema = Ema(parameters, 0.9)
    move(parameters)
    ema.update()
    live = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    average = {name: tensor.clone() for name, tensor in ema.average.items()}
    with ema.swapped():
        assert all(torch.equal(parameters[name], average[name]) for name in average)
    assert all(torch.equal(parameters[name], live[name]) for name in live)
    with pytest.raises(RuntimeError, match="inside"), ema.swapped():
        raise RuntimeError("inside")
    assert all(torch.equal(parameters[name], live[name]) for name in live)
    assert all(torch.equal(ema.average[name], average[name]) for name in average)
    move(parameters)
    assert all(torch.equal(ema.average[name], average[name]) for name in average)


def test_a_loaded_state_goes_on_as_if_it_had_never_stopped():
    parameters, copied = live_parameters(), live_parameters()
    ema = Ema(parameters, 0.9)
    for _ in range(3):
        move(parameters)
        move(copied)
        ema.update()
    resumed = Ema(copied, 0.9)
    resumed.load_state_dict(ema.state_dict())
    for both in ((parameters, ema), (copied, resumed)):
        move(both[0])
        both[1].update()
    assert all(torch.equal(ema.average[name], resumed.average[name]) for name in ema.average)


def test_a_state_of_another_model_is_refused_and_changes_nothing():
    ema = Ema(live_parameters(), 0.9)
    before = {name: tensor.clone() for name, tensor in ema.average.items()}
    for average in ({"a": torch.zeros(3, 4)}, {"a": torch.zeros(3, 4), "bb": torch.zeros(6)}):
        with pytest.raises(ValueError, match="the EMA belongs to another model: bb is"):
            ema.load_state_dict({"num_updates": 4, "average": average})
    assert ema.num_updates == 0
    assert all(torch.equal(ema.average[name], before[name]) for name in before)
