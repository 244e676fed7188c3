"""The benches run on a tiny model, tell what they measured, and their page is what their results say."""

import json
import statistics

import pytest
import torch

from bench import field, memory, overlap_page, schedules
from bench.intervals import Interval, bootstrap, median_ratio
from bench.page import PAGE, RESULTS, page
from bench.setting import TINY, Contender, Turn, make_policy


@pytest.fixture(scope="module", autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_bootstrap_interval_holds_the_median_and_narrows_with_the_spread():
    over, under = [1.5, 1.6, 1.4, 1.5, 1.45, 1.55, 1.5, 1.62, 1.38], [1.0] * 9
    wide = bootstrap(median_ratio(over, under), 9)
    assert wide.value == statistics.median(over)
    assert min(over) <= wide.low < wide.value < wide.high <= max(over)
    same = bootstrap(median_ratio([3.0] * 9, [2.0] * 9), 9)
    assert (same.value, same.low, same.high) == (1.5, 1.5, 1.5)


def test_repeats_are_resampled_whole_so_that_a_slow_repeat_cancels():
    slow = [1.0, 1.0, 5.0, 1.0, 9.0, 1.0, 1.0, 2.0, 1.0]
    interval = bootstrap(median_ratio([1.4 * s for s in slow], slow), 9)
    assert interval.high - interval.low < 1e-12


def test_a_target_is_met_when_the_interval_reaches_it():
    assert Interval(1.30, 1.25, 1.36).reaches(1.35)
    assert not Interval(1.30, 1.25, 1.34).reaches(1.35)


def test_the_verdicts_of_a_case_follow_from_its_seconds():
    case = schedules.Case("made up", "lora", {"retain": 1.40, "reweight": 1.40})
    labels = ("native", schedules.REPLAY, "retain", "reweight")
    result = schedules.judge(
        case,
        {
            "seconds": dict(zip(labels, ([3.0] * 9, [2.5] * 9, [2.0] * 9, [2.4] * 9))),
            "probes_s": {"F0": [0.1] * 9, "F1": [0.1] * 9, "B": [0.1] * 9},
        },
    )
    assert result["ceiling"]["value"] == pytest.approx(1.5)
    assert result["ratios"]["retain"]["value"] == pytest.approx(1.5)
    assert result["shares"]["reweight"]["value"] == pytest.approx(1.25 / 1.5)
    assert [verdict["met"] for verdict in result["verdicts"]] == [True, True, False, False, True]
    assert result["fastest"] == "retain"


def test_the_speed_bench_writes_every_case_with_every_contender(tmp_path, capsys):
    file = tmp_path / "schedules.json"
    chosen = ["lora, 2 of 10", "lora, 10 of 10, 4 a forward"]
    schedules.main(["--quick", "--json", str(file), "--only", *chosen])
    report = json.loads(file.read_text())
    assert list(report["cases"]) == chosen
    assert report["quick"]
    assert report["machine"]["packages"]["torch"]
    for case in report["cases"].values():
        assert {"native", schedules.REPLAY, "retain", "reweight", "two_sum"} <= set(case["seconds"])
        assert all(len(values) == len(case["probes_s"]["F0"]) for values in case["seconds"].values())
        assert max(case["gradient_error"].values()) < 1e-5
    schedules.main(["--quick", "--json", str(file), "--only", "full, 10 of 10"])
    assert list(json.loads(file.read_text())["cases"]) == [*chosen, "full, 10 of 10"]
    assert "ceiling" in capsys.readouterr().out


def test_live_bytes_fall_when_a_graph_is_freed():
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)
    with memory.LiveBytes([weight]) as live:
        y = (x @ weight).sin()
        assert live.bytes == x.nbytes + y.nbytes  # matmul keeps x, sin its input; the weight does not count
        y.sum().backward()
        assert live.bytes == 0
        assert live.peak == x.nbytes + y.nbytes


@pytest.mark.parametrize("method", ["lora", "full"])
def test_reweight_holds_one_gradient_a_sample_and_retain_its_graphs(method):
    policy = make_policy(TINY, method, 4)
    gradient = sum(p.numel() * p.element_size() for p in policy.parameters.values())

    def held(name, trained, num_samples):
        return memory.measure(policy, TINY, Contender(name, name), trained, num_samples)

    records = 2_000  # latents of the trajectories
    for num_samples in (2, 4):
        row = held("reweight", 2, num_samples)
        assert row["held"] == pytest.approx(num_samples * gradient, abs=records * num_samples)
    assert held("two_sum", 2, 6)["held"] <= 4 * gradient + 6 * records
    row = held("retain", 3, 2)
    assert row["graphs"] == pytest.approx(6 * row["one_forward"], rel=0.1)


def test_the_memory_verdicts_allow_five_percent_or_20_mb():
    def shapes(base, steps, samples):
        rows = dict(zip(memory.SHAPES, (base, steps, samples)))
        return {
            shape: {"held": held, "graph_peak": 0, "graphs": held, "one_forward": 1} for shape, held in rows.items()
        }

    rows = {
        "reweight": shapes(10**9, 1.04 * 10**9, 2 * 10**9),
        "two_sum": shapes(10**6, 10 * 10**6, 30 * 10**6),
        "retain": shapes(4, 17, 24),
    }
    met = [verdict["met"] for verdict in memory.verdicts("full", rows, 1)]
    assert met == [True, False, True, False, True, True, False]


def test_a_point_of_the_field_names_its_winner_and_counts_bytes():
    point = field.Point("lora", TINY, 2, 2)
    result = field.measure(point, 1)
    fastest = min(result["seconds"], key=lambda label: result["seconds"][label][0])
    assert result["winners"][0] == fastest
    assert result["bytes"]["native"] < result["bytes"]["native, replay all"]
    assert result["bytes"]["native, replay all"] == pytest.approx(result["bytes"]["retain"], rel=0.1)


def test_the_default_transformer_has_nine_million_parameters():
    policy = make_policy(schedules.Size(), "full")
    assert sum(p.numel() for p in policy.module.parameters()) == pytest.approx(9e6, rel=0.05)


def test_a_turn_leaves_the_same_gradient_each_time():
    turn = Turn(make_policy(TINY, "lora", 3), TINY, Contender("reweight", "reweight"), 2, 2, (0, 1))
    turn.run()
    first = turn.gradient()
    turn.run()
    assert torch.equal(first, turn.gradient())


def test_the_page_of_overlap_is_what_the_results_say():
    assert overlap_page.PAGE.read_text() == overlap_page.page()


def test_the_page_is_what_the_results_say():
    assert PAGE.read_text() == page(RESULTS)


def test_the_readme_says_what_the_results_say():
    from bench.readme import README, written

    text = README.read_text()
    assert written(text) == text
