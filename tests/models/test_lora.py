"""LoRA: drawn from its seed alone, saved at full strength, gone on with exactly."""

import json
import re
import shutil

import pytest
import torch
from diffusers import FluxPipeline, WanPipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from stretto.models.flux import LORA_TARGETS
from stretto.models.lora import attach_lora, lora_off, save_lora
from stretto.models.trainable import reference, trainable_parameters
from tests import tiny

both = pytest.mark.parametrize("name", ["flux", "wan"])
FILE = "pytorch_lora_weights.safetensors"
NOT_WHAT_IT_SEEMS = {"alpha": 6, "rank": 4}  # alpha / rank = 1.5: neither 1 nor a power of two


def attach(adapter, seed=0, **settings):
    settings = {"targets": adapter.lora_targets, **NOT_WHAT_IT_SEEMS, **settings}
    attach_lora(adapter.transformer, seed=seed, **settings)
    return trainable_parameters(adapter.transformer)


def attach_trained(adapter, **settings):
    """A LoRA whose B is not zero, as after training."""
    parameters = attach(adapter, **settings)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return parameters


def edit(source, target, change_tensors=None, change_config=None):
    """Copy a saved LoRA with its tensors or its config changed."""
    tensors = load_file(source / FILE)
    with safe_open(source / FILE, "pt") as file:
        config = json.loads(file.metadata()["lora_adapter_metadata"])
    if change_tensors:
        tensors = change_tensors(tensors)
    if change_config:
        config.update({f"transformer.{key}": value for key, value in change_config.items()})
    target.mkdir()
    save_file(tensors, target / FILE, metadata={"format": "pt", "lora_adapter_metadata": json.dumps(config)})
    return str(target)


@both
def test_a_fresh_lora_changes_nothing_and_is_all_that_trains(load, inputs, name):
    adapter = load(name, dtype="bfloat16")
    arguments = inputs(adapter)
    before = adapter.velocity(*arguments)
    parameters = attach(adapter)
    assert torch.equal(adapter.velocity(*arguments), before)
    assert all("lora_" in key for key in parameters)
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    assert len(parameters) == 2 * len(adapter.lora_targets)  # one block of each kind
    adapter.velocity(*arguments).square().mean().backward()
    assert all(p.grad is not None for p in parameters.values())
    assert not any(isinstance(m, torch.nn.Dropout) and "lora" in n for n, m in adapter.transformer.named_modules())


def test_the_draw_depends_on_the_seed_alone_and_leaves_the_global_state(load):
    drawn = []
    for global_seed, seed in [(0, 7), (1, 7), (0, 8)]:
        torch.manual_seed(global_seed)
        state = torch.get_rng_state()
        drawn.append(attach(load("flux"), seed=seed))
        assert torch.equal(torch.get_rng_state(), state)
    first, second, other = drawn
    assert all(torch.equal(first[key], second[key]) for key in first)
    drawn_a = [key for key in first if "lora_A" in key]
    assert not any(torch.equal(first[key], other[key]) for key in drawn_a)
    values = torch.cat([first[key].flatten() * first[key].shape[1] ** 0.5 for key in drawn_a])
    assert values.abs().max() <= 1
    assert abs(values.std().item() - 3**-0.5) < 0.02


@both
def test_the_stock_pipeline_loads_a_saved_lora_at_full_strength(load, inputs, folders, tmp_path, name):
    adapter = load(name)
    base = adapter.velocity(*inputs(adapter))
    attach_trained(adapter)
    expected = adapter.velocity(*inputs(adapter))
    save_lora(adapter, tmp_path)
    pipeline = (FluxPipeline if name == "flux" else WanPipeline).from_pretrained(folders[name])
    pipeline.load_lora_weights(tmp_path)
    stock = load(name)
    stock.transformer = pipeline.transformer
    assert torch.equal(stock.velocity(*inputs(adapter)), expected)
    assert (expected - base).abs().max() > 0.1


def test_without_its_metadata_a_lora_loses_its_alpha(load, inputs, folders, tmp_path):
    adapter = load("flux")
    attach_trained(adapter)
    save_lora(adapter, tmp_path)
    save_file(load_file(tmp_path / FILE), tmp_path / FILE)
    pipeline = FluxPipeline.from_pretrained(folders["flux"])
    pipeline.load_lora_weights(tmp_path)
    stock = load("flux")
    stock.transformer = pipeline.transformer
    assert not torch.allclose(stock.velocity(*inputs(adapter)), adapter.velocity(*inputs(adapter)), atol=1e-2)


@both
def test_a_saved_lora_loads_back_with_equal_weights(load, inputs, tmp_path, name):
    adapter, other = load(name), load(name)
    saved = attach_trained(adapter)
    save_lora(adapter, tmp_path)
    loaded = attach(other, seed=1, start_from=str(tmp_path))
    assert all(torch.equal(saved[key], loaded[key]) for key in saved)
    assert torch.equal(other.velocity(*inputs(other)), adapter.velocity(*inputs(adapter)))


def test_a_lora_of_another_alpha_starts_at_the_strength_it_was_saved_at(load, inputs, tmp_path):
    adapter, other = load("flux"), load("flux")
    attach_trained(adapter)
    save_lora(adapter, tmp_path)
    attach(other, alpha=16, start_from=str(tmp_path))
    expected = adapter.velocity(*inputs(adapter))
    torch.testing.assert_close(other.velocity(*inputs(other)), expected, atol=1e-5, rtol=1e-5)


def test_a_lora_without_metadata_starts_with_alpha_equal_to_its_rank(load, inputs, tmp_path):
    adapter, other = load("flux"), load("flux")
    attach_trained(adapter, alpha=4)
    save_lora(adapter, tmp_path)
    save_file(load_file(tmp_path / FILE), tmp_path / FILE)
    attach(other, alpha=8, start_from=str(tmp_path / FILE))
    assert torch.equal(other.velocity(*inputs(other)), adapter.velocity(*inputs(adapter)))


def test_a_saved_lora_that_does_not_fit_is_one_clear_line(load, tmp_path):
    adapter = load("flux")
    attach_trained(adapter)
    save_lora(adapter, tmp_path / "good")
    good = tmp_path / "good"
    key = next(iter(load_file(good / FILE)))
    cases = [
        (str(good), {"rank": 8}, r"\(rank 4\), here it is .*\(rank 8\); set tuning.rank to 4"),
        (str(good), {"targets": ["to_q"]}, r"other layers than tuning.targets: 0 missing, \d+ unknown"),
        (
            edit(good, tmp_path / "short", lambda tensors: {k: v for k, v in tensors.items() if k != key}),
            {},
            "1 missing, 0 unknown .*set tuning.targets",
        ),
        (edit(good, tmp_path / "rslora", None, {"use_rslora": True}), {}, "was made with use_rslora"),
        (edit(good, tmp_path / "pattern", None, {"alpha_pattern": {"x": 2}}), {}, "was made with alpha_pattern"),
        (str(tmp_path), {}, "no LoRA at .*set tuning.start_from"),
        (str(tmp_path / "none"), {}, "no LoRA at .*set tuning.start_from"),
    ]
    for path, settings, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            attach(load("flux"), start_from=path, **settings)
        assert "\n" not in str(caught.value)


def test_a_truncated_lora_is_one_clear_line(load, tmp_path):
    adapter = load("flux")
    attach_trained(adapter)
    save_lora(adapter, tmp_path)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:500])
    with pytest.raises(ValueError, match="cannot be read as a LoRA"):
        attach(load("flux"), start_from=str(tmp_path))


@pytest.mark.parametrize(
    ("target", "near"),
    [("attn.to_qq", "attn.to_q"), ("proj_mpl", "proj_mlp"), ("blocks.*.to_z", "to_q"), ("q_proj", "add_q_proj")],
)
def test_a_wrong_target_is_answered_with_near_ones(target, near):
    with pytest.raises(ValueError, match=rf"names {re.escape(repr(target))}.*{re.escape(near)}"):
        attach_lora(tiny.flux_transformer(), rank=2, alpha=2, targets=["to_q", target], seed=0)


def test_no_targets_is_an_error():
    with pytest.raises(ValueError, match="is empty"):
        attach_lora(tiny.flux_transformer(), rank=2, alpha=2, targets=[], seed=0)


def test_targets_are_suffixes_or_patterns_of_whole_names():
    transformer = tiny.flux_transformer(layers=2, single_layers=2)
    attach_lora(transformer, rank=2, alpha=2, seed=0, targets=["attn.to_q", "transformer_blocks.1.ff.net.*"])
    layers = {key.split(".lora_")[0] for key in trainable_parameters(transformer)}
    assert layers == {
        *(f"transformer_blocks.{i}.attn.to_q" for i in (0, 1)),
        *(f"single_transformer_blocks.{i}.attn.to_q" for i in (0, 1)),
        "transformer_blocks.1.ff.net.0.proj",
        "transformer_blocks.1.ff.net.2",
    }


def test_the_default_targets_are_attention_and_mlp_however_many_blocks_there_are():
    transformer = tiny.flux_transformer(layers=3, single_layers=4)
    attach_lora(transformer, rank=2, alpha=2, seed=0, targets=LORA_TARGETS)
    layers = {key.split(".lora_")[0] for key in trainable_parameters(transformer)}
    assert len(layers) == 3 * 12 + 4 * 5
    assert not [name for name in layers if "norm" in name or not re.match(r"(single_)?transformer_blocks\.", name)]


@both
def test_the_reference_is_the_base_model_without_gradient(load, inputs, name):
    adapter = load(name)
    base = adapter.velocity(*inputs(adapter))
    attach_trained(adapter)
    trained = adapter.velocity(*inputs(adapter))
    latents, sigma, condition = inputs(adapter)
    velocity = reference(adapter)(latents.requires_grad_(), sigma, condition)
    assert torch.equal(velocity, base)
    assert not velocity.requires_grad
    assert torch.equal(adapter.velocity(*inputs(adapter)), trained)
    assert not torch.equal(trained, base)


def test_a_graph_made_before_the_reference_still_gives_its_gradient(load, inputs):
    adapter = load("flux")
    parameters = attach_trained(adapter)
    gradients = []
    for between in (lambda: None, lambda: reference(adapter)(*inputs(adapter))):
        velocity = adapter.velocity(*inputs(adapter))
        between()
        velocity.square().mean().backward()
        gradients.append({key: p.grad.clone() for key, p in parameters.items()})
        adapter.transformer.zero_grad()
    assert all(torch.equal(gradients[0][key], gradients[1][key]) for key in parameters)


def test_the_lora_is_back_and_trainable_after_an_exception(load, inputs):
    adapter = load("flux")
    parameters = attach_trained(adapter)
    expected = adapter.velocity(*inputs(adapter))
    with pytest.raises(RuntimeError, match="inside"), lora_off(adapter.transformer):
        raise RuntimeError("inside")
    assert torch.equal(adapter.velocity(*inputs(adapter)), expected)
    assert trainable_parameters(adapter.transformer).keys() == parameters.keys()


def test_saving_again_replaces_the_file(load, tmp_path):
    adapter = load("flux")
    parameters = attach_trained(adapter)
    save_lora(adapter, tmp_path)
    before = shutil.copy(tmp_path / FILE, tmp_path / "before")
    with torch.no_grad():
        next(iter(parameters.values())).add_(1)
    save_lora(adapter, tmp_path)
    changed = [k for k, v in load_file(tmp_path / FILE).items() if not torch.equal(v, load_file(before)[k])]
    assert len(changed) == 1
