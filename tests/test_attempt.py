"""Every start of a job has a part of the store to itself, whatever the starts before it left there."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from stretto.attempt import store_of_this_attempt

TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def host():
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def start(host, delays, timeout=TIMEOUT):
    """The stores of ranks that come after so many seconds; None never comes."""

    def come(rank):
        if delays[rank] is None:
            return None
        time.sleep(delays[rank])
        store = dist.TCPStore("127.0.0.1", host.port, None, False, timeout=timeout)
        return store_of_this_attempt(store, rank, len(delays), timeout)

    with ThreadPoolExecutor(len(delays)) as pool:
        return list(pool.map(come, range(len(delays))))


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_ranks_of_one_start_share_a_store_that_no_other_start_sees(host, world_size):
    draw = random.Random(world_size)
    for _ in range(6):
        stores = start(host, [draw.choice([0, 0, 0.1, 0.3]) for _ in range(world_size)])
        assert not stores[0].check(["address"])
        for rank, store in enumerate(stores):
            store.set(f"rank {rank}", "")
        stores[-1].set("address", "here")
        for store in stores:
            store.wait([f"rank {rank}" for rank in range(world_size)])
            assert store.get("address") == b"here"


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_start_of_which_a_rank_never_came_is_given_up_and_does_not_harm_the_next(host, missing):
    delays = [None if rank == missing else 0 for rank in range(3)]
    told = rf"ranks \[{missing}\] of 3 did not start" if missing else "rank 0 did not answer rank 1"
    with pytest.raises(RuntimeError, match=told):
        start(host, delays, timedelta(seconds=0.5))
    stores = start(host, [0.2, 0, 0.1])
    stores[0].set("address", "here")
    assert [store.get("address") for store in stores] == [b"here"] * 3
