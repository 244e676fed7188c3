"""The same proofs on a CUDA device; they skip where there is none."""

import pytest
import torch

from stretto.recipe import load_recipe
from stretto.train import train
from tests.policy.toy import distance, make_batches, make_policy, make_rewards, make_toy, run
from tests.test_train import lines_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["float32", "autocast"])
@pytest.mark.parametrize("tuning", ["lora", "full"])
@pytest.mark.parametrize("rows", [1, 4])
def test_every_schedule_gives_the_native_gradient_on_cuda(rows, tuning, autocast):
    rewards, batches = make_rewards(2, 4), make_batches(2, 4, rows, (0, 1, 2))
    for batch in batches:
        batch.condition.update({name: value.cuda() for name, value in batch.condition.items()})

    def gradient(name):
        return run(name, make_policy(autocast=autocast, toy=make_toy(tuning).cuda()), batches, rewards)[0]

    native = gradient("native")
    assert distance(gradient("retain"), native) < 1e-6
    for name in ("reweight", "two_sum", "hybrid"):
        assert distance(gradient(name), native) < (1e-5 if autocast is None else 5e-2)


def test_the_demo_trains_and_goes_on_on_cuda(tmp_path):
    extra = ["--run.device", "cuda", "--run.folder", str(tmp_path / "run"), "--run.resume", "auto"]
    extra += ["--evaluation.samples", "3", "--model.autocast", "bfloat16", "--evaluation.every", "2"]
    for iterations in ("2", "3"):
        train(load_recipe("recipes/digits.toml", [*extra, "--run.iterations", iterations]))
    assert [line["iteration"] for line in lines_of(tmp_path / "run")] == [0, 1, 2]
