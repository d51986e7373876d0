"""Who is named after a round, and who is not: honest members that are fast, late, new or out of luck."""

from __future__ import annotations

import numpy as np
import pytest

from spes_swarm.protocol.rounds import round_faults
from spes_swarm.protocol.rounds.plan import Form, Plan
from spes_swarm.protocol.rounds.track_record import NUM_FIRST_COMMITS, TrackRecords
from tests.helpers.bounded_rounds import HOLDINGS, HOSTILE, LARGE, STEP, add_noise, states_of, swarm, train
from tests.helpers.rounds import BOUNDED, KEY, hold_round, open_round


def named(plan: Plan, left: dict[int, float], new: set[int] | None = None) -> list[int]:
    return [member for member, _ in round_faults.clipped(plan, left, new or set())]


def test_a_clip_names_the_member_once() -> None:
    peers = swarm(LARGE, HOLDINGS)
    train(peers)
    add_noise(peers[HOSTILE], 3 * STEP)
    peers[HOSTILE].tokens = 2**47
    plan, _ = states_of(peers)
    ((member, error),) = round_faults.clipped(plan, {HOSTILE: 0.3}, set())
    assert member == HOSTILE
    assert error.kind == "clipped"
    assert "\n" not in str(error)


def test_a_member_is_named_for_pulling_aside_in_the_second_round_of_it() -> None:
    met, names = TrackRecords(), []
    for number in range(NUM_FIRST_COMMITS + 3):
        peers = swarm(LARGE, HOLDINGS)
        train(peers)
        if number >= NUM_FIRST_COMMITS:
            peers[HOSTILE].live_N[:] = peers[HOSTILE].reference.values_N
            add_noise(peers[HOSTILE], STEP)  # of the usual length, and in no direction that the others know
        plan, states = states_of(peers, number + 1)
        state = open_round(
            states[0].group, plan, 0, peers[0].reference, peers[0].live_N, states[0].codec, BOUNDED, KEY, tracks=met
        )
        for sender in states[1:]:
            for part in plan.pushes(sender.me, 0):
                state.reduction.accept(sender.me, sender.contributions.push_frame(part))
        if number == NUM_FIRST_COMMITS:
            left = state.reduction.agreements.deviations_left()[HOSTILE]
            assert round_faults.MATERIAL_DEVIATION / 2 < left < round_faults.MATERIAL_DEVIATION
        names.append([member for member, _ in state.reduction.clipped()])
        state.record_commit(met)
    assert names == [[]] * NUM_FIRST_COMMITS + [[], [HOSTILE], [HOSTILE]]


def test_the_work_of_two_rounds_at_once_is_not_told() -> None:
    """A reducer went on without this member: what was left out is in its next difference."""
    peers = swarm(LARGE, HOLDINGS)
    train(peers)
    train(peers[:1], seed=2)
    train(peers[:1], seed=3)
    peers[0].live_N += (peers[0].live_N - peers[0].reference.values_N) * np.float32(0.5)  # 2.6 times as long
    plan, _ = states_of(peers)
    assert plan.blocks[0].contributions[0].scale < 0.7
    assert named(plan, {}) == []


def test_who_has_done_more_steps_is_scaled_down_and_not_named() -> None:
    """On a busy machine one peer does thirty steps while the others do four."""
    peers = swarm(LARGE, HOLDINGS)
    train(peers)
    fast = peers[0]
    fast.tokens *= 8
    fast.live_N += 7 * (fast.live_N - fast.reference.values_N)
    plan, _ = states_of(peers)
    assert plan.blocks[0].contributions[0].scale < 0.5
    assert named(plan, {}) == []
    fast.tokens //= 8  # the same length with nobody's tokens to explain it
    plan, _ = states_of(peers)
    assert named(plan, {}) == [0]


def test_newcomers_are_named_only_for_what_no_newcomer_does() -> None:
    peers = swarm(LARGE, HOLDINGS)
    train(peers)
    add_noise(peers[HOSTILE], 2.8 * STEP)  # what a fresh AdamW was measured to do
    plan, _ = states_of(peers)
    assert named(plan, {HOSTILE: 0.4}) == [HOSTILE]  # for its direction
    assert named(plan, {HOSTILE: 0.4}, {HOSTILE}) == []
    add_noise(peers[HOSTILE], 20 * STEP)
    plan, _ = states_of(peers)
    assert named(plan, {}, {HOSTILE}) == [HOSTILE]


@pytest.mark.slow
def test_who_is_late_with_the_work_of_several_rounds_is_not_named() -> None:
    peers = swarm(LARGE, HOLDINGS)
    train(peers)
    hold_round(peers, 1, part_elements=1024)
    late = peers[HOSTILE]
    for number in (2, 3, 4):
        train(peers[:HOSTILE], seed=number)
        hold_round(peers[:HOSTILE], number, part_elements=1024)
    for number in (2, 3, 4, 5, 6):
        train(peers if number == 6 else [late], seed=number)
    late.tokens = 5000
    plan, _ = states_of(peers, 5)
    assert plan.blocks[0].contributions[HOSTILE].form is Form.DELTA
    assert HOSTILE not in plan.blocks[0].in_base
    assert named(plan, {}) == []
    for too_far in (late, peers[0]):  # what nobody's tokens explain
        too_far.live_N += 9 * (too_far.live_N - too_far.reference.values_N)
    plan, _ = states_of(peers, 5)
    assert min(plan.blocks[0].contributions[i].scale for i in (0, HOSTILE)) < 0.5
    assert named(plan, {}) == [0]


def test_missing_parts_name_their_reducer() -> None:
    peers = swarm(LARGE, HOLDINGS)
    train(peers)
    plan, _ = states_of(peers)
    lost = [part for part in plan.parts if part.reducer in (1, HOSTILE)]
    faults = dict(round_faults.missing(plan, 0, lost, finished=set()))
    assert faults.keys() == {1, HOSTILE}
    assert all(error.kind == "missing" for error in faults.values())
    assert str(sum(part.reducer == 1 for part in lost)) in str(faults[1])


def test_parts_that_their_reducer_never_got_name_the_only_contributor() -> None:
    """A member in client mode trains an expert; others reduce it, and have said that they are through."""
    peers = swarm(LARGE, HOLDINGS)
    train(peers)
    peers[HOSTILE].reachable = False
    plan, _ = states_of(peers)
    lost = [part for part in plan.parts if part.block == 5]
    reducers = {part.reducer for part in lost}
    assert HOSTILE not in reducers
    assert [member for member, _ in round_faults.missing(plan, 0, lost, finished=reducers)] == [HOSTILE]
    theirs = [part for part in lost if part.reducer != 0]
    assert HOSTILE not in dict(round_faults.missing(plan, 0, theirs, finished=set()))  # they are to blame themselves
    assert [member for member, _ in round_faults.missing(plan, HOSTILE, lost, finished=reducers)] == []
