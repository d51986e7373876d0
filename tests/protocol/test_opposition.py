"""Whole rounds with a member that works against the others, and with honest ones that may seem to."""

from __future__ import annotations

import numpy as np
import pytest

from spes_swarm.protocol.consensus.layout import SHARED_BLOCK
from spes_swarm.protocol.rounds.plan import Form
from spes_swarm.protocol.rounds.round_state import RoundState
from spes_swarm.protocol.rounds.track_record import TrackRecords
from tests.helpers.bounded_rounds import CLIP, HOLDINGS, HOSTILE, LARGE, STEP, swarm, train
from tests.helpers.rounds import hold_round, small_layout


@pytest.mark.parametrize("length", [-1.0, 0.0])
def test_a_member_that_contributes_the_opposite_or_nothing_is_ignored(length: float) -> None:
    """Then the others' mean is that of a swarm without it, and experts that it alone holds stay as they are."""
    layout = small_layout(6, shared=24_000, expert=3_000)
    peers = swarm(layout, HOLDINGS)
    records = [TrackRecords() for _ in peers]
    shared, sole = layout.blocks[0].where, {1 + expert for expert in HOLDINGS[HOSTILE]}
    ignored_in = []
    for number in range(1, 10):
        train(peers, seed=number)
        before_N = peers[HOSTILE].reference.values_N.copy()
        peers[HOSTILE].live_N[:] = before_N + length * (peers[HOSTILE].live_N - before_N)
        honest_N = np.mean([who.live_N[shared] for who in peers[:HOSTILE]], axis=0)
        plan, states = hold_round(peers, number, codec="fp16", part_elements=1024, clip=CLIP)
        assert plan.ignored == plan.without_duty
        if plan.ignored:
            assert plan.ignored == {HOSTILE}
            ignored_in.append(number)
            assert sole.isdisjoint(plan.blocks)
            np.testing.assert_allclose(peers[0].reference.values_N[shared], honest_N, atol=0.02 * STEP)
        else:
            assert sole < plan.blocks.keys()
        for who, state, tracks in zip(peers, states, records, strict=True):
            state.record_commit(tracks)
            who.vouched = tracks.to_vouchers(number + 1)
    assert ignored_in == [6, 7, 8, 9]
    hostile = states[0].group.members[HOSTILE].peer_id
    assert [tracks.conduct.doubts(hostile, 10)[:1] for tracks in records[:HOSTILE]] == [("opposition",)] * 4


def seen_by(*states: RoundState) -> list[list[float]]:
    """What these members have seen of each other member, by part."""
    return [found for state in states for found in state.reduction.agreements.opposition(state.plan.claims).values()]


@pytest.mark.parametrize(
    ("tokens", "length", "counts"),
    [
        (1000, 0.0, True),
        (1000, 0.08, True),
        (1000, 0.15, False),
        (300_000, 0.08, True),  # it is believed twice as many as the others
        (300_000, 0.15, False),
        (100, 0.01, False),  # a tenth of the steps, while the learning rate rises
        (100, 0.0, True),
    ],
)
def test_who_contributes_next_to_nothing_for_its_tokens_opposes_the_others(
    tokens: int, length: float, counts: bool
) -> None:
    peers = swarm(LARGE, HOLDINGS)
    train(peers)
    who = peers[HOSTILE]
    who.tokens = tokens
    who.live_N[:] = who.reference.values_N + length * (who.live_N - who.reference.values_N)
    plan, states = hold_round(peers, 1, codec="fp16", part_elements=1024, clip=CLIP)
    seen = [state.reduction.agreements.opposition(plan.claims) for state in states[:HOSTILE]]
    assert [set(found[HOSTILE]) for found in seen] == [{float(counts)}] * HOSTILE
    assert {max(found[i]) for found in seen for i in found if i != HOSTILE} == {0.0}


def test_a_limited_weight_is_not_that_of_fewer_steps() -> None:
    """Four members are invited with 1 % each; the fifth has made a tenth of their steps."""
    peers = swarm(LARGE, HOLDINGS)
    train(peers)
    for who in peers:
        who.most_weight = 0.01
    slow = peers[HOSTILE]
    slow.tokens, slow.most_weight = 100, 1.0
    slow.live_N[:] = slow.reference.values_N + 0.05 * (slow.live_N - slow.reference.values_N)
    _, states = hold_round(peers, 1, codec="fp16", part_elements=1024, clip=CLIP)
    assert {max(found) for found in seen_by(*states)} == {0.0}


def test_text_in_another_script_leaves_rows_of_the_embedding_untouched() -> None:
    """Most parts of the shared layers are of rows that one member has no text for."""
    peers = swarm(LARGE, HOLDINGS)
    train(peers)
    rows, used = slice(0, 9_000), slice(7_000, 9_000)
    for who in peers[:HOSTILE]:
        who.live_N[used] = who.reference.values_N[used]
    other = peers[HOSTILE]
    work_N = (other.live_N - other.reference.values_N)[used]
    other.live_N[rows] = other.reference.values_N[rows]
    other.live_N[used] += 2 * work_N
    _, states = hold_round(peers, 1, codec="fp16", part_elements=1024, clip=CLIP)
    assert {max(found) for found in seen_by(*states)} == {0.0}


def test_the_opposite_in_experts_alone_is_not_held_against_a_member() -> None:
    """Of an expert with few holders, nobody knows who opposes whom."""
    peers = swarm(LARGE, [[0, 1]] * 5)
    train(peers)
    experts = slice(LARGE.blocks[1].start, None)
    peers[HOSTILE].live_N[experts] = (2 * peers[HOSTILE].reference.values_N - peers[HOSTILE].live_N)[experts]
    _, states = hold_round(peers, 1, codec="fp16", part_elements=1024, clip=CLIP)
    assert {max(found) for found in seen_by(*states)} == {0.0}


def test_honest_members_do_not_judge_in_a_group_in_which_most_oppose_them() -> None:
    """A hostile leader can leave out honest members, and two of five may have no tokens."""
    peers = swarm(LARGE, HOLDINGS)
    train(peers)
    for who in peers[2:]:
        who.live_N[:] = 2 * who.reference.values_N - who.live_N
    plan, states = hold_round(peers, 1, codec="fp16", part_elements=1024, clip=CLIP)
    assert {0, 1} <= {part.reducer for part in plan.parts if part.block == SHARED_BLOCK}
    assert not seen_by(*states[:2])
    idle = swarm(LARGE, HOLDINGS)
    train(idle)
    idle[0].tokens = 0
    idle[0].routed = (0, 0)
    _, states = hold_round(idle, 1, codec="fp16", part_elements=1024, clip=CLIP)
    assert not seen_by(states[0])  # it has no work of its own to compare with
    assert seen_by(*states[1:])


def test_full_values_of_a_slow_member_do_not_count_as_opposition() -> None:
    """It was alone for a round, and has made a fifth of the others' progress: its values point back."""
    peers = swarm(LARGE, HOLDINGS)
    for number in (1, 2):
        for seed, who in ((1, peers[:HOSTILE]), (number, peers[HOSTILE:])):
            before_N = [each.live_N.copy() for each in who]
            train(who, seed=seed)
            if who == peers[HOSTILE:]:
                who[0].live_N[:] = before_N[0] + 0.2 * (who[0].live_N - before_N[0])
        if number == 1:
            hold_round(peers[:HOSTILE], 1, codec="fp16", part_elements=1024, clip=CLIP)
            hold_round(peers[HOSTILE:], 1, codec="fp16", part_elements=1024, clip=CLIP)
    plan, states = hold_round(peers, 2, codec="fp16", part_elements=1024, clip=CLIP)
    assert {c.form for c in plan.blocks[0].contributions} == {Form.DELTA, Form.FULL}
    seen = [state.reduction.agreements.opposition(plan.claims) for state in states]
    assert not seen[HOSTILE]
    assert all(HOSTILE not in each for each in seen)
    assert any(seen)
    assert {max(found) for each in seen for found in each.values()} == {0.0}
