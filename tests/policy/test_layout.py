"""Which rank makes which sample in which round, for every number of samples, rows and ranks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.policy.layout import Place, parts, waves

fast = settings(max_examples=200, deadline=None, derandomize=True)
SIZES = (
    st.integers(1, 6),
    st.integers(2, 9),
    st.integers(1, 12),
    st.integers(1, 9),
    st.booleans(),
    st.integers(1, 3),
)


@fast
@given(*SIZES)
def test_every_sample_is_made_once_and_no_rank_makes_two_more_than_another(
    prompts, samples, rows, ranks, together, kinds
):
    trained = {p: (p % kinds,) for p in range(prompts)}
    result = waves(trained, samples, rows, ranks, together=together)
    rounds = [r for wave in result for r in wave.rounds]
    assert all(len(r) == ranks for r in rounds)
    batches = [batch for r in rounds for batch in r]
    assert sorted(place for batch in batches for place in batch) == [
        (p, m) for p in range(prompts) for m in range(samples)
    ]
    assert max(map(len, batches)) <= rows
    loads = [sum(len(r[rank]) for r in rounds) for rank in range(ranks)]
    assert max(loads) - min(loads) <= 1
    for r in rounds:
        assert max(map(len, r)) - min(map(len, r)) <= 1
        assert len({trained[place.prompt] for batch in r for place in batch}) == 1
    assert not together or len(result) == 1


@fast
@given(*SIZES)
def test_a_wave_completes_its_prompt_groups_and_holds_no_more_than_it_must(
    prompts, samples, rows, ranks, together, kinds
):
    trained = {p: (p % kinds,) for p in range(prompts)}
    result = waves(trained, samples, rows, ranks, together=together)
    assert sorted(p for wave in result for p in wave.prompts) == list(range(prompts))
    for wave in result:
        made = sorted(place for r in wave.rounds for batch in r for place in batch)
        assert made == sorted(Place(p, m) for p in wave.prompts for m in range(samples))
        assert together or len(wave.prompts) <= max(rows, -(-ranks // samples) + rows)


@fast
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 5))
def test_with_one_row_a_forward_rank_r_makes_sample_q_ranks_plus_r(prompts, rounds, ranks):
    samples = max(2, rounds * ranks)
    if samples % ranks:
        return
    for prompt, wave in enumerate(waves(dict.fromkeys(range(prompts), (0,)), samples, 1, ranks)):
        expected = [tuple((Place(prompt, q * ranks + r),) for r in range(ranks)) for q in range(samples // ranks)]
        assert list(wave.rounds) == expected


def test_with_more_ranks_than_samples_groups_of_ranks_take_a_prompt_each():
    first, second = waves(dict.fromkeys(range(4), (0,)), 3, 1, 6)
    assert first.prompts == (0, 1)
    assert second.prompts == (2, 3)
    assert first.rounds == (tuple((Place(p, m),) for p in (0, 1) for m in range(3)),)


@fast
@given(st.integers(1, 6), st.integers(2, 7), st.integers(1, 20), st.integers(1, 3))
def test_one_rank_packs_consecutive_samples_into_whole_batches(prompts, samples, rows, kinds):
    trained = {p: (p % kinds,) for p in range(prompts)}
    for wave in waves(trained, samples, rows):
        places = [place for r in wave.rounds for place in r[0]]
        assert places == [Place(p, m) for p in wave.prompts for m in range(samples)]
        assert all(len(r[0]) == rows for r in wave.rounds[:-1])


@fast
@given(st.integers(1, 30), st.integers(1, 8))
def test_parts_are_disjoint_and_balanced(num_prompts, num_parts):
    result = parts(num_prompts, min(num_parts, num_prompts))
    assert [p for part in result for p in part] == list(range(num_prompts))
    assert max(map(len, result)) - min(map(len, result)) <= 1
