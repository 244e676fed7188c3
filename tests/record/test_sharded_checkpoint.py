"""Checkpoints of many ranks: bitwise equal however the state is split, behind other work, whole or not there."""

import os
from pathlib import Path

import pytest
import torch

from stretto.record import checkpoint
from tests.ranks import Ranks
from tests.record import checkpoint_cases as cases


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(("saving", "loading"), [(4, (4, 1, 2, 3)), (1, (4,)), (2, (3,)), (3, (2,))])
def test_what_some_ranks_saved_any_number_of_ranks_load_bit_for_bit(ranks, tmp_path, saving, loading, asynchronous):
    for names in ranks.run(saving, cases.save, tmp_path, 7, asynchronous):
        assert names == ["iteration-00000007"]
    for num_ranks in loading:
        for outcome in ranks.run(num_ranks, cases.load, tmp_path):
            assert outcome == (7, {"rank": 0}, [])
    found = checkpoint.newest_whole(tmp_path)
    assert found.world_size == saving
    for name, tensor in checkpoint.read_tensors(found).items():
        assert torch.equal(tensor, cases.whole(7)[name])


def test_a_save_in_the_background_meets_no_other_collective_and_blocks_for_the_copy_alone(ranks, tmp_path):
    for (first, second), num_sums in ranks.run(4, cases.beside_other_collectives, tmp_path):
        assert num_sums == 100
        assert first < 0.8  # writing takes a second
        assert second < 1.8  # and the second save waits for the first
    for outcome in ranks.run(4, cases.load, tmp_path):
        assert outcome == (2, {}, [])
    assert torch.equal(
        checkpoint.read_tensors(checkpoint.whole(tmp_path / "iteration-00000001"))["few"], cases.whole(1)["few"]
    )


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_while_it_saves_leaves_the_checkpoint_before(ranks, tmp_path, victim):
    outcomes = ranks.outcomes(3, cases.killed, tmp_path, victim)
    assert [outcome.error for outcome in outcomes] == ["died" if rank == victim else "" for rank in range(3)]
    for outcome in ranks.run(2, cases.load, tmp_path):
        assert outcome == (1, {}, [])
    ranks.run(3, cases.save, tmp_path, 2, True)
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["1", "2"]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_full_disk_of_one_rank_is_told_to_all_and_saving_goes_on(ranks, tmp_path, rank, asynchronous):
    ranks.run(3, cases.refused, tmp_path, rank, asynchronous)
    assert [path.name[-1] for path in checkpoint.newest(tmp_path)] == ["4", "1"]


def test_a_folder_that_a_rank_does_not_share_is_refused(ranks, tmp_path):
    ranks.run(2, cases.unseen, tmp_path)


def test_all_ranks_pass_over_the_same_damage(ranks, tmp_path):
    for iteration in (1, 2):
        ranks.run(3, cases.save, tmp_path, iteration, False)
    path = tmp_path / "iteration-00000002" / "__1_0.distcp"
    os.truncate(path, 10)
    for iteration, _, notes in ranks.run(3, cases.load, tmp_path):
        assert iteration == 1
        (note,) = notes
        assert "iteration-00000002 is damaged (__1_0.distcp has 10 bytes" in note
    (tmp_path / "iteration-00000001" / "manifest.json").write_text("")
    assert_one_line(ranks.run(3, cases.told, tmp_path), "no checkpoint is whole")


def test_all_ranks_raise_the_same_line_for_another_shape(ranks, tmp_path):
    ranks.run(3, cases.save, tmp_path, 1, False)
    assert_one_line(
        ranks.run(3, cases.refused_shape, tmp_path), "few is float32 (2, 5) there and float32 (3, 5) here"
    )


def assert_one_line(told: list[str], part: str) -> None:
    assert len(set(told)) == 1
    assert part in told[0]
    assert "\n" not in told[0]
    assert Path(told[0].split(" ")[0]) != Path()
