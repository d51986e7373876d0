"""Five members for tests of what bounds a round: four honest ones and one that may go too far."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from spes_swarm.base.arrays import FloatArray
from spes_swarm.protocol.consensus.codec import get_codec
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.rounds.plan import Plan, make_plan
from spes_swarm.protocol.rounds.round_state import RoundState
from tests.helpers.rounds import BOUNDED, KEY, FakePeer, form, open_round, peer, small_layout

CLIP = 1.5
HOSTILE = 4
STEP = 0.01  # RMS of what an honest peer learns in a round


def swarm(layout: Layout, holdings: list[list[int]], seed: int = 0) -> list[FakePeer]:
    """Peers with one base and these experts."""
    start_N = np.random.default_rng(seed).normal(0, 0.1, layout.num_elements).astype(np.float32)
    return [peer(layout, start_N, held, tokens=1000, routed=[100] * len(held)) for held in holdings]


def train(peers: list[FakePeer], seed: int = 1) -> None:
    """Most of what is learnt is the same for all, as with the same weights and similar text."""
    common_N = np.random.default_rng(seed).normal(0, 0.9 * STEP, len(peers[0].live_N))
    for number, who in enumerate(peers):
        own_N = np.random.default_rng((seed, 1 + number)).normal(0, math.sqrt(0.19) * STEP, len(who.live_N))
        for block in trained(who):
            where = slice(block.start, block.stop)
            who.live_N[where] += (common_N + own_N)[where].astype(np.float32)


def trained(who: FakePeer) -> list[Any]:
    """The blocks that a peer trains."""
    layout = who.reference.layout
    return [layout.blocks[0], *(layout.expert_block(expert) for expert in who.held)]


def add_noise(who: FakePeer, rms: float) -> None:
    """Adds noise of this RMS to all that a peer trains."""
    for block in trained(who):
        noise_N = np.random.default_rng(block.index).normal(0, rms, block.size)
        who.live_N[block.start : block.stop] += noise_N.astype(np.float32)


def rms(values: FloatArray) -> float:
    """Root mean square of the values."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def moved(before_N: FloatArray, who: FakePeer, index: int) -> float:
    """RMS of what a block of a peer's reference has moved by since `before_N`."""
    block = who.reference.layout.blocks[index]
    return rms(who.reference.values_N[block.start : block.stop] - before_N[block.start : block.stop])


LARGE = small_layout(6, shared=12_000, expert=3_000)
HOLDINGS = [[0, 1], [1, 2], [2, 3], [0, 3], [4, 5]]


def states_of(peers: list[FakePeer], number: int = 1) -> tuple[Plan, list[RoundState]]:
    """The plan of a round with bounds, and its state at each member."""
    group = form(peers, number)
    plan = make_plan(group, peers[0].reference.layout, 1024, clip=CLIP)
    codec = get_codec("fp16")
    return plan, [open_round(group, plan, i, p.reference, p.live_N, codec, BOUNDED, KEY) for i, p in enumerate(peers)]
