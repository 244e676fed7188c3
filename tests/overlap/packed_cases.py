"""What every rank does in the tests of packed row layers: two branches side by side into one output layer."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.overlap import LinearOptions, parallelize
from tests.overlap.matmul_cases import Draw, leaf, same
from tests.overlap.module_cases import compare, full, own_rows

PLAN = {"narrow+wide": "column", "out": "row 2+5"}


class Branches(nn.Module):
    """Branches of 6 and 15 features."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide, self.out = nn.Linear(4, 6), nn.Linear(4, 15), nn.Linear(21, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([self.narrow(x).sin(), self.wide(x).cos()], -1))


def branches() -> Branches:
    torch.manual_seed(3)
    return Branches().double()


def trained(sequence: bool) -> None:
    whole, mine = branches(), branches()
    parallelize(mine, PLAN, dist.group.WORLD, LinearOptions(sequence_parallel=sequence, uneven=True))
    draw = Draw(1)
    x = leaf(draw(2, 7, 4))
    load = draw(*x.shape)
    y = whole(x)
    (y * load).sum().backward()
    part = own_rows if sequence else (lambda tensor: tensor)
    own = leaf(part(x))
    out = mine(own)
    same("y", out, part(y))
    (out * part(load)).sum().backward()
    same("x.grad", own.grad, part(x.grad))
    compare(mine, whole)
    assert all(torch.equal(full(value), whole.state_dict()[name]) for name, value in mine.state_dict().items())


def refusals() -> None:
    for plan, words in [
        ({"out": "row 1+4"}, r"'out' has 21 input features, which are not in the proportion 1\+4"),
        ({"out": "row 2+x"}, r"'out' asks for 'row 2\+x'"),
        ({"out": "row 0+3"}, r"'out' asks for 'row 0\+3'"),
        ({"narrow": "column 1+1"}, r"'narrow' asks for 'column 1\+1'"),
    ]:
        model = branches()
        with pytest.raises(ValueError, match=words):
            parallelize(model, plan, dist.group.WORLD)
        assert type(model.out) is nn.Linear
