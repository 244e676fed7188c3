"""A store that belongs to this start of the job alone.

torchrun's agent keeps one TCPStore over all restarts (torch 2.13), and PyTorch makes its groups through it under the
same keys each time: a rank of the second start can read where a rank of the first one listened, and is refused there.
The number of restarts does not tell starts apart either, for each host counts its own. So the ranks that are alive
agree on a word that was never used before: every rank says hello with a word of its own, rank 0 answers the hellos it
sees, old ones among them, until each rank has acknowledged an answer to its own. The hazard is a rank that never
starts: `timeout` ends the wait.
"""

import json
import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

__all__ = ["store_of_all_attempts", "store_of_this_attempt"]

_POLL_S = 0.05


def store_of_all_attempts() -> dist.Store | None:
    """What every start of a job under torchrun shares; None where no agent keeps a store.

    A connection of its own to the agent's; one rank alone may ask.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.PrefixStore("stretto/job", dist.TCPStore(address, port, is_master=False, wait_for_workers=False))


def store_of_this_attempt(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The part of the job's store under a prefix that only this start's ranks know; all ranks call this.

    Raises RuntimeError after `timeout`, naming the ranks that did not come.
    """
    desk = dist.PrefixStore("stretto/attempt", store)
    mine, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    desk.set(f"hello/{rank}", mine)
    word = _welcome(desk, mine, world_size, deadline) if rank == 0 else _introduce(desk, rank, mine, deadline)
    return dist.PrefixStore(f"stretto/attempt/{word}", store)


def _welcome(desk: dist.Store, word: str, world_size: int, deadline: float) -> str:
    """Rank 0's side: answer hellos until every rank has acknowledged."""
    answered: dict[int, str] = {}
    missing = list(range(1, world_size))
    while missing:
        if time.monotonic() > deadline:
            raise RuntimeError(f"ranks {missing[:8]} of {world_size} did not start in time")
        hellos = {rank: desk.get(f"hello/{rank}").decode() for rank in missing if desk.check([f"hello/{rank}"])}
        if hellos.items() - answered.items():
            answered |= hellos
            desk.set("welcome", json.dumps({"word": word, "hellos": list(answered.values())}))
        missing = [rank for rank in missing if not desk.check([f"seen/{word}/{rank}"])]
        time.sleep(_POLL_S if missing else 0)
    return word


def _introduce(desk: dist.Store, rank: int, mine: str, deadline: float) -> str:
    """Another rank's side: wait for an answer to its own hello."""
    while time.monotonic() < deadline:
        if desk.check(["welcome"]):
            welcome = json.loads(desk.get("welcome"))
            if mine in welcome["hellos"]:
                desk.set(f"seen/{welcome['word']}/{rank}", "")
                return str(welcome["word"])
        time.sleep(_POLL_S)
    raise RuntimeError(f"rank 0 did not answer rank {rank} in time")
