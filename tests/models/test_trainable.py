"""Full tuning: every weight in float32, saved in diffusers' layout, held against a frozen copy."""

import pytest
import torch

from stretto.models.trainable import frozen_copy, make_full, reference, save_full, trainable_parameters
from stretto.models.whole_folder import whole_folder

both = pytest.mark.parametrize("name", ["flux", "wan"])


@both
def test_every_weight_of_a_bfloat16_model_becomes_trainable_in_float32(load, inputs, name):
    adapter = load(name, dtype="bfloat16")
    assert trainable_parameters(adapter.transformer) == {}
    make_full(adapter.transformer)
    parameters = trainable_parameters(adapter.transformer)
    assert parameters.keys() == dict(adapter.transformer.named_parameters()).keys()
    assert {parameter.dtype for parameter in parameters.values()} == {torch.float32}
    adapter.velocity(*inputs(adapter)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in parameters.values())
    assert not any(p.requires_grad for p in adapter.pipeline.vae.parameters())


@both
def test_a_saved_transformer_loads_back_equal(load, tmp_path, name):
    adapter = load(name)
    make_full(adapter.transformer)
    with torch.no_grad():
        for parameter in adapter.transformer.parameters():
            parameter.add_(torch.randn_like(parameter))
    save_full(adapter, tmp_path)
    loaded = type(adapter.transformer).from_pretrained(tmp_path).state_dict()
    saved = adapter.transformer.state_dict()
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(saved[key], loaded[key]) for key in saved)


@both
def test_the_reference_stays_where_it_was_while_the_policy_moves(load, inputs, name):
    adapter = load(name, guidance=3.0)
    make_full(adapter.transformer)
    expected = adapter.velocity(*inputs(adapter)).detach()
    held = reference(adapter, frozen_copy(adapter))
    with torch.no_grad():
        for parameter in adapter.transformer.parameters():
            parameter.mul_(1.1)
    latents, sigma, condition = inputs(adapter)
    velocity = held(latents.requires_grad_(), sigma, condition)
    assert torch.equal(velocity, expected)
    assert not velocity.requires_grad
    assert not torch.equal(adapter.velocity(*inputs(adapter)), expected)


def test_weights_appear_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "weights" / "ema"
    with pytest.raises(FileNotFoundError), whole_folder(folder) as partial:
        (partial / "half").write_text("half") and (partial / "none").unlink()
    assert list(folder.parent.iterdir()) == []
    for text in ("old", "new"):
        with whole_folder(folder) as partial:
            (partial / "a").write_text(text)
            assert not folder.exists() or (folder / "a").read_text() == "old"
        (folder / "theirs").touch()
    assert (folder / "a").read_text() == "new"
    assert sorted(path.name for path in folder.iterdir()) == ["a", "theirs"]
    assert [path.name for path in folder.parent.iterdir()] == ["ema"]
