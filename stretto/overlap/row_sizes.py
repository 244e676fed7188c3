"""How many rows every rank has, asked of every rank.

Only where they can differ and nobody knows. The hazard: the host waits for the answers, before anything is computed.
"""

from dataclasses import replace

import torch

from stretto.overlap.faults import Header
from stretto.overlap.p2p import Call
from stretto.overlap.routes import route

__all__ = ["exchange_sizes"]


def exchange_sizes(call: Call, header: Header, device: torch.device) -> list[int]:
    """The number of rows of every rank's slice, from one header to and from every peer.

    All else in the headers, the shape behind the rows included, must agree.
    """
    peers = call.peers
    rank, world_size, home = peers.rank, peers.world_size, peers.words(device)
    routes = [route("scatter", "direct", rank, world_size, step) for step in range(world_size - 1)]
    received = {r.recv_from: Header.blank(home) for r in routes}
    words = header.pack(home)
    call.position = "exchange of sizes"
    call.wait(call.tell([(words, r.send_to) for r in routes], [(received[p], p) for p in received], device))
    sizes = [header.shape[0]] * world_size
    for peer, buffer in received.items():
        theirs = Header.unpack(buffer)
        call.compare(replace(header, shape=(*theirs.shape[:1], *header.shape[1:])), theirs, peer)
        sizes[peer] = theirs.shape[0]
    return sizes
