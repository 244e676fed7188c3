"""The published implementations' numbers, by every dynamics and every schedule."""

import json
from pathlib import Path

import pytest
import torch

from stretto.policy import AdvantageRule, Batch, Objective, Policy, Process, SampleKey
from stretto.policy.schedules import make_schedule

CASES = Path(__file__).parent.parent / "cases"
STEPS = json.loads((CASES / "sde_steps.json").read_text())["cases"]
GRADIENTS = json.loads((CASES / "policy_gradient.json").read_text())["cases"]


@pytest.mark.parametrize("case", STEPS, ids=lambda c: f"{c['dynamics']}-{c['step']}-{len(c['sigmas'])}")
def test_a_stochastic_step_gives_the_published_numbers(case):
    process = Process(case["sigmas"], case["dynamics"], case["noise_level"])
    x, velocity, x_next, mean = (
        torch.tensor(case[name]).reshape(case["shape"]) for name in ("x", "velocity", "x_next", "mean")
    )
    steps = torch.full((len(x),), case["step"])
    ours = process.mean(x, velocity, steps)
    torch.testing.assert_close(ours, mean, atol=1e-6, rtol=0)
    assert float(process.noise_std(steps, x)[0].flatten()[0]) == pytest.approx(case["noise_std"], abs=1e-6)
    log_prob = process.log_prob(ours, x_next, steps)
    torch.testing.assert_close(log_prob, torch.tensor(case["log_prob"]), atol=1e-6, rtol=0)


class GivenNoise:
    """The noise of a case file."""

    def __init__(self, case):
        samples, dim = case["num_samples"], case["dim"]
        self.x_init = torch.tensor(case["x_init"]).reshape(samples, dim)
        self.eps = torch.tensor(case["eps"]).reshape(-1, samples, dim)

    def initial(self, samples):
        return self.x_init[[key.sample for key in samples]]

    def step(self, samples, step):
        return self.eps[step, [key.sample for key in samples]]


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("name", ["native", "retain", "reweight", "two_sum", "hybrid"])
@pytest.mark.parametrize("case", GRADIENTS, ids=lambda c: c["dynamics"])
def test_every_schedule_gives_the_published_gradient(case, name, rows):
    network = torch.nn.Sequential(
        torch.nn.Linear(7, 8, bias=False), torch.nn.Tanh(), torch.nn.Linear(8, 6, bias=False)
    )
    with torch.no_grad():
        network[0].weight.copy_(torch.tensor(case["W1"]).reshape(8, 7))
        network[2].weight.copy_(torch.tensor(case["W2"]).reshape(6, 8))

    policy = Policy(
        velocity=lambda x, sigma, condition: network(torch.cat([x, sigma.unsqueeze(1)], dim=1)),
        parameters=dict(network.named_parameters()),
        process=Process(case["sigmas"], case["dynamics"], case["noise_level"]),
        objective=Objective(clip_range=1e-4),
        noise=GivenNoise(case),
        module=network,
    )
    rule = AdvantageRule(unbiased=True)
    schedule = make_schedule(name, policy, rule=rule, num_samples=case["num_samples"])
    rewards = torch.tensor(case["rewards"], dtype=torch.float64)
    keys = [SampleKey(0, 0, m) for m in range(case["num_samples"])]
    batches = [Batch(tuple(keys[i : i + rows]), {}, tuple(case["trained_steps"])) for i in range(0, len(keys), rows)]
    trajectories = [
        schedule.rollout(batch, lambda b, _: rewards[[k.sample for k in b.samples]].unsqueeze(1)) for batch in batches
    ]
    advantages = rule(rewards.view(1, -1, 1)).values[0]
    torch.testing.assert_close(advantages, torch.tensor(case["advantages"]).double(), atol=1e-5, rtol=1e-5)
    schedule.update(trajectories, list(advantages.split([len(b.samples) for b in batches])), 1.0)

    final = torch.cat([t.latents for t in trajectories]).flatten()
    torch.testing.assert_close(final, torch.tensor(case["x_final"]), atol=1e-6, rtol=1e-6)
    for layer, expected in ((network[0], case["grad_W1"]), (network[2], case["grad_W2"])):
        expected = torch.tensor(expected)
        error = (layer.weight.grad.flatten() - expected).norm() / expected.norm()
        assert float(error) < 1e-5
