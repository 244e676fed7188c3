"""Loading rewards and judges by name, and what a wrong name is told."""

import subprocess
import sys

import pytest
import torch

from stretto.rewards import load_judge, load_reward


def test_a_shipped_reward_is_loaded_by_its_name():
    brightness = load_reward("brightness")
    assert brightness(torch.ones(2, 3, 4, 4), ["a", "b"]).tolist() == [1.0, 1.0]


def test_a_function_of_an_installed_module_is_a_reward():
    import math

    assert load_reward("math:fsum") is math.fsum


def test_a_function_of_a_file_is_a_reward_and_the_file_runs_once(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "calls = []\ndef redness(media, prompts):\n    calls.append(1)\n    return [0.5]\ncalls.append(0)\n"
    )
    reward = load_reward(f"{file}:redness")
    assert reward(None, None) == [0.5]
    assert load_reward(f"{file}:redness") is reward


def test_a_class_with_a_call_method_bound_to_a_name_is_a_reward(tmp_path):
    file = tmp_path / "scorer.py"
    file.write_text(
        "class Scorer:\n    def __call__(self, media, prompts):\n        return [2.0]\nscorer = Scorer()\n"
    )
    assert load_reward(f"{file}:scorer")(None, None) == [2.0]


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("digit", "unknown reward 'digit'; did you mean digits"),
        ("", "unknown reward ''"),
        (":f", "unknown reward ':f'"),
        ("zzz", "did you mean brightness or digits"),
        (
            "no_such_package.rewards:f",
            "module 'no_such_package.rewards' cannot be imported: ModuleNotFoundError",
        ),
        ("math:fsumm", "math has no function 'fsumm'; did you mean fsum"),
        ("math:pi", "pi is float, not a function"),
        ("nowhere/mine.py:f", "file nowhere/mine.py does not exist"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_answered_in_one_line(spec, told):
    with pytest.raises(ValueError, match="reward") as raised:
        load_reward(spec)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_fails_while_it_runs_is_named_and_not_kept(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("def f(:\n")
    with pytest.raises(ValueError, match=r"broken\.py cannot be run: SyntaxError") as raised:
        load_reward(f"{file}:f")
    assert "\n" not in str(raised.value)
    file.write_text("def f(media, prompts):\n    return [1.0]\n")
    assert load_reward(f"{file}:f")(None, None) == [1.0]


def test_an_unknown_judge_names_the_shipped_one():
    with pytest.raises(ValueError, match="unknown judge 'digitz'; did you mean digits"):
        load_judge("digitz")


def test_a_judge_that_is_an_address_is_refused_in_one_line():
    with pytest.raises(ValueError, match="a judge is a function, only a reward may be a service"):
        load_judge("http://localhost:1/judge")


def test_a_missing_package_of_a_shipped_judge_answers_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.svm", None)
    monkeypatch.delitem(sys.modules, "stretto.rewards.digits_judge", raising=False)
    with pytest.raises(ValueError, match=r'pip install "stretto\[train\]"'):
        load_judge("digits")


def test_importing_the_room_loads_nothing_heavy():
    heavy = "{'torch', 'sklearn', 'diffusers', 'numpy'}"
    program = f"import sys, stretto.rewards; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_digits_reward_needs_no_diffusers():
    program = (
        "import sys, torch; from stretto.rewards import load_reward; "
        "load_reward('digits')(torch.zeros(1, 1, 8, 8), ['0']); print('diffusers' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
