"""Parallel layers inside PyTorch's training stack: FSDP2, clipping, optimizers, distributed checkpoints."""

from pathlib import Path

import pytest

from tests.overlap import ecosystem_cases
from tests.ranks import Ranks


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize(
    ("checkpointed", "meta", "with_lora"), [(False, False, False), (True, True, False), (True, False, True)]
)
def test_a_step_under_fsdp2_is_the_step_of_one_process(
    ranks: Ranks, sequence: bool, checkpointed: bool, meta: bool, with_lora: bool
) -> None:
    ranks.run(4, ecosystem_cases.fsdp, sequence, checkpointed, meta, with_lora)


@pytest.mark.parametrize("sequence", [True, False])
def test_a_distributed_checkpoint_moves_between_layouts(ranks: Ranks, tmp_path: Path, sequence: bool) -> None:
    first, second = str(tmp_path / "dp and tp"), str(tmp_path / "tp")
    ranks.run(4, ecosystem_cases.trained_and_saved, first, sequence)
    ranks.run(2, ecosystem_cases.loaded_over, first, second, sequence)
    ranks.run(1, ecosystem_cases.loaded_plain, second)
