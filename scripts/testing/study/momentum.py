"""Muon's momentum, averaged after each round among the peers that train a tensor.

It is no part of the reference: peers that miss it would keep their own, and digests do not depend on it.

Shapes: N elements of a tensor, flat; K peers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from scripts.testing.sequential_swarm import SequentialPeer
from spes_swarm.protocol.consensus.codec import Codec
from spes_swarm.training.optimiser.moment_storage import MOMENTUM


def share_momentum(peers: Sequence[SequentialPeer], codec: Codec) -> int:
    """Replaces the momentum of each tensor by the mean of the peers that train it; returns the bytes sent.

    Momentum that is zero does not count: a new holder takes that of the others. One of the holders reduces, so each
    tensor travels to it and back between it and every other.
    """
    holders: defaultdict[int, list[Tensor]] = defaultdict(list)
    for peer in peers:
        for start, momentum in _momenta(peer):
            holders[start].append(momentum)
    num_bytes = 0
    for momenta in holders.values():
        contributed = [codec.encode(each.numpy().reshape(-1)) for each in momenta if each.any()]
        if len(momenta) < 2 or not contributed:
            continue
        size = momenta[0].numel()
        mean_N = np.stack([codec.decode(data, size) for data in contributed]).mean(axis=0)
        result = codec.encode(mean_N)
        decoded = torch.from_numpy(codec.decode(result, size).copy())  # that of fp32 is read-only
        for each in momenta:
            each.copy_(decoded.view(each.shape))
        num_bytes += (len(contributed) - 1) * len(contributed[0]) + (len(momenta) - 1) * len(result)
    return num_bytes


def _momenta(peer: SequentialPeer) -> Iterator[tuple[int, Tensor]]:
    """Yields where each tensor with momentum starts in the flat vector, and a view of its momentum."""
    parameters, held = dict(peer.model.trainable_parameters()), peer.model.held
    (name,) = MOMENTUM
    for block in peer.model.layout.trained_blocks(held):
        for slot in block.slots:
            state = peer.optimiser.state.get(parameters[slot.name])
            if state and name in state:
                yield slot.start, state[name] if slot.expert is None else state[name][held.index(slot.expert)]
