"""The law is the closed form of the simulated loops, and the choice follows it."""

import pytest

from stretto.overlap.law import choose, exposed_s, is_hidden, overlapped_s, plain_s, slicing_s
from stretto.overlap.simulation import finish_times_s

RHO = [0.0, 0.3, 0.5, 0.56, 0.75, 0.875, 1.0, 1.5, 3.0]
LOOPS = [("gather", "ring"), ("gather", "direct"), ("scatter", "ring"), ("scatter", "direct")]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(("kind", "schedule"), LOOPS)
def test_the_law_is_what_the_simulated_loops_take(kind, schedule, world_size):
    for rho in RHO:
        for m in (1, 2, 4):
            times = finish_times_s(
                kind,
                schedule,
                world_size,
                product_s=lambda rank, owner: 1.0 / world_size,
                message_s=rho / max(1, world_size - 1),
                num_subslices=m,
            )
            assert times == pytest.approx([overlapped_s(1.0, rho, world_size, m)] * world_size, rel=1e-12)


@pytest.mark.parametrize(
    ("world_size", "rho", "shares"),
    [
        (2, 0.50, (0, 0, 0, 0.250, 0.125)),
        (2, 0.75, (0.333, 0, 0, 0.250, 0.125)),
        (2, 1.00, (0.500, 0.250, 0.125, 0.250, 0.125)),
        (4, 0.75, (0, 0, 0, 0.250, 0.125)),
        (4, 1.00, (0.250, 0.125, 0.063, 0.250, 0.125)),
        (4, 1.50, (0.500, 0.417, 0.375, 0.500, 0.417)),
        (8, 1.00, (0.125, 0.063, 0.031, 0.250, 0.125)),
        (8, 1.50, (0.417, 0.375, 0.354, 0.500, 0.417)),
    ],
)
def test_the_exposed_shares_are_the_tabled_ones(world_size, rho, shares):
    ours = [exposed_s(overlapped_s(1.0, rho, world_size, m), 1.0) / rho for m in (1, 2, 4)]
    slicing = [exposed_s(slicing_s(1.0, rho, k), 1.0) / rho for k in (4, 8)]
    assert [*ours, *slicing] == pytest.approx(shares, abs=6e-4)


def test_communication_is_hidden_exactly_up_to_the_bound():
    assert is_hidden(1.0, 0.75, 4)
    assert not is_hidden(1.0, 0.7501, 4)
    assert not is_hidden(1.0, 1.0, 8, 4)
    assert overlapped_s(1.0, 0.75, 4) == 1.0
    assert overlapped_s(1.0, 0.7501, 4) > 1.0


def test_the_choice_takes_the_fewest_pieces_that_hide_all():
    assert choose(1.0, 0.4, 2).num_subslices == 1
    assert choose(1.0, 0.7, 2).num_subslices == 2
    assert choose(1.0, 0.8, 2).num_subslices == 4
    choice = choose(1.0, 0.8, 2)
    assert (choice.schedule, choice.predicted_s, choice.plain_s) == ("direct", 1.0, plain_s(1.0, 0.8))
    assert "num_subslices=4" in str(choice)


def test_more_pieces_must_be_worth_it():
    assert choose(1.0, 0.7, 4, cut_compute_s={1: 1.0, 2: 0.99, 4: 0.985}).num_subslices == 1
    assert choose(1.0, 0.7, 4, cut_compute_s={1: 1.0, 2: 0.97, 4: 0.965}).num_subslices == 2


def test_the_choice_is_plain_where_cutting_costs_more_than_it_hides():
    assert choose(1.0, 0.1, 4, cut_compute_s={1: 1.2, 2: 1.4}).schedule == "plain"
    assert choose(1.0, 0.3, 4, cut_compute_s={1: 1.2, 2: 1.4}).num_subslices == 1
    assert choose(1.0, 0.1, 8, message_s=0.2).schedule == "plain"
    assert choose(1.0, 0.0, 1).schedule == "plain"


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_waiting_late_takes_the_skew_out_of_attention_under_a_causal_mask(world_size):
    def causal(rank: int, owner: int) -> float:
        return (2 * owner + 1) / world_size**2

    def end(window: int, rho: float) -> float:
        message_s = rho / max(1, world_size - 1)
        return max(
            finish_times_s("scatter", "direct", world_size, product_s=causal, message_s=message_s, window=window)
        )

    for rho in (0.1, 0.3, 0.56, 0.75, 1.0):
        assert end(world_size, rho) <= end(2, rho) <= end(1, rho)
    assert end(world_size, 0.1) == pytest.approx(1.0)
    if world_size == 8:
        assert end(1, 0.1) > 1.3
        assert end(world_size, 0.3) < 1.03


def test_waiting_late_costs_nothing_where_products_are_equal():
    for rho in RHO:
        for window in (1, 2, 8):
            times = finish_times_s(
                "scatter",
                "direct",
                8,
                product_s=lambda rank, owner: 1 / 8,
                message_s=rho / 7,
                window=window,
            )
            assert max(times) == pytest.approx(overlapped_s(1.0, rho, 8))


def test_impossible_times_are_refused():
    with pytest.raises(ValueError, match="world_size=0"):
        choose(1.0, 1.0, 0)
    with pytest.raises(ValueError, match="negative times"):
        choose(1.0, -1.0, 2)
