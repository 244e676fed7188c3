"""Decoders of transformers under the shipped plans equal the one-process models: logits, loss, every gradient."""

from typing import Any

import pytest

from tests.overlap import decoder_cases
from tests.ranks import Ranks


def case(family: str, sequence: bool, **changes: Any) -> dict[str, Any]:
    return {
        "family": family,
        "sequence": sequence,
        "settings": {},
        "options": {},
        "rows": [6],
        "checkpointed": False,
        **changes,
    }


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_llama_equals_one_process(ranks: Ranks, num_ranks: int, sequence: bool) -> None:
    ranks.run(num_ranks, decoder_cases.trained, case("llama", sequence))
