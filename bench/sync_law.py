"""The law of `bench.sync`: how long an iteration takes, how much of it waits for gradients and for parameters.

One link a rank, one message after another; a reduction takes c = rho F, in equal pieces, one a block. A backward
makes the blocks' gradients one after another. The hazard is what it leaves out: what a message costs besides its
bytes, and the ranks' own skew.
"""

__all__ = ["law"]


def law(way, problem, rho):
    """Seconds: the whole iteration, blocked for gradients, blocked for published parameters."""
    p, blocks = problem, problem.num_blocks
    c = rho * p.forward_s
    is_native = way.schedule == "native"
    update_s = p.num_steps * (p.traced_s + p.backward_s)
    sample_s = update_s + p.reward_s + (p.num_steps * p.forward_s if is_native else 0)
    first_s = p.forward_s if is_native else p.traced_s
    published = _arrival([c / blocks] * blocks, first_s / blocks) if way.shards else 0.0
    blocked = c
    if way.is_per_step:
        message_s = (1 if way.shards else 2) * c / blocks
        leaving = [(block if way.leaves_early else blocks) * p.backward_s / blocks for block in range(1, blocks + 1)]
        blocked = p.rounds * p.num_steps * (_sent(leaving, message_s) - p.backward_s)
    if way.reduction == "late":
        blocked = _late(p, c, sample_s)
    return {"step": p.rounds * sample_s + published + blocked, "blocked": blocked, "published": published}


def _sent(ready, message_s):
    """When the last message has arrived, each sent when it is ready and the link is free."""
    free = 0.0
    for moment in ready:
        free = max(free, moment) + message_s
    return free


def _arrival(messages, compute_s):
    """Seconds in which a forward of equal blocks waits for their parameters, which come in order from its start."""
    clock = waited = arrived = 0.0
    for message_s in messages:
        arrived += message_s
        waited += max(0.0, arrived - clock)
        clock = max(clock, arrived) + compute_s
    return waited


def _late(p, c, sample_s):
    """Seconds in which the owner waits, after each round's rewards, for that round's pieces."""
    clock = free = waited = 0.0
    for _ in range(p.rounds):
        clock += sample_s
        begun = clock - p.reward_s - p.backward_s
        for block in range(1, p.num_blocks + 1):
            free = max(free, begun + block * p.backward_s / p.num_blocks) + c / p.num_blocks
        waited += max(0.0, free - clock)
        clock = max(clock, free)
    return waited
