"""Whatever cannot be loaded is one clear line, and nothing heavy is imported too early."""

import json
import re
import shutil
import subprocess
import sys

import huggingface_hub
import pytest

from stretto.models import base, load_adapter


def test_importing_the_room_loads_nothing_heavy():
    program = "import sys, stretto.models; print(sorted({'torch', 'diffusers', 'peft'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


def test_an_unknown_adapter_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown adapter 'sdxl'; choose one of digits, flux, wan"):
        load_adapter("sdxl")


def test_a_missing_extra_is_answered_with_the_command(monkeypatch):
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: None if name == "peft" else name)
    with pytest.raises(ValueError, match=re.escape('peft not installed; run: pip install "stretto[train]"')):
        load_adapter("flux")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "no model path; set model.path"),
        ("/nowhere/at/all", "/nowhere/at/all does not exist and is no hub id"),
        ("nowhere", "nowhere does not exist and is no hub id"),
    ],
)
def test_a_path_that_is_neither_folder_nor_hub_id_is_named(path, message):
    with pytest.raises(ValueError, match=message):
        load_adapter("flux", path=path)


def test_a_folder_that_is_not_diffusers_is_named(tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path} is not a diffusers folder")):
        load_adapter("flux", path=str(tmp_path))


def test_a_file_is_not_a_diffusers_folder(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ValueError, match="is not a diffusers folder"):
        load_adapter("flux", path=str(file))


def test_a_pipeline_of_another_class_is_named(load, folders):
    with pytest.raises(ValueError, match="holds a WanPipeline, this adapter needs a FluxPipeline"):
        load("flux", path=str(folders["wan"]))


def test_an_unreadable_index_is_one_line(tmp_path):
    (tmp_path / "model_index.json").write_text("{")
    check_one_line(tmp_path)


def test_an_index_without_a_class_is_named(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({}))
    with pytest.raises(ValueError, match="holds a pipeline of no stated class, this adapter needs a FluxPipeline"):
        load_adapter("flux", path=str(tmp_path))


def test_a_folder_with_a_part_missing_is_one_line(folders, tmp_path):
    shutil.copytree(folders["flux"], tmp_path / "flux")
    shutil.rmtree(tmp_path / "flux" / "vae")
    check_one_line(tmp_path / "flux")


def test_truncated_weights_are_one_line(folders, tmp_path):
    shutil.copytree(folders["flux"], tmp_path / "flux")
    file = tmp_path / "flux" / "transformer" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    check_one_line(tmp_path / "flux")


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    check_one_line("nobody/no-such-model")


def check_one_line(path):
    with pytest.raises(ValueError, match=re.escape(f"cannot load {path}")) as caught:
        load_adapter("flux", path=str(path), height=16, width=24)
    assert "\n" not in str(caught.value)
