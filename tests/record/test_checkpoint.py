"""Checkpoints: equal to what was saved, whole or not there, and of the right model."""

import errno
import json
import os
import resource
import subprocess

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.record import checkpoint
from tests.record.processes import child, contents, end_of, kill_at_every_step, left_as_it_was

IDENTITY = {"adapter": "digits", "rank": 16, "latent_shape": (16, 4)}


def state_of(iteration):
    """A state like a run's, that tells which iteration it is of."""
    weight = torch.full((64, 64), float(iteration))
    return {
        "weights": {"a.lora_A.weight": weight, "a.lora_B.weight": weight.bfloat16()},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": weight}}, "param_groups": [{"lr": 1e-3}]},
        "rng": torch.get_rng_state(),
        "window": (iteration, None, True),
    }


def save(folder, iteration, **options):
    options = {"identity": IDENTITY, "keep": 3, **options}
    return checkpoint.save(folder, iteration, state_of(iteration), **options)


def assert_same(here, there):
    assert type(here) is type(there)
    if isinstance(here, dict):
        assert list(here) == list(there)
        for key in here:
            assert_same(here[key], there[key])
    elif isinstance(here, list | tuple):
        assert len(here) == len(there)
        for one, other in zip(here, there):
            assert_same(one, other)
    elif isinstance(here, torch.Tensor):
        assert (here.dtype, here.shape) == (there.dtype, there.shape)
        assert torch.equal(bits(here), bits(there))
    else:
        assert here == there or (here != here and there != there)


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
TENSORS = st.builds(
    lambda dtype, shape, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 99),
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
KEYS = st.integers(-3, 3) | st.text("a/1'", max_size=3) | st.just("__metadata__")
NESTS = st.recursive(
    PLAIN | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(KEYS, NESTS, max_size=4))
def test_any_state_comes_back_bit_for_bit_and_type_for_type(tmp_path, state):
    checkpoint.save(tmp_path, 1, state, identity=IDENTITY)
    assert_same(checkpoint.load_newest(tmp_path, IDENTITY).state, state)


def test_special_values_come_back_bit_for_bit(tmp_path):
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-42])
    state = {"f": special, "view": torch.arange(12.0).reshape(3, 4).t(), "p": torch.nn.Parameter(torch.ones(2))}
    state["bf16"] = special.bfloat16()
    checkpoint.save(tmp_path, 1, state, identity={})
    loaded = checkpoint.load_newest(tmp_path).state
    assert_same(loaded, {**state, "p": torch.ones(2)})


def test_an_optimizer_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(tmp_path):
    def step(weight, optimizer):
        weight.grad = weight.detach() * 2
        optimizer.step()

    weight = torch.nn.Parameter(torch.arange(3.0))
    optimizer = torch.optim.AdamW([weight])
    step(weight, optimizer)
    checkpoint.save(tmp_path, 1, {"weight": weight, "optimizer": optimizer.state_dict()}, identity={})
    state = checkpoint.load_newest(tmp_path).state
    again = torch.nn.Parameter(state["weight"])
    resumed = torch.optim.AdamW([again])
    resumed.load_state_dict(state["optimizer"])
    step(weight, optimizer)
    step(again, resumed)
    assert torch.equal(weight, again)


def test_any_safetensors_reader_opens_the_tensors(tmp_path):
    from safetensors.torch import load_file

    path = save(tmp_path, 7)
    tensors = load_file(path / "state.safetensors")
    assert torch.equal(tensors["weights/a.lora_A.weight"], torch.full((64, 64), 7.0))


def test_what_has_no_place_in_a_checkpoint_is_named_and_nothing_is_left(tmp_path):
    save(tmp_path, 1)
    with left_as_it_was(tmp_path), pytest.raises(TypeError, match="weights/odd: a object has no place"):
        checkpoint.save(tmp_path, 2, {"weights": {"odd": object()}}, identity={})
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-00000001"]


def test_the_newest_are_kept_and_the_best_beside_them(tmp_path):
    for iteration in range(1, 7):
        save(tmp_path, iteration, keep=2, is_best=iteration in (1, 3))
    assert [path.name[-1] for path in checkpoint.newest(tmp_path)] == ["6", "5", "3"]
    assert checkpoint.best(tmp_path).name == "iteration-00000003"
    assert checkpoint.load(checkpoint.best(tmp_path)).iteration == 3


def test_there_is_nothing_to_load_before_the_first(tmp_path):
    assert checkpoint.load_newest(tmp_path / "none") is None
    assert checkpoint.best(tmp_path / "none") is None


def truncate(path):
    os.truncate(path, path.stat().st_size - 100)


def flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "harm", "told"),
    [
        ("state.safetensors", truncate, "were written"),
        ("state.safetensors", flip, "its SHA-256 differs"),
        ("state.safetensors", os.unlink, "state.safetensors is missing"),
        ("manifest.json", truncate, "manifest.json is missing or cut short"),
        ("manifest.json", os.unlink, "manifest.json is missing or cut short"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(tmp_path, file, harm, told):
    save(tmp_path, 1)
    harm(save(tmp_path, 2) / file)
    loaded = checkpoint.load_newest(tmp_path, IDENTITY)
    assert loaded.iteration == 1
    assert_same(loaded.state, {**state_of(1), "rng": loaded.state["rng"]})
    (note,) = loaded.notes
    assert "iteration-00000002 is damaged" in note
    assert told in note
    assert note.endswith("took iteration-00000001")


def test_damaged_checkpoints_alone_are_not_a_fresh_start(tmp_path):
    truncate(save(tmp_path, 1) / "state.safetensors")
    with pytest.raises(ValueError, match=r"no checkpoint is whole: .*iteration-00000001 is damaged"):
        checkpoint.load_newest(tmp_path)


def test_a_run_that_went_back_leaves_no_later_checkpoint(tmp_path):
    save(tmp_path, 10)
    truncate(save(tmp_path, 20, is_best=True) / "state.safetensors")
    save(tmp_path, 15)
    assert [path.name for path in checkpoint.newest(tmp_path)] == ["iteration-00000015", "iteration-00000010"]


def test_a_checkpoint_of_another_model_is_refused_and_the_difference_told(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(ValueError, match="another model: rank is 16 there and 32 here"):
        checkpoint.load_newest(tmp_path, {**IDENTITY, "rank": 32})


def test_a_difference_of_many_parameters_is_told_by_the_first_and_their_number(tmp_path):
    names = [f"transformer_blocks.{i}.attn.to_q.lora_A.weight" for i in range(500)]
    there = {**IDENTITY, "parameters": {name: [16, 3072] for name in names}}
    checkpoint.save(tmp_path, 1, state_of(1), identity=there)
    here = {"parameters": {name: [32, 3072] for name in names[1:]}, "rank": 32, "adapter": "flux", "more": 1}
    with pytest.raises(ValueError, match="another model") as caught:
        checkpoint.load_newest(tmp_path, here)
    told = str(caught.value).removeprefix(str(tmp_path))
    assert "500 of the parameters differ, first transformer_blocks.1.attn.to_q.lora_A.weight" in told
    assert "[16, 3072] there and [32, 3072] here; rank is 16 there and 32 here; adapter is 'digits'" in told
    assert "(and 2 more)" in told
    assert len(told) < 400


@pytest.mark.parametrize(
    "change",
    [
        {"identity": None},
        {"identity": "digits"},
        {"iteration": "2"},
        {"files": []},
        {"files": {}},
        {"files": {"state.safetensors": 7}},
        {"files": {"state.safetensors": {"bytes": 3}}},
    ],
    ids=str,
)
def test_a_manifest_without_its_keys_counts_as_damaged(tmp_path, change):
    save(tmp_path, 1)
    manifest = save(tmp_path, 2) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    loaded = checkpoint.load_newest(tmp_path, IDENTITY)
    assert loaded.iteration == 1
    assert "iteration-00000002 is damaged (manifest.json is not whole" in loaded.notes[0]


@pytest.mark.parametrize("text", ["[]", "{}", "7", "null"])
def test_a_manifest_that_is_none_counts_as_damaged(tmp_path, text):
    save(tmp_path, 1)
    (save(tmp_path, 2, is_best=True) / "manifest.json").write_text(text)
    assert checkpoint.load_newest(tmp_path, IDENTITY).iteration == 1
    assert checkpoint.best(tmp_path) is None


def test_a_checkpoint_of_a_format_to_come_is_refused_with_the_ways_out_and_saving_goes_on(tmp_path):
    save(tmp_path, 1)
    manifest = save(tmp_path, 2) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 2}))
    with pytest.raises(ValueError, match=r"has format 2, this version reads 1; go on with the version .* or move it"):
        checkpoint.load_newest(tmp_path, IDENTITY)
    save(tmp_path, 3)
    assert checkpoint.load_newest(tmp_path, IDENTITY).iteration == 3


def test_a_plain_file_under_a_checkpoints_name_is_damage_and_does_not_stop_saving(tmp_path):
    save(tmp_path, 1, keep=1)
    for number in (2, 9):
        (tmp_path / f"iteration-{number:08d}").write_text("no folder")
    (tmp_path / ".partial-iteration-00000005").write_text("no folder")
    assert checkpoint.load_newest(tmp_path, IDENTITY).iteration == 1
    save(tmp_path, 2, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-00000002"]


def test_a_kill_before_any_step_of_a_save_leaves_the_old_or_the_new_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"
    seen = set()

    def prepare():
        save(folder, 1, keep=1)

    def look():
        loaded = checkpoint.load_newest(folder, IDENTITY)
        assert loaded.notes == []
        assert loaded.state["weights"]["a.lora_A.weight"][0, 0] == loaded.iteration
        seen.add(loaded.iteration)

    kills = kill_at_every_step(prepare, lambda: save(folder, 2, keep=1), look)
    assert kills > 10
    assert seen == {1, 2}
    save(folder, 3, keep=1)
    assert [path.name for path in folder.iterdir()] == ["iteration-00000003"]


def test_a_kill_while_a_checkpoint_replaces_one_of_its_name_leaves_one_of_them(tmp_path):
    def look():
        loaded = checkpoint.load_newest(tmp_path, IDENTITY)
        assert loaded.iteration == 1
        assert loaded.notes == []

    kills = kill_at_every_step(lambda: save(tmp_path, 1), lambda: save(tmp_path, 1), look)
    assert kills > 10
    save(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-00000001"]


def test_a_file_that_may_not_grow_leaves_the_older_checkpoint_and_an_error_with_the_path(tmp_path):
    save(tmp_path, 1)

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match="iteration-00000002") as caught:
            save(tmp_path, 2)
        assert caught.value.errno == errno.EFBIG

    with left_as_it_was(tmp_path):
        assert end_of(child(work)) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-00000001"]


@pytest.fixture
def full_disk(tmp_path):
    """A disk of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder):
    for iteration in range(1, 20):
        save(folder, iteration, keep=20)


def test_a_full_disk_leaves_the_older_checkpoints_and_an_error_with_the_path(full_disk):
    with pytest.raises(OSError, match=r"No space left on device: .*iteration-0000000") as caught:
        fill(full_disk)
    assert caught.value.errno == errno.ENOSPC
    names = {path.name for path in full_disk.iterdir()}
    assert not any(name.startswith(".") for name in names)
    newest = checkpoint.load_newest(full_disk, IDENTITY)
    assert newest.notes == []
    assert f"iteration-{newest.iteration + 1:08d}" in str(caught.value)
    assert len(contents(full_disk)) == 2 * newest.iteration
