"""Whole rounds in which reducers leave out a member's work: how much of it is carried over."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest

from spes_swarm.protocol.averaging.clipping import CARRIED_PART_RATIO
from spes_swarm.protocol.consensus.layout import SHARED_BLOCK
from spes_swarm.protocol.rounds import round_faults
from spes_swarm.protocol.rounds.frames import Frame
from spes_swarm.protocol.rounds.plan import make_plan
from tests.helpers.bounded_rounds import CLIP, HOLDINGS, LARGE, STEP, rms, swarm, train, trained
from tests.helpers.rounds import FakePeer, form, hold_round, small_layout


def hold_without(peers: list[FakePeer], number: int, parts: Collection[int], clip: float = CLIP) -> None:
    """Holds a round in which what the first peer contributes to these parts is lost."""

    def lost(sender: int, frame: Frame) -> bool:
        return sender == 0 and frame.part in parts

    hold_round(peers, number, codec="fp16", part_elements=1024, clip=clip, lose_push=lost)


@pytest.mark.parametrize("reachable", [True, False])
@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_who_is_always_left_out_does_not_go_too_far(reachable: bool, ratio: float) -> None:
    """A hostile reducer drops an honest member's work: what is carried over must not get it clipped, and doubted.

    The two hold the same experts, which an honest member that cannot be reached does not reduce.
    """
    peers = swarm(small_layout(6, shared=4000, expert=2000), [[0, 1], [2, 3], [2, 3], [4, 5], [0, 1]])
    victim = peers[0]
    victim.reachable = reachable
    victim.tokens = round(1000 * ratio)
    for number in range(1, 9):
        before_N = victim.live_N.copy()
        train(peers)  # in the same direction each time: what is carried over adds up
        for block in trained(victim):
            where, scatter = slice(block.start, block.stop), 1.2 if block.expert is not None else 1.0
            victim.live_N[where] = before_N[where] + ratio * scatter * (victim.live_N[where] - before_N[where])
        plan = make_plan(form(peers, number), victim.reference.layout, 1024, clip=CLIP)
        dropped = {part.index for part, _ in plan.contributed(0, reducer=4)}
        assert dropped
        hold_without(peers, number, dropped)
        assert plan.claims[0].excess < round_faults.MATERIAL_EXCESS


def test_work_that_was_dropped_for_long_passes_at_the_next_reducer() -> None:
    """One part of many may become far longer than its block, but no longer than any reducer takes."""
    peers = swarm(small_layout(6, shared=61_440, expert=600), [[i % 6] for i in range(13)])
    layout = peers[0].reference.layout
    for number in range(1, 6):
        train(peers)
        plan = make_plan(form(peers, number), layout, 1024, clip=CLIP)
        dropped = next(part for part, _ in plan.contributed(0, reducer=12) if part.block == SHARED_BLOCK)
        hold_without(peers, number, {dropped.index})
    train(peers)
    where = slice(dropped.start, dropped.start + dropped.size)
    assert rms((peers[0].live_N - peers[0].reference.values_N)[where]) > 2 * STEP
    _, states = hold_round(peers[:12], 6, codec="fp16", part_elements=1024, clip=CLIP)
    assert not any(state.reduction.refused or state.reduction.own_faults for state in states)


@pytest.mark.parametrize(("clip", "untouched"), [(CLIP, 0.6), (0.0, 0.9)])
def test_work_of_a_long_part_that_is_left_out_once_is_carried_over_whole(clip: float, untouched: float) -> None:
    """Rows of an embedding that no token has touched make the others' longer than the block's."""
    peers = swarm(LARGE, HOLDINGS)
    before_N = peers[0].live_N.copy()
    train(peers)
    touched = round(LARGE.blocks[SHARED_BLOCK].size * untouched)  # from here on
    for who in peers:
        who.live_N[:touched] = before_N[:touched]
    difference_N = peers[0].live_N - before_N
    plan = make_plan(form(peers, 1), LARGE, 1024, clip=clip)
    long = [part for part in plan.parts if part.block == SHARED_BLOCK and part.start >= touched]
    lost = next(part for part in long if part.reducer != 0)
    stated = next(c for c in plan.blocks[SHARED_BLOCK].contributions if c.member == 0)
    where = slice(lost.start, lost.start + lost.size)
    assert rms(difference_N[where]) > (stated.limit_rms if clip else CARRIED_PART_RATIO * stated.stated_rms)
    hold_without(peers, 1, {lost.index}, clip)
    carried_N = peers[0].live_N[where] - peers[0].reference.values_N[where]
    np.testing.assert_allclose(carried_N, difference_N[where], atol=1e-6)
