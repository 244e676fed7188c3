"""What `bench.llm` makes of its times."""

import json

import pytest

from bench.llm import SHAPES, claims, removed, summary, write
from bench.llm_models import Shape, Way

TIMES = {
    "compute": [1.0, 1.1, 0.9],
    "ideal": [1.1, 1.2, 1.0],
    "plain": [1.6, 1.7, 1.5],
    "slicing 4": [1.3, 1.4, 1.2],
    "ours": [1.125, 1.225, 1.025],
}


def test_what_is_removed_is_a_share_of_plain_minus_ideal():
    found = removed(TIMES)
    assert found["removed_of_plain_minus_ideal"]["value"] == pytest.approx(0.95)
    assert found["removed_of_plain_minus_ideal, slicing 4"]["value"] == pytest.approx(0.6)
    assert found["rho"]["value"] == pytest.approx(0.6)
    assert found["of_best_slicing"]["value"] == pytest.approx(1.125 / 1.3)


def test_claims_hold_or_do_not():
    held = claims({"tp/training": removed(TIMES)})
    assert [claim["holds"] for claim in held.values()] == [True, True]
    held = claims({"tp/training": removed(TIMES | {"ours": TIMES["slicing 4"]})})
    assert [claim["holds"] for claim in held.values()] == [False, False]
    assert claims({}, {"auto": {"calls": {"plain": 95, "direct": 5}}}).popitem()[1]["holds"]
    assert not claims({}, {"auto": {"calls": {"direct": 5}}}).popitem()[1]["holds"]


def test_a_part_joins_the_cases_of_the_file_and_their_claims(tmp_path):
    file, case = tmp_path / "llm.json", removed(TIMES)
    write(file, {"cases": {"tp/training": case}, "decode": {"auto": {"calls": {"plain": 1}}}}, is_part=False)
    for _ in range(2):
        write(file, {"cases": {"up/training": case}}, is_part=True)
    found = json.loads(file.read_text())
    assert list(found["cases"]) == ["tp/training", "up/training"]
    assert len(found["claims"]) == 5
    assert found["decode"] == {"auto": {"calls": {"plain": 1}}}
    assert found["command"].count("bench.llm") == 1


def test_flops_are_those_of_products_and_causal_attention():
    shape = Shape(batch=2, length=4, hidden=8, intermediate=16, layers=3, heads=2, kv_heads=1, vocabulary=32)
    weights = 3 * (8 * 8 * 2 + 2 * 8 * 4 + 3 * 8 * 16) + 8 * 32
    visible = 1 + 2 + 3 + 4
    assert shape.flops(False) == 2 * 8 * weights + 2 * 3 * 2 * 2 * 8 * visible
    assert shape.flops(True) == 3 * shape.flops(False)
    mfu = summary(shape, True, {"ours": [2.0]}, rate=1e6)["ours"]["mfu"]
    assert mfu == shape.flops(True) / (2.0 * 2 * 1e6)


def test_ways_name_their_schedule():
    ways = {name: (Way(name).schedule, Way(name).pieces) for name in ("plain", "ideal", "slicing 8", "ours")}
    assert ways == {"plain": ("plain", 1), "ideal": ("plain", 1), "slicing 8": ("direct", 8), "ours": ("auto", 1)}
    assert all(shape.length % 16 == 0 for shape in SHAPES.values())
    assert all(SHAPES[halved].batch % 2 == 0 for halved in ("tp", "up"))
