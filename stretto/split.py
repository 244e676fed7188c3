"""The model over the ranks: which axis of the mesh splits what.

Tensor first (layers), then Ulysses (tokens), then FSDP2 (what is left of the parameters, over the data and the
Ulysses ranks of a replica). Frozen copies that gradients are held against are split alike. The hazard is the order: a
layer that FSDP2 has sharded can no longer be split. Beside Ulysses, which splits tokens itself, tensor ranks keep
them whole.
"""

from torch import nn

from stretto.config import Config
from stretto.ranks import Ranks

__all__ = ["split_model"]


def split_model(config: Config, transformer: nn.Module, ranks: Ranks) -> None:
    """Split a transformer in place over the ranks; nothing for one process.

    Raises ValueError where heads cannot be split so, with the sizes that can.
    """
    if ranks.mesh is None:
        return
    parallel, sizes = config.parallel, ranks.sizes
    if sizes["tensor"] > 1:
        from stretto.models.tensor_parallel import split_layers

        split_layers(transformer, ranks.mesh["tensor"], shard_rows=parallel.shard_rows and sizes["ulysses"] == 1)
    if sizes["ulysses"] > 1:
        from stretto.models.ulysses import split_sequence

        split_sequence(transformer, ranks.mesh["ulysses"])
    if sizes["shard"] > 1:
        from stretto.models.sharded import shard_transformer

        shard_transformer(transformer, ranks.shard_mesh)
