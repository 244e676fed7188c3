"""The mathematics of flow-model reinforcement learning; needs only torch.

Sigma schedules and stochastic steps over any velocity, keyed noise, advantages, one loss, and five schedules that
make its gradient.
"""

from stretto.policy.advantage import AdvantageRule, Advantages
from stretto.policy.loss import Objective
from stretto.policy.noise import KeyedNoise, SampleKey, fingerprint
from stretto.policy.rollout import Batch, Condition, NonFiniteError, Policy, Trajectory, Velocity
from stretto.policy.sampling import ode
from stretto.policy.schedules import Late, LateHybrid, Reducer, Schedule, StalePolicyError, make_schedule
from stretto.policy.sde import Process
from stretto.policy.sigmas import make_sigmas
from stretto.policy.trained_steps import TrainedStepsRule

__all__ = [
    "AdvantageRule",
    "Advantages",
    "Batch",
    "Condition",
    "KeyedNoise",
    "Late",
    "LateHybrid",
    "NonFiniteError",
    "Objective",
    "Policy",
    "Process",
    "Reducer",
    "SampleKey",
    "Schedule",
    "StalePolicyError",
    "TrainedStepsRule",
    "Trajectory",
    "Velocity",
    "fingerprint",
    "make_schedule",
    "make_sigmas",
    "ode",
]
