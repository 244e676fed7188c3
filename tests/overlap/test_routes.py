"""The one index function, for every group size up to 64."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.overlap.routes import Slices, route, slice_sizes

KINDS = [("gather", "ring"), ("gather", "direct"), ("scatter", "ring"), ("scatter", "direct")]
SIZES = range(1, 65)


@pytest.mark.parametrize(("kind", "schedule"), KINDS)
def test_every_step_is_a_permutation_whose_sends_meet_their_receives(kind, schedule):
    for n in SIZES:
        for step in range(n - 1):
            routes = [route(kind, schedule, rank, n, step) for rank in range(n)]
            assert sorted(r.send_to for r in routes) == list(range(n))
            for rank, here in enumerate(routes):
                assert here.send_to != rank
                there = routes[here.send_to]
                assert there.recv_from == rank
                assert there.recv == here.send


@pytest.mark.parametrize(("kind", "schedule"), KINDS)
def test_every_slice_is_computed_once_own_first_after_a_gather_and_last_before_a_scatter(kind, schedule):
    for n in SIZES:
        for rank in range(n):
            computed = [route(kind, schedule, rank, n, step).compute for step in range(n)]
            assert sorted(computed) == list(range(n))
            assert computed[0 if kind == "gather" else -1] == rank


@pytest.mark.parametrize("schedule", ["ring", "direct"])
def test_a_gather_receives_what_it_computes_next_and_sends_only_what_it_has(schedule):
    for n in SIZES:
        for rank in range(n):
            steps = [route("gather", schedule, rank, n, step) for step in range(n)]
            has = {rank}
            for here, following in itertools.pairwise(steps):
                assert here.send in has
                assert here.recv == following.compute
                has.add(here.recv)


def test_a_ring_scatter_adds_to_the_sum_that_it_received_and_sends_it_on():
    for n in SIZES:
        for rank in range(n):
            steps = [route("scatter", "ring", rank, n, step) for step in range(n)]
            for here, following in itertools.pairwise(steps):
                assert here.send == here.compute
                assert here.recv == following.compute


def test_a_direct_scatter_sends_each_slice_to_its_owner_and_receives_in_the_fixed_order():
    for n in SIZES:
        for rank in range(n):
            steps = [route("scatter", "direct", rank, n, step) for step in range(n - 1)]
            assert all(here.send == here.send_to == here.compute and here.recv == rank for here in steps)
            assert [here.recv_from for here in steps] == [(rank - 1 - i) % n for i in range(n - 1)]


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 200), st.integers(1, 64))
def test_slices_are_those_of_torch_chunk(total, n):
    chunks = [len(chunk) for chunk in torch.arange(total).chunk(n)] if total else []
    assert slice_sizes(total, n) == chunks + [0] * (n - len(chunks))


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 5))
def test_subslices_tile_the_rows(sizes, num_subslices):
    slices = Slices(tuple(sizes), num_subslices)
    rows = [r for j in range(len(sizes)) for s in range(num_subslices) for r in range(10**9)[slices.rows(j, s)]]
    assert rows == list(range(slices.total))
    for j in range(len(sizes)):
        assert slices.rows(j).stop - slices.rows(j).start == sizes[j]
        assert sum(slices.size(j, s) for s in range(num_subslices)) == sizes[j]
