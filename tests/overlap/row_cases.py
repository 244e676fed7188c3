"""What every rank does in the tests of plans that split sequences: what is refused, and a model of two sequences."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.overlap import LinearOptions, parallelize
from tests.overlap.matmul_cases import Draw, leaf, same
from tests.overlap.module_cases import compare

PLAN = {
    "left": "sequence split @ left",
    "right": "sequence split @ right",
    "scale": "modulation 0",
    "up": "column @ right+left",
    "down": "row @ right+left",
    "out": "sequence joined @ left",
}


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, y.square()


class Two(nn.Module):
    """Two sequences, joined between a column and a row layer; what scales their rows is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(2, 4), nn.Linear(5, 4), nn.Linear(4, 2)
        self.scale = Scale()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        scale, whole = self.scale(z)
        right = self.right(y)
        rows = torch.cat([right, self.left(input=x)], 1)
        rows = rows + scale[:, None] * self.down(self.up(rows * scale[:, None]).sin())
        return self.out(rows[:, right.shape[1] :]), whole


def two() -> Two:
    torch.manual_seed(3)
    return Two().double()


def trained(lengths: tuple[int, int]) -> None:
    """Outputs and gradients of a model of two sequences, of which a rank may have no rows, at changing lengths."""
    whole, mine = two(), two()
    parallelize(mine, PLAN, dist.group.WORLD)
    for left, right in (lengths, (lengths[1], lengths[0])):
        draw = Draw(left)
        given = [leaf(draw(2, left, 2)), leaf(draw(2, right, 5)), leaf(draw(2, 3))]
        own = [leaf(one) for one in given]
        load = draw(2, left, 2)
        for model, inputs in ((whole, given), (mine, own)):
            rows, scale = model(*inputs)
            ((rows * load).sum() + scale.sum()).backward()
        for theirs, ours in zip(given, own):
            same("input.grad", ours.grad, theirs.grad)
    compare(mine, whole)


def refused() -> None:
    """Every bad plan is one error, and changes nothing; and so is a call of a part before its rows are split."""
    whole = LinearOptions(sequence_parallel=False)
    cases: list[tuple[dict[str, str], LinearOptions | None, str]] = [
        ({"scale": "modulation @ left"}, None, "'modulation', which has no rows to name with @"),
        ({"left": "sequence split", "up": "column @ a, b"}, None, "a comma, as only 'attention' has"),
        ({"left": "sequence split", "right": "sequence split"}, None, r"'right' splits ''; .* once \('left'\)"),
        ({"left": "sequence split @ a+b"}, None, r"splits 'a\+b'; one sequence is split once"),
        (
            {**PLAN, "up": "column @ text"},
            None,
            "is of rows 'text', which no pattern splits; known are 'left', 'right'",
        ),
        ({"out": "sequence joined"}, None, "joins rows that no pattern splits"),
        ({"left": "sequence split @"}, None, r"sequences are written '@ image'"),
        ({"left": "rows split"}, whole, "'rows split', which is for sharded rows"),
        ({"scale": "modulation"}, whole, "'modulation', which is for sharded rows"),
        ({"scale": "modulation one"}, None, "the styles are"),
        ({"left": "rows split", "*": "rows"}, None, "'left' is matched by 'left' and again by"),
    ]
    model: Any = two()
    for plan, options, words in cases:
        with pytest.raises(ValueError, match=words):
            parallelize(model, plan, dist.group.WORLD, options)
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    parallelize(model, PLAN, dist.group.WORLD)
    with pytest.raises(ValueError, match="rows 'right' are used before they are split"):
        model.up(torch.zeros(1, 2, 4, dtype=torch.float64))
