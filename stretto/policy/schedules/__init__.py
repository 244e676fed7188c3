"""Five schedules of one gradient: native, retain, reweight, two-sum, hybrid; over many ranks late and late hybrid."""

from stretto.policy.advantage import AdvantageRule
from stretto.policy.rollout import Policy
from stretto.policy.schedules.base import Schedule, StalePolicyError
from stretto.policy.schedules.hybrid import Hybrid
from stretto.policy.schedules.late import Late, Reducer
from stretto.policy.schedules.late_hybrid import LateHybrid
from stretto.policy.schedules.native import Native
from stretto.policy.schedules.retain import Retain
from stretto.policy.schedules.reweight import Reweight
from stretto.policy.schedules.stats import UpdateStats
from stretto.policy.schedules.two_sum import TwoSum

__all__ = [
    "Hybrid",
    "Late",
    "LateHybrid",
    "Native",
    "Reducer",
    "Retain",
    "Reweight",
    "Schedule",
    "StalePolicyError",
    "TwoSum",
    "UpdateStats",
    "make_schedule",
]


def make_schedule(
    name: str,
    policy: Policy,
    *,
    rule: AdvantageRule,
    num_samples: int,
    replay_batch: int = 1,
    retain_last: int = 1,
) -> Schedule:
    """The schedule that a recipe names (not `auto`)."""
    match name:
        case "native":
            return Native(policy, replay_batch)
        case "retain":
            return Retain(policy)
        case "reweight":
            return Reweight(policy)
        case "two_sum":
            return TwoSum(policy, rule, num_samples)
        case "hybrid":
            return Hybrid(policy, retain_last)
    raise ValueError(f"schedule.name = {name!r}: choose native, retain, reweight, two_sum or hybrid")
