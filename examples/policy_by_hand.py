"""The policy room alone: a velocity of your own, a reward of your own, torch and nothing else.

    python examples/policy_by_hand.py

A small network moves points of the plane; the reward is high on the unit circle. Prints the mean reward as it rises.
"""

import torch
from torch import nn

from stretto.policy import (
    AdvantageRule,
    Batch,
    KeyedNoise,
    Objective,
    Policy,
    Process,
    SampleKey,
    make_schedule,
    make_sigmas,
)

NUM_SAMPLES, NUM_STEPS, TRAINED_STEPS = 32, 8, (0, 1, 2, 3)


def main(iterations: int = 60) -> list[float]:
    """Train, and return the mean reward of every iteration."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
    policy = Policy(
        velocity=lambda latents, sigma, condition: network(torch.cat([latents, sigma.unsqueeze(1)], dim=1)),
        parameters=dict(network.named_parameters()),
        process=Process(make_sigmas("shifted", NUM_STEPS, shift=3.0), "flow_sde", 0.7),
        objective=Objective(),
        noise=KeyedNoise(seed=0, latent_shape=(2,)),
        module=network,
    )
    rule = AdvantageRule()
    schedule = make_schedule("reweight", policy, rule=rule, num_samples=NUM_SAMPLES)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    rewards = []
    for iteration in range(iterations):
        samples = tuple(SampleKey(iteration, prompt=0, sample=m) for m in range(NUM_SAMPLES))
        trajectory = schedule.rollout(Batch(samples, {}, TRAINED_STEPS), on_the_circle)
        advantages = rule(trajectory.rewards.unsqueeze(0)).values[0]
        schedule.update([trajectory], [advantages], scale=1 / (NUM_SAMPLES * len(TRAINED_STEPS)))
        optimizer.step()
        optimizer.zero_grad()
        rewards.append(float(trajectory.rewards.mean()))
    return rewards


def on_the_circle(batch: Batch, latents: torch.Tensor) -> torch.Tensor:
    """(B, 1) rewards: minus the distance of each point to the unit circle."""
    return -(latents.norm(dim=1) - 1).abs().double().unsqueeze(1)


if __name__ == "__main__":
    for iteration, reward in enumerate(main()):
        if iteration % 10 == 9:
            print(f"{iteration + 1:>3}  reward {reward:.3f}")
