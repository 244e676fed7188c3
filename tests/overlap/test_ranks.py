"""The pool that every distributed test stands on."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Ranks, RanksError


def add_up(value: int) -> int:
    total = torch.tensor(value + dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def fail_on_one(bad: int) -> None:
    if dist.get_rank() == bad:
        raise ValueError("one bad rank")
    dist.barrier()


def hang_on_one(bad: int) -> None:
    if dist.get_rank() == bad:
        time.sleep(100)


def die_on_one(bad: int) -> None:
    if dist.get_rank() == bad:
        os._exit(7)
    dist.barrier()


def test_one_pool_makes_worlds_of_several_sizes(ranks: Ranks) -> None:
    for num_ranks in (1, 3, 2):
        expected = num_ranks * 10 + num_ranks * (num_ranks - 1) // 2
        assert ranks.run(num_ranks, add_up, 10) == [expected] * num_ranks


def test_the_first_traceback_is_shown_and_the_pool_is_rebuilt(ranks: Ranks) -> None:
    with pytest.raises(RanksError, match=r"rank 1 failed first:(.|\n)*one bad rank"):
        ranks.run(2, fail_on_one, 1, group_timeout_s=1)
    assert ranks.run(2, add_up, 0) == [1, 1]


def test_a_hang_tells_where_each_rank_stands(ranks: Ranks) -> None:
    with pytest.raises(RanksError, match=r"rank 0: done(.|\n)*rank 1 stands at:(.|\n)*hang_on_one"):
        ranks.run(2, hang_on_one, 1, timeout_s=2)
    assert ranks.run(2, add_up, 0) == [1, 1]


def test_a_death_is_an_outcome(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(2, die_on_one, 1)
    assert outcomes[1].error == "died"
    assert "7" in outcomes[1].traceback
    assert "RuntimeError" in outcomes[0].error
    assert ranks.run(2, add_up, 0) == [1, 1]
