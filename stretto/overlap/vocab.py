"""Embedding and output layer sharded over the vocabulary: tokens in, logits of the own vocabulary out.

A rank looks up the tokens that it has and sends the rows that others own before its own. The hazard: tokens
must be all rows, the same on every rank; that is checked, because different ones would be summed in silence.
Source: Megatron-LM's vocabulary-parallel embedding; the loops are this library's.
"""

import math
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from stretto.overlap.faults import Header
from stretto.overlap.inputs import outside_of_graphs
from stretto.overlap.loops import Scatter, gather, sum_dtype
from stretto.overlap.modules import ColumnLinear, LinearOptions
from stretto.overlap.p2p import Call, Peers, peers_of
from stretto.overlap.routes import Slices, slice_sizes
from stretto.overlap.rows import as_part_of
from stretto.overlap.sharding import Sharded, shard_parameters, shard_state

__all__ = ["VocabEmbedding", "VocabLinear", "check_same"]


class VocabEmbedding(nn.Embedding):
    """An embedding with some of the vocabulary on each rank.

    Shapes:
        tokens (..., all rows), the same on every rank -> (..., all rows, K): with sequence parallelism a
        DTensor of that shape which has own rows; without, a plain tensor, the same on every rank.

    weight: (vocabulary, K), DTensor, Shard(0).
    Gradients: with sequence parallelism the output's gradient is gathered; else nothing is sent.
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
        """One reduce-scatter of rows, or one all-reduce."""
        assert isinstance(self.weight, DTensor)
        peers, check = peers_of(self.mesh.get_group()), self.options.check
        rows = input.movedim(-1, 0).reshape(input.shape[-1], math.prod(input.shape[:-1]))
        options, world_size = self.options, peers.world_size
        with peers.call("vocab_embedding") as call:
            if options.sequence_parallel and not options.uneven and len(rows) % world_size:
                raise ValueError(f"{len(rows)} rows over {world_size} ranks are uneven; set LinearOptions.uneven")
            if check:
                check_same(call, rows, "tokens")
                _check_tokens(rows, self.num_embeddings)
        first = Slices(tuple(slice_sizes(self.num_embeddings, peers.world_size))).rows(peers.rank).start
        lookup = _Lookup(peers, rows, first, self.padding_idx, self.options)
        own: Tensor = _Embed.apply(lookup, call, self.weight.to_local())
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
    """`ValueError` on every rank unless all have the same integers; one small all-reduce."""
    flat = values.flatten().long()
    odd = torch.arange(len(flat), device=flat.device) * 2654435761 + 1
    word = (flat * odd).sum() % (1 << 61)
    words = torch.stack([word, -word, word.new_tensor(len(flat)), word.new_tensor(-len(flat))])
    dist.all_reduce(words, dist.ReduceOp.MAX, group=call.peers.group)
    if bool((words[0::2] != -words[1::2]).any()):
        raise ValueError(f"the ranks have different {what}; give every rank all rows, the same everywhere")


def _check_tokens(tokens: Tensor, vocabulary: int) -> None:
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"tokens are {tokens.dtype}; they must be int64 or int32")
    wrong = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if len(wrong):
        raise ValueError(f"token {int(wrong[0])} is outside of the vocabulary, 0 to {vocabulary - 1}")


class _Lookup:
    """One look-up of tokens (rows, inner) in the own part of a vocabulary, which starts at `first`."""

    def __init__(
        self, peers: Peers, tokens: Tensor, first: int, padding_idx: int | None, options: LinearOptions
    ) -> None:
        self.peers, self.tokens, self.first, self.padding_idx = peers, tokens, first, padding_idx
        self.check, self.whole = options.check, not options.sequence_parallel
        self.slices = Slices(tuple(slice_sizes(len(tokens), peers.world_size)), options.num_subslices)

    def header(self, call: Call, dtype: torch.dtype, needed: bool) -> Header:
        """Of all steps of a call; a look-up computes next to nothing, so the schedule is always direct."""
        n = self.slices.num_subslices
        return Header(call.operation, call.number, "gather", 0, (), dtype, n, "direct", (needed,))

    def partial(self, weight: Tensor, rows: slice) -> Tensor:
        """(n, inner, K): rows of the own vocabulary, 0 for tokens of others'."""
        local, mine = self._local(weight, rows)
        if len(weight) == 0:
            return weight.new_zeros(*local.shape, weight.shape[1])
        return F.embedding(local * mine, weight) * mine.unsqueeze(-1)

    def add_gradient(self, total: Tensor, dy: Tensor, rows: slice) -> None:
        """Add the gradient dy (n, inner, K) of some rows to the own vocabulary's, (own vocabulary, K)."""
        local, mine = self._local(total, rows)
        if self.padding_idx is not None:
            mine = mine & (self.tokens[rows] != self.padding_idx)
        total.index_add_(0, local[mine], dy[mine].to(total.dtype))

    def _local(self, weight: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        local = self.tokens[rows] - self.first
        return local, (local >= 0) & (local < len(weight))


class _Embed(torch.autograd.Function):
    """weight (own vocabulary, K) -> (own rows, inner, K), or (rows, inner, K)."""

    @staticmethod
    def forward(ctx: Any, lookup: _Lookup, call: Call, weight: Tensor) -> Tensor:
        slices, check = lookup.slices, lookup.check
        shape = (slices.total, lookup.tokens.shape[1], weight.shape[1])
        ctx.lookup, ctx.weight = lookup, weight.detach()
        with lookup.peers.resume(call):
            header = lookup.header(call, weight.dtype, ctx.needs_input_grad[2])
            scatter = Scatter(call, header, shape, slices, weight.device, check=check)
            for piece in scatter.pieces():
                scatter.put(piece, lookup.partial(weight, piece.rows))
            own = scatter.result()
            if not lookup.whole:
                return own
            out = weight.new_empty(shape)
            for _ in gather(call, header, own, slices, check=check, into=out):
                pass
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        lookup, dy, weight = ctx.lookup, grads[0].contiguous(), ctx.weight
        total = torch.zeros_like(weight, dtype=sum_dtype(weight.dtype))
        if lookup.whole:
            lookup.add_gradient(total, dy, slice(None))
        else:
            with lookup.peers.call("vocab_embedding backward") as call:
                header = lookup.header(call, dy.dtype, True)
                for piece, arrived in gather(call, header, dy, lookup.slices, check=lookup.check):
                    lookup.add_gradient(total, arrived, piece.rows)
        return None, None, total.to(weight.dtype)
