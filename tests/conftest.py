import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stretto.models import load_adapter
from tests import tiny
from tests.ranks import Ranks

SIZES = {"flux": {"height": 16, "width": 24}, "wan": {"height": 32, "width": 48, "frames": 9}}


def pytest_configure() -> None:
    """A shell's background jobs ignore SIGINT, and so would every process that a test interrupts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow what tests/slower.txt lists; told where the whole suite has no such case."""
    lines = (Path(__file__).parent / "slower.txt").read_text().splitlines()
    listed = {line for line in lines if not line.startswith("#")}
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.slow)
    unknown = listed - {item.nodeid for item in items}
    if unknown and config.args == config.getini("testpaths"):
        raise pytest.UsageError(f"tests/slower.txt: there is no {min(unknown)}")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The pool of spawned gloo ranks of the whole suite."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Tiny saved pipelines by adapter name."""
    root = tmp_path_factory.mktemp("tiny")
    return {"flux": tiny.tiny_flux_folder(root / "flux"), "wan": tiny.tiny_wan_folder(root / "wan")}


@pytest.fixture(scope="session")
def load(folders):
    """load(name, **settings): a fresh adapter on the tiny folder."""

    def load(name, **settings):
        settings = {"path": str(folders[name]), "text_length": tiny.TEXT_LENGTH, **SIZES[name], **settings}
        return load_adapter(name, **settings)

    return load


@pytest.fixture
def inputs():
    """inputs(adapter, rows): latents, sigmas and the condition of as many prompts, always the same."""

    def inputs(adapter, rows=2):
        generator = torch.Generator().manual_seed(3)
        latents = torch.randn(rows, *adapter.latent_shape, generator=generator)
        sigma = torch.linspace(0.9, 0.3, rows)
        return latents, sigma, adapter.encode(["a red fox", "two owls", "snow", "a lamp"][:rows])

    return inputs
