"""What ranks do in tests/test_first_failure.py. Run as a program it is one rank of a job under torchrun."""

import contextlib
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from stretto.attempt import store_of_this_attempt
from stretto.first_failure import FirstFailure
from stretto.ranks import Ranks
from stretto.record.signals import Interrupted, Signals


def store():
    """The world's store: the parent of the ranks, or torchrun's agent, hosts it."""
    return dist.distributed_c10d._get_default_store()


def accounts(**options):
    return FirstFailure(store(), dist.get_rank(), dist.get_world_size(), **options)


def new_reduce():
    """A sum over a new group of all ranks that gives up soon: here a rank's failure does not end its process."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=3))
    return lambda: dist.all_reduce(torch.ones(3), group=group)


def one_raises(culprit, phase):
    """One rank raises in `phase` while the others wait for it; each returns its line and how long it took."""
    reduce = new_reduce()
    with accounts(attempt=culprit) as failures:
        failures.phase(phase)
        try:
            if dist.get_rank() == culprit:
                raise ValueError("lr = -1: take\na positive one")
            reduce()
        except (ValueError, RuntimeError) as error:
            start = time.monotonic()
            return failures.report(error), time.monotonic() - start


def some_are_killed(victims, busy):
    """Killed in the rollout, noticed in the reduction; one rank may be busy meanwhile and notice nothing."""
    rank, reduce = dist.get_rank(), new_reduce()
    with accounts() as failures:
        failures.phase("rollout")
        time.sleep(1.5)
        if rank in victims:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == busy:
            compute_for(6.0)
            return failures._store.get("first").decode()
        failures.phase("reduction")
        try:
            reduce()
        except RuntimeError as error:
            return failures.report(error)


def compute_for(seconds):
    matrix, end = torch.randn(600, 600), time.monotonic() + seconds
    while time.monotonic() < end:
        matrix = torch.tanh(matrix @ matrix)


def nobody_comes():
    """A rank is alive, and never comes to the barrier."""
    reduce = new_reduce()
    with accounts(attempt=20) as failures:
        failures.phase("reward" if dist.get_rank() == 1 else "reduction")
        try:
            if dist.get_rank() == 1:
                time.sleep(6)
            else:
                reduce()
        except RuntimeError as error:
            return failures.report(error)
    return None


def stopped(at_once):
    """A rank ends by a signal; what it leaves in the account for the others, who may not have been told."""
    ranks = Ranks((1, 1, 1, 1))
    with accounts(attempt=10 + at_once) as failures:
        ranks.failures = failures
        failures.phase("rollout")
        with contextlib.suppress(Interrupted), ranks.failing_fast():
            raise Interrupted(signal.SIGTERM, at_once)
        return failures._store.get("first").decode() if failures._store.check(["first"]) else ""


def hosted_by_a_rank(culprit):
    """The store's host is gone before anything was entered."""
    own = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    failures = FirstFailure(own.clone(), 0, 2, bound_s=2.0)
    del own
    return failures.report(ValueError("lr = -1"))


def leaves(error, watched):
    """The process ends though a thread of it never would, and though it is told to stop, twice."""
    failures = accounts(bound_s=2.0)
    threading.Thread(target=time.sleep, args=(60,)).start()
    if watched:
        failures.__enter__()
    report = failures.report

    def interrupted(error):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
        return report(error)

    failures.report = interrupted
    with Signals():
        failures.leave(error)


def main(act):
    """One rank of a job: rollouts and reductions; in the second of the first attempt rank 1 acts up."""
    store, rank, world_size = next(dist.rendezvous("env://"))
    store = store_of_this_attempt(store, rank, world_size, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    failures = FirstFailure(store, rank, world_size, bound_s=6.0)
    with Signals(), failures:
        try:
            for iteration in range(2):
                failures.phase("rollout")
                time.sleep(1.5)  # so that it is seen there
                if (rank, iteration, attempt) == (1, 1, 0):
                    acts[act]()
                failures.phase("reduction")
                dist.all_reduce(torch.ones(3))
                if (act, rank, iteration) == ("raise", 2, 0):
                    time.sleep(60)  # notices nothing
        except Exception as error:
            failures.leave(error)
        print(f"rank {rank} finished attempt {attempt}\n", end="", flush=True)
    dist.destroy_process_group()


def fail():
    raise RuntimeError("a kernel of its own")


acts = {"kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "raise": fail}

if __name__ == "__main__":
    main(sys.argv[1])
