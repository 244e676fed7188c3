"""Embedding and output layer sharded over the vocabulary: tokens in, logits of the own vocabulary out.

The hazard: tokens must be all rows, the same on every rank; that is checked, because different ones would be mixed
up in silence. Source: Megatron-LM's vocabulary-parallel embedding for the layout.
"""

import math
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from stretto.overlap.inputs import outside_of_graphs
from stretto.overlap.lookup import Embed, Lookup
from stretto.overlap.modules import ColumnLinear, LinearOptions
from stretto.overlap.p2p import Call, peers_of
from stretto.overlap.rows import as_part_of
from stretto.overlap.sharding import Sharded, shard_parameters, shard_state

__all__ = ["VocabEmbedding", "VocabLinear", "check_same"]

_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Of splitmix64, as int64."""


class VocabEmbedding(nn.Embedding):
    """An embedding with some of the vocabulary on each rank.

    Shapes:
        tokens (..., all rows), the same on every rank -> (..., all rows, K): with sequence parallelism a
        DTensor of that shape which has own rows; without, a plain tensor, the same on every rank.

    weight: (vocabulary, K), DTensor, Shard(0).
    Gradients: with sequence parallelism rows go back to where they came from; else nothing is sent.
    Errors: `ValueError` for tokens outside of the vocabulary, or that differ between ranks.
    """

    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(0)}
    mesh: DeviceMesh
    options: LinearOptions

    @classmethod
    def adopt(
        cls, embedding: nn.Embedding, mesh: DeviceMesh, options: LinearOptions, sharded: Sharded | None = None
    ) -> None:
        """Turn an embedding into a parallel one in place; rank 0's values are everyone's."""
        embedding.__class__ = cls
        assert isinstance(embedding, VocabEmbedding)
        embedding.mesh, embedding.options = mesh, options
        shard_parameters(embedding, cls.placements, mesh, sharded)

    @outside_of_graphs
    def forward(self, input: Tensor) -> Tensor:
        """One exchange of looked-up rows, and without sequence parallelism a gather of all."""
        assert isinstance(self.weight, DTensor)
        peers, check = peers_of(self.mesh.get_group()), self.options.check
        rows = input.movedim(-1, 0).reshape(input.shape[-1], math.prod(input.shape[:-1]))
        options, world_size = self.options, peers.world_size
        with peers.call("vocab_embedding") as call:
            if check:  # first: a rank that refused its own rows would leave the others waiting here
                check_same(call, rows, "tokens")
                _check_tokens(rows, self.num_embeddings)
            if options.sequence_parallel and not options.uneven and len(rows) % world_size:
                raise ValueError(f"{len(rows)} rows over {world_size} ranks are uneven; set LinearOptions.uneven")
        whole = not options.sequence_parallel
        lookup = Lookup(peers, rows, self.num_embeddings, self.padding_idx, whole=whole, check=check)
        own: Tensor = Embed.apply(lookup, call, self.weight.to_local())
        out = own.view(len(own), *input.shape[:-1], self.embedding_dim).movedim(0, -2)
        if not self.options.sequence_parallel:
            return out
        return as_part_of((*input.shape, self.embedding_dim), out, self.mesh, Shard(input.ndim - 1))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        shard_state(state_dict, prefix, self.placements, self.mesh)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class VocabLinear(ColumnLinear):
    """A column layer that gives logits: own vocabulary, or, `gathered`, whole on every rank.

    Shapes:
        x as `ColumnLinear` -> (..., all rows, vocabulary), a DTensor that has the own vocabulary, for
        `vocab_cross_entropy`; or plain and whole, for code that knows of no ranks.

    Gradients: of whole logits, the same on every rank: each uses its own part, nothing is sent.
    """

    gathered: bool = False

    def forward(self, input: Tensor) -> Tensor:
        """The column layer's, announced or gathered."""
        out = super().forward(input)
        logits = as_part_of((*out.shape[:-1], self.out_features), out, self.mesh, Shard(out.ndim - 1))
        return logits.full_tensor() if self.gathered else logits


def check_same(call: Call, values: Tensor, what: str) -> None:
    """`ValueError` on every rank unless all have the same integers in the same shape; one small all-reduce."""
    facts = torch.tensor([*values.shape, values.dtype.is_floating_point], dtype=torch.int64, device=values.device)
    word = _mixed(torch.cat([facts, values.flatten().long()]))
    words = torch.stack([word, -word])
    dist.all_reduce(words, dist.ReduceOp.MAX, group=call.peers.group)
    if int(words[0]) != -int(words[1]):
        raise ValueError(f"the ranks have different {what}; give every rank all rows, the same everywhere")


def _mixed(numbers: Tensor) -> Tensor:
    """One number below 2 ** 61 of int64 numbers (n,) and their places.

    Each is scrambled before they are added: weighted by its place, (1, 2, 2, 1) would have the sum of (2, 1, 1, 2).
    """
    word = numbers * _ODD[0] + torch.arange(len(numbers), device=numbers.device) * _ODD[1]
    for odd in _ODD:
        word = (word ^ (word >> 29)) * odd
    return (word ^ (word >> 32)).sum() % (1 << 61)


def _check_tokens(tokens: Tensor, vocabulary: int) -> None:
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"tokens are {tokens.dtype}; they must be int64 or int32")
    wrong = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if len(wrong):
        raise ValueError(f"token {int(wrong[0])} is outside of the vocabulary, 0 to {vocabulary - 1}")
