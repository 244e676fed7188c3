"""How the gradients of a run's ranks become one, by the settings of [parallel].

`late`: a sample's gradient leaves during its last backward, before its advantage is known, and its owner scales when
it sums. `coalesced`: gradients are added up locally and summed over the ranks once an optimizer step. `per_step`: at
every trained step, as published trainers do; the baseline.
"""

from stretto.choose import Choice
from stretto.config import Config
from stretto.policy import Policy
from stretto.ranks import Ranks
from stretto.reduction import Kind, Reduction
from stretto.replicated import Replicated
from stretto.sharded import Sharded

__all__ = ["kind_of", "make_reduction"]


def make_reduction(config: Config, policy: Policy, ranks: Ranks, choice: Choice) -> Reduction:
    """The reduction of a run."""
    kind = kind_of(config, ranks, choice.name)
    if kind == "none":
        return Reduction(policy)
    if ranks.sizes["shard"] > 1:
        return Sharded(policy, ranks, kind)
    return Replicated(policy, ranks, kind, is_sharded=config.parallel.optimizer_state == "sharded")


def kind_of(config: Config, ranks: Ranks, schedule: str) -> Kind:
    """The reduction that a run uses with a schedule: the recipe's, or the default for it."""
    if ranks.mesh is None:
        return "none"
    if ranks.num_data_ranks * ranks.sizes["ulysses"] == 1:  # tensor parallel alone
        return "coalesced"
    wanted = config.parallel.reduction
    if wanted != "auto":
        return wanted
    is_late = schedule == "two_sum" or (schedule == "reweight" and config.sampling.samples_per_forward == 1)
    return "late" if is_late else "coalesced"
