"""The bench of many ranks: its law adds up, its ways make one gradient, its page says what its results say."""

import json
from dataclasses import asdict

import pytest

from bench import sync, sync_page
from bench.link import unavailable
from bench.sync_law import law
from bench.sync_ranks import WAYS, Problem, cell
from tests.ranks import Ranks

BY_LABEL = {way.label: way for way in WAYS}
PROBLEM = Problem(
    forward_s=1.0, traced_s=1.0, backward_s=2.0, reward_s=2.0, elements=0, products=0, num_blocks=4, rounds=1
)


def predicted(label, rho, problem=PROBLEM):
    return law(BY_LABEL[label], problem, rho)


def test_the_law_of_every_way():
    assert predicted("native, per step, all-reduced", 0.8) == pytest.approx(
        {"step": 58, "blocked": 16, "published": 0}
    )
    assert predicted("native, per step", 0.8) == pytest.approx({"step": 50.2, "blocked": 8, "published": 0.2})
    assert predicted("native, per step, during backward", 0.8)["blocked"] == pytest.approx(10 * 0.2)
    assert predicted("native, per step, all-reduced during backward", 0.8)["blocked"] == pytest.approx(10 * 0.4)
    assert predicted("native, coalesced", 0.8) == pytest.approx({"step": 43.0, "blocked": 0.8, "published": 0.2})
    assert predicted("reweight, coalesced", 0.8)["step"] == pytest.approx(33.0)
    assert predicted("reweight, late", 0.8) == pytest.approx({"step": 32.2, "blocked": 0, "published": 0.2})


def test_late_is_hidden_by_backward_and_reward_and_exposes_the_rest():
    assert predicted("reweight, late", 3.5)["blocked"] == pytest.approx(0)  # half a second after which 3.5 are left
    assert predicted("reweight, late", 4.0)["blocked"] == pytest.approx(0.5)
    twice = Problem(**(asdict(PROBLEM) | {"rounds": 2}))
    assert predicted("reweight, late", 4.0, twice)["blocked"] == pytest.approx(1.0)
    assert predicted("reweight, late", 0.8, twice)["step"] == pytest.approx(64.2)


def test_a_link_slower_than_a_forward_delays_it_by_what_is_left():
    assert predicted("reweight, late", 2.0)["published"] == pytest.approx(1.25)


@pytest.fixture(scope="module")
def ranks():
    pool = Ranks()
    yield pool
    pool.close()


@pytest.mark.parametrize("rounds", [1, 2])
def test_every_way_makes_the_same_gradient_and_goes_on_from_published_parameters(ranks, rounds):
    problem = Problem(1e-4, 1e-4, 1e-4, 1e-3, elements=4096, products=2, num_blocks=2, num_steps=3, rounds=rounds)
    for found in ranks.run(2, cell, asdict(problem), list(BY_LABEL), 2):
        assert set(found) == set(BY_LABEL)
        for turns in found.values():
            assert len(turns) == 2
            assert all(0 <= turn["blocked"] + turn["published"] + turn["gathered"] < turn["step"] for turn in turns)


def result(late_s, blocked_s):
    seconds = {label: {"step": [2.0] * 5, "blocked": [0.1] * 5} for label in BY_LABEL}
    seconds["reweight, late"] = {"step": [late_s] * 5, "blocked": [blocked_s] * 5}
    laws = {label: predicted(label, 0.8) for label in BY_LABEL}
    return {
        **{"num_ranks": 4, "tuning": "full", "repeats": 5, "problem": asdict(PROBLEM)},
        **{"seconds": seconds, "law_s": laws},
    }


@pytest.mark.parametrize(("late_s", "blocked_s", "met"), [(1.0, 0.004, True), (1.2, 0.006, False)])
def test_a_target_is_met_when_what_was_measured_reaches_it(late_s, blocked_s, met):
    found = {claim["what"]: claim for claim in sync.claims(result(late_s, blocked_s))}
    assert found["blocked for gradients, late / coalesced"]["met"] == met
    speed = found["native, per step, all-reduced / reweight, late"]
    assert (speed["value"], speed["met"]) == (pytest.approx(2 / late_s), met)
    assert speed["law"] == pytest.approx(58 / 32.2)
    assert 0.8 < speed["from_rho"] < found["native, per step / reweight, late"]["from_rho"] < 1.75


def test_where_the_law_leaves_something_to_wait_for_nothing_is_claimed():
    slow = result(1.0, 0.5)
    slow["law_s"]["reweight, late"] = predicted("reweight, late", 4.0)
    slow["num_ranks"] = 2
    assert sync.claims(slow) == []


def test_without_root_the_bench_says_so_and_ends_with_two(monkeypatch, capsys):
    monkeypatch.setattr(sync, "unavailable", lambda: "needs root")
    with pytest.raises(SystemExit) as ended:
        sync.main(["--emulate"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "python -m bench.sync: needs root\n"


@pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "available")
@pytest.mark.slow
def test_a_cell_is_measured_judged_and_written(tmp_path, capsys):
    file = tmp_path / "sync.json"
    sync.main(["--emulate", "--quick", "--tolerance", "9", "--json", str(file), "--only", "2 ranks, full, 0.8 F"])
    report = json.loads(file.read_text())
    (found,) = report["cases"].values()
    assert set(found["seconds"]) == set(BY_LABEL)
    assert found["seconds"]["native, per step"]["step"][0] > found["law_s"]["reweight, late"]["step"]
    assert "faster" in capsys.readouterr().out
    assert "2 ranks, full" in sync_page.page(file)


def test_the_page_is_what_the_results_say():
    assert sync_page.PAGE.read_text() == sync_page.page()
