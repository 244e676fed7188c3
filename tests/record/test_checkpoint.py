"""Checkpoints of one process: equal to what was saved, whole or not there, and of the right model."""

import errno
import json
import os
import resource
import subprocess
import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.record import checkpoint
from stretto.record.checkpoint import Checkpoints
from stretto.record.sharded_files import ShardedWriter
from tests.record.processes import child, contents, end_of, kill_at_every_step, left_as_it_was

IDENTITY = {"adapter": "digits", "rank": 16, "latent_shape": (16, 4)}
SHARDS = "__0_0.distcp"


def tensors_of(iteration):
    """Tensors like a run's, that tell which iteration they are of."""
    weight = torch.full((64, 64), float(iteration))
    return {
        "weights/a.lora_A.weight": weight,
        "weights/a.lora_B.weight": weight.bfloat16(),
        "optimizer/a.lora_A.weight/step": torch.tensor(3.0),
        "optimizer/a.lora_A.weight/exp_avg": weight,
    }


def save(folder, iteration, identity=IDENTITY, is_best=False, asynchronous=False, **options):
    with Checkpoints(folder, identity, asynchronous=asynchronous, **{"keep": 3, **options}) as checkpoints:
        checkpoints.save(iteration, tensors_of(iteration), {"window": [iteration, None, True]}, is_best=is_best)
    return folder / f"iteration-{iteration:08d}"


def newest(folder, identity=IDENTITY):
    return checkpoint.newest_whole(folder, identity)


def assert_same(here, there):
    assert list(here) == list(there)
    for name in here:
        assert (here[name].dtype, here[name].shape) == (there[name].dtype, there[name].shape)
        assert torch.equal(bits(here[name]), bits(there[name]))


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
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
NAMES = st.text("a/1'.é ", min_size=1, max_size=4)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(NAMES, TENSORS, max_size=4), st.dictionaries(st.text(max_size=3), PLAIN, max_size=4))
def test_any_state_comes_back_bit_for_bit(tmp_path, tensors, plain):
    with Checkpoints(tmp_path, IDENTITY) as checkpoints:
        checkpoints.save(1, tensors, plain)
        filled = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
        found = checkpoints.load_newest(filled)
    assert found.plain == plain
    assert_same(filled, tensors)
    assert_same(checkpoint.read_tensors(found), tensors)


def test_special_values_come_back_bit_for_bit(tmp_path):
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-42])
    tensors = {"f": special, "view": torch.arange(12.0).reshape(3, 4).t(), "p": torch.nn.Parameter(torch.ones(2))}
    tensors["bf16"] = special.bfloat16()
    with Checkpoints(tmp_path, {}) as checkpoints:
        checkpoints.save(1, tensors, {"x": float("nan"), "y": float("-inf"), "z": 0.1, "tuple": (1, (2,))})
    found = checkpoint.newest_whole(tmp_path)
    assert_same(checkpoint.read_tensors(found), tensors)
    assert found.plain["x"] != found.plain["x"]
    assert {**found.plain, "x": 0} == {"x": 0, "y": float("-inf"), "z": 0.1, "tuple": [1, [2]]}


def test_an_optimizer_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(tmp_path):
    def step(weight, optimizer):
        weight.grad = weight.detach() * 2
        optimizer.step()

    weight = torch.nn.Parameter(torch.arange(3.0))
    optimizer = torch.optim.AdamW([weight])
    step(weight, optimizer)
    checkpoints = Checkpoints(tmp_path, {})
    checkpoints.save(1, {"weight": weight, **optimizer.state[weight]}, {})
    again = torch.nn.Parameter(torch.zeros(3))
    resumed = torch.optim.AdamW([again])
    step(again, resumed)
    checkpoints.load_newest({"weight": again, **resumed.state[again]})
    step(weight, optimizer)
    step(again, resumed)
    assert torch.equal(weight, again)


def test_a_part_of_a_checkpoint_is_read_by_its_prefix(tmp_path):
    save(tmp_path, 7)
    read = checkpoint.read_tensors(newest(tmp_path), "weights/")
    assert list(read) == ["a.lora_A.weight", "a.lora_B.weight"]
    assert torch.equal(read["a.lora_A.weight"], torch.full((64, 64), 7.0))


def test_any_reader_of_distributed_checkpoints_opens_it(tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(save(tmp_path, 7), tmp_path / "one.pt")
    assert_same(torch.load(tmp_path / "one.pt"), tensors_of(7))


@pytest.mark.parametrize(
    ("plain", "told"),
    [
        ({"history": {"odd": object()}}, "history/odd: a object has no place"),
        ({"a": {1: 2}}, "a: the key 1 of plain"),
    ],
)
def test_what_has_no_place_in_plain_state_is_named_and_nothing_is_left(tmp_path, plain, told):
    save(tmp_path, 1)
    with left_as_it_was(tmp_path), pytest.raises(TypeError, match=told):
        Checkpoints(tmp_path, {}).save(2, {}, plain)
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-00000001"]


def test_names_that_a_checkpoint_lacks_are_told_and_their_tensors_stay(tmp_path):
    save(tmp_path, 1)
    checkpoints = Checkpoints(tmp_path, IDENTITY)
    wanted = {"weights/a.lora_A.weight": torch.zeros(64, 64), "ema/a": torch.ones(2)}
    assert checkpoints.load(checkpoints.newest_whole(), wanted) == ["ema/a"]
    assert torch.equal(wanted["ema/a"], torch.ones(2))
    assert torch.equal(wanted["weights/a.lora_A.weight"], torch.ones(64, 64))


@pytest.mark.parametrize(
    ("other", "told"),
    [(torch.zeros(64, 32), r"float32 \(64, 32\) here"), (torch.zeros(64, 64).half(), r"float16 \(64, 64\) here")],
)
def test_a_tensor_of_another_shape_or_dtype_is_refused_by_name(tmp_path, other, told):
    save(tmp_path, 1)
    checkpoints = Checkpoints(tmp_path, IDENTITY)
    with pytest.raises(ValueError, match=rf"weights/a.lora_A.weight is float32 \(64, 64\) there and {told}"):
        checkpoints.load_newest({"weights/a.lora_A.weight": other})


def test_what_is_saved_in_the_background_is_what_was_there_at_the_call(tmp_path, monkeypatch):
    gate, write = threading.Event(), ShardedWriter.write_data
    monkeypatch.setattr(ShardedWriter, "write_data", lambda *args: (gate.wait(30), write(*args))[1])
    tensors, plain = tensors_of(1), {"history": [1]}
    checkpoints = Checkpoints(tmp_path, IDENTITY)
    checkpoints.save(1, tensors, plain)
    assert checkpoint.newest(tmp_path) == []
    tensors["weights/a.lora_A.weight"].zero_()
    plain["history"].append(2)
    gate.set()
    checkpoints.close()
    assert_same(checkpoint.read_tensors(newest(tmp_path)), tensors_of(1))
    assert newest(tmp_path).plain == {"history": [1]}


def test_a_save_waits_for_the_one_before_it_and_blocks_for_the_copy_alone(tmp_path, monkeypatch):
    write = ShardedWriter.write_data
    monkeypatch.setattr(ShardedWriter, "write_data", lambda *args: (time.sleep(1.0), write(*args))[1])
    checkpoints, start = Checkpoints(tmp_path, IDENTITY), time.monotonic()
    checkpoints.save(1, tensors_of(1), {})
    assert time.monotonic() - start < 0.8
    checkpoints.save(2, tensors_of(2), {})
    assert 1.0 < time.monotonic() - start < 1.8
    assert newest(tmp_path).iteration == 1
    checkpoints.wait()
    assert newest(tmp_path).iteration == 2


def test_the_newest_are_kept_and_the_best_beside_them(tmp_path):
    for iteration in range(1, 7):
        save(tmp_path, iteration, keep=2, is_best=iteration in (1, 3))
    assert [path.name[-1] for path in checkpoint.newest(tmp_path)] == ["6", "5", "3"]
    assert checkpoint.best(tmp_path).name == "iteration-00000003"
    assert checkpoint.whole(checkpoint.best(tmp_path)).iteration == 3


def test_there_is_nothing_to_load_before_the_first(tmp_path):
    assert checkpoint.newest_whole(tmp_path / "none") is None
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
        (SHARDS, truncate, "were written"),
        (SHARDS, flip, "its SHA-256 differs"),
        (SHARDS, os.unlink, f"{SHARDS} is missing"),
        (".metadata", flip, ".metadata is not what was written"),
        (".metadata", os.unlink, ".metadata is missing"),
        ("manifest.json", truncate, "manifest.json is missing or cut short"),
        ("manifest.json", os.unlink, "manifest.json is missing or cut short"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(tmp_path, file, harm, told):
    save(tmp_path, 1)
    damaged = save(tmp_path, 2)
    harm(damaged / file)
    found = newest(tmp_path)
    assert found.iteration == 1
    assert_same(checkpoint.read_tensors(found), tensors_of(1))
    (note,) = found.notes
    assert "iteration-00000002 is damaged" in note
    assert told in note
    assert note.endswith("took iteration-00000001")
    with pytest.raises(ValueError, match="iteration-00000002 is damaged"):
        checkpoint.whole(damaged)


def test_damaged_checkpoints_alone_are_not_a_fresh_start(tmp_path):
    truncate(save(tmp_path, 1) / SHARDS)
    with pytest.raises(ValueError, match=r"no checkpoint is whole: .*iteration-00000001 is damaged"):
        checkpoint.newest_whole(tmp_path)


def test_a_run_that_went_back_leaves_no_later_checkpoint(tmp_path):
    save(tmp_path, 10)
    truncate(save(tmp_path, 20, is_best=True) / SHARDS)
    save(tmp_path, 15)
    assert [path.name for path in checkpoint.newest(tmp_path)] == ["iteration-00000015", "iteration-00000010"]


def test_a_checkpoint_of_another_model_is_refused_and_the_difference_told(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(ValueError, match="another model: rank is 16 there and 32 here"):
        newest(tmp_path, {**IDENTITY, "rank": 32})


def test_a_difference_of_many_parameters_is_told_by_the_first_and_their_number(tmp_path):
    names = [f"transformer_blocks.{i}.attn.to_q.lora_A.weight" for i in range(500)]
    save(tmp_path, 1, {**IDENTITY, "parameters": {name: [16, 3072] for name in names}})
    here = {"parameters": {name: [32, 3072] for name in names[1:]}, "rank": 32, "adapter": "flux", "more": 1}
    with pytest.raises(ValueError, match="another model") as caught:
        newest(tmp_path, here)
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
        {"plain": None},
        {"tensors": {"a": 7}},
        {"files": []},
        {"files": {}},
        {"files": {".metadata": 7}},
        {"files": {".metadata": {"bytes": 3}}},
        {"files": {"../odd": {"bytes": 3, "sha256": ""}}},
    ],
    ids=str,
)
def test_a_manifest_without_its_keys_counts_as_damaged(tmp_path, change):
    save(tmp_path, 1)
    manifest = save(tmp_path, 2) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    found = newest(tmp_path)
    assert found.iteration == 1
    assert "iteration-00000002 is damaged (manifest.json is not whole" in found.notes[0]


@pytest.mark.parametrize("text", ["[]", "{}", "7", "null"])
def test_a_manifest_that_is_none_counts_as_damaged(tmp_path, text):
    save(tmp_path, 1)
    (save(tmp_path, 2, is_best=True) / "manifest.json").write_text(text)
    assert newest(tmp_path).iteration == 1
    assert checkpoint.best(tmp_path) is None


def test_a_checkpoint_of_another_format_is_refused_with_the_ways_out_and_saving_goes_on(tmp_path):
    save(tmp_path, 1)
    manifest = save(tmp_path, 2) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 3}))
    with pytest.raises(ValueError, match=r"has format 3, this version reads 2; go on with the version .* or move it"):
        newest(tmp_path)
    save(tmp_path, 3)
    assert newest(tmp_path).iteration == 3


def test_a_plain_file_under_a_checkpoints_name_is_damage_and_does_not_stop_saving(tmp_path):
    save(tmp_path, 1, keep=1)
    for number in (2, 9):
        (tmp_path / f"iteration-{number:08d}").write_text("no folder")
    (tmp_path / ".partial-iteration-00000005").write_text("no folder")
    assert newest(tmp_path).iteration == 1
    save(tmp_path, 2, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-00000002"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_kill_before_any_step_of_a_save_leaves_the_old_or_the_new_checkpoint(tmp_path, asynchronous):
    folder = tmp_path / "checkpoints"
    seen = set()

    def prepare():
        save(folder, 1, keep=1)

    def look():
        found = newest(folder)
        assert found.notes == []
        assert checkpoint.read_tensors(found)["weights/a.lora_A.weight"][0, 0] == found.iteration
        seen.add(found.iteration)

    kills = kill_at_every_step(prepare, lambda: save(folder, 2, keep=1, asynchronous=asynchronous), look)
    assert kills > 10
    assert seen == {1, 2}
    save(folder, 3, keep=1)
    assert [path.name for path in folder.iterdir()] == ["iteration-00000003"]


def test_a_kill_while_a_checkpoint_replaces_one_of_its_name_leaves_one_of_them(tmp_path):
    def look():
        found = newest(tmp_path)
        assert found.iteration == 1
        assert found.notes == []

    kills = kill_at_every_step(lambda: save(tmp_path, 1), lambda: save(tmp_path, 1), look)
    assert kills > 10
    save(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-00000001"]


@pytest.mark.parametrize("limit", [100, 4000, 12000, 29000])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_file_that_may_not_grow_leaves_the_older_checkpoint_and_an_error_with_the_path(
    tmp_path, asynchronous, limit
):
    save(tmp_path, 1)

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match="iteration-00000002") as caught:
            save(tmp_path, 2, asynchronous=asynchronous)
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
    found = newest(full_disk)
    assert found.notes == []
    assert f"iteration-{found.iteration + 1:08d}" in str(caught.value)
    assert len(contents(full_disk)) == 3 * found.iteration
