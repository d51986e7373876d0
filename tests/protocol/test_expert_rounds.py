"""Rounds that leave the experts out: no work is lost, and what would be lost takes part all the same."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from spes_swarm.base.arrays import FloatArray
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.ownership.lease_table import reassign_group
from spes_swarm.protocol.ownership.reassignment import Rules
from spes_swarm.protocol.rounds.plan import Form, Plan, make_plan
from spes_swarm.protocol.rounds.statement import Group, Member
from spes_swarm.protocol.rounds.track_record import TrackRecords
from tests.helpers.rounds import FakePeer, hold_round, peer, small_layout
from tests.helpers.unsigned_groups import MAX_PART, ROUND, group, member

LAYOUT = small_layout(4)


def planned(*members: Member) -> tuple[Group, Plan]:
    formed = group(members)
    return formed, make_plan(formed, LAYOUT, MAX_PART, experts=False)


def contributors(plan: Plan) -> dict[int, set[int]]:
    """Block -> members that contribute to it."""
    return {index: {c.member for c in block.contributions} for index, block in plan.blocks.items()}


# The plan.


def test_only_the_shared_layers_take_part() -> None:
    formed, plan = planned(member("a", LAYOUT, held=[0, 1]), member("b", LAYOUT, held=[1, 2]))
    assert contributors(plan) == {0: {0, 1}}
    assert plan.deferred == {0, 1, 2, 3}
    whole = make_plan(formed, LAYOUT, MAX_PART)
    assert contributors(whole) == {0: {0, 1}, 1: {0}, 2: {0, 1}, 3: {1}}
    assert whole.deferred == frozenset()


def test_the_experts_of_a_leaving_member_take_part_with_all_their_holders() -> None:
    _, plan = planned(
        member("a", LAYOUT, held=[0, 1]), member("b", LAYOUT, held=[1, 2], leaving=True), member("c", LAYOUT, held=[3])
    )
    assert contributors(plan) == {0: {0, 1, 2}, 2: {0, 1}, 3: {1}}
    assert plan.deferred == {0, 3}


def test_a_member_that_has_done_no_step_since_the_last_commit_still_brings_its_experts() -> None:
    """It leaves just after a round in which they did not take part."""
    _, plan = planned(
        member("a", LAYOUT, held=[0]), member("b", LAYOUT, held=[1, 2], tokens=0, routed=[30, 0], leaving=True)
    )
    assert contributors(plan) == {0: {0}, 2: {1}}


def test_an_expert_of_which_a_holder_has_another_base_takes_part() -> None:
    old = {"versions": [5, 5, 4, 5, 5], "digests": [b"\5" * 32, b"\5" * 32, b"\4" * 32, b"\5" * 32, b"\5" * 32]}
    members = member("a", LAYOUT, held=[0, 1]), member("b", LAYOUT, held=[1]), member("c", LAYOUT, held=[1], **old)
    formed, plan = planned(*members)
    assert contributors(plan) == {0: {0, 1, 2}, 2: {0, 1, 2}}
    assert plan.blocks[2] == make_plan(formed, LAYOUT, MAX_PART).blocks[2]  # it heals as in any other round
    assert plan.deferred == {0, 2, 3}


def test_a_member_with_another_base_of_an_expert_that_it_does_not_hold_is_sent_full_values() -> None:
    old = {"versions": [5, 5, 4, 5, 5], "digests": [b"\5" * 32, b"\5" * 32, b"\4" * 32, b"\5" * 32, b"\5" * 32]}
    _, plan = planned(member("a", LAYOUT, held=[0, 1]), member("b", LAYOUT, held=[1]), member("c", LAYOUT, **old))
    assert contributors(plan) == {0: {0, 1, 2}, 2: set()}
    block = plan.blocks[2]
    assert (block.receives(0), block.receives(1), block.receives(2)) == (False, False, True)
    assert block.result_form(2) is Form.FULL
    assert plan.deferred == {0, 1, 2, 3}


# Bounds.


def test_the_usual_length_of_experts_is_that_of_whole_differences() -> None:
    """Rounds without experts neither count nor let it fade."""
    tracks = TrackRecords()
    tracks.committed(1, [], [], (1.0, 3.0))
    for number in (2, 3):
        _, plan = planned(member("a", LAYOUT, held=[0], rms=[0.5, 9.0]))
        tracks.committed(number, [], [], plan.median_rms)
    assert tracks.usual_rms == pytest.approx((0.64, 3.0))
    tracks.committed(4, [], [], (0.5, 1.0))
    assert tracks.usual_rms == pytest.approx((0.512, 2.4))


# Ownership.


def outcome(*members: Member, experts: bool, rules: Rules | None = None) -> dict[str, tuple[int, ...]]:
    formed = group(members)
    plan = make_plan(formed, LAYOUT, MAX_PART, experts=experts)
    return reassign_group(formed, plan, 4, rules or Rules())


def test_a_replica_moves_only_in_a_round_in_which_it_took_part() -> None:
    members = member("a", LAYOUT, held=[0, 1]), member("b", LAYOUT, held=[0, 1]), member("c", LAYOUT, held=[0, 2])
    assert outcome(*members, experts=False) == {"a": (0, 1), "b": (0, 1), "c": (0, 2)}
    assert {e for held in outcome(*members, experts=True).values() for e in held} == {0, 1, 2, 3}


def test_the_experts_of_a_dead_holder_are_adopted_in_any_round() -> None:
    assert outcome(member("a", LAYOUT, held=[0, 1], room=4), experts=False) == {"a": (0, 1, 2, 3)}


def test_the_experts_of_a_leaving_member_change_hands_in_its_last_round() -> None:
    members = member("a", LAYOUT, held=[0, 1, 2], room=4), member("b", LAYOUT, held=[3], leaving=True)
    assert outcome(*members, experts=False) == {"a": (0, 1, 2, 3)}


def test_who_has_no_room_left_keeps_its_experts_until_they_take_part() -> None:
    members = member("a", LAYOUT, held=[0, 1], room=1), member("b", LAYOUT, held=[2, 3], room=4)
    assert outcome(*members, experts=False)["a"] == (0, 1)
    assert len(outcome(*members, experts=True)["a"]) == 1


def test_experts_rotate_in_the_first_expert_round_at_or_past_each_multiple() -> None:
    rules = Rules(rotate_every_rounds=10, expert_every=4)
    assert [number for number in range(1, 45) if rules.rotates(number)] == [12, 20, 32, 40]
    assert [number for number in range(1, 45) if Rules().rotates(number)] == [10, 20, 30, 40]
    waiting = member("a", LAYOUT, held=[0, 1], room=2)
    assert ROUND == 9
    assert outcome(waiting, experts=False, rules=Rules(rotate_every_rounds=9))["a"] == (0, 1)
    assert outcome(waiting, experts=True, rules=Rules(rotate_every_rounds=9))["a"] != (0, 1)


# Rounds.


def trained(layout: Layout, holdings: list[list[int]]) -> tuple[list[FakePeer], np.random.Generator]:
    rng = np.random.default_rng(3)
    start_N = rng.normal(0, 0.1, layout.num_elements).astype(np.float32)
    return [peer(layout, start_N, held, tokens=10, routed=tuple([4] * len(held))) for held in holdings], rng


def train(peers: list[FakePeer], rng: np.random.Generator, size: float = 0.01) -> None:
    for p in peers:
        for block in p.reference.layout.trained_blocks(p.held):
            p.live_N[block.start : block.stop] += rng.normal(0, size, block.size).astype(np.float32)


def of_expert(expert: int, values_N: FloatArray) -> FloatArray:
    block = LAYOUT.expert_block(expert)
    return values_N[block.start : block.stop].copy()


def agree(peers: list[FakePeer]) -> None:
    assert len({p.reference.digest for p in peers}) == 1


@pytest.mark.parametrize("codec", ["fp32", "fp16"])
def test_three_rounds_of_work_on_experts_arrive_in_the_third(codec: str) -> None:
    peers, rng = trained(LAYOUT, [[0, 1], [1, 2], [3]])
    experts_N = peers[0].reference.values_N[LAYOUT.blocks[1].start :].copy()
    for number in range(1, 7):
        train(peers, rng)
        before = [p.live_N.copy() for p in peers]
        plan, _ = hold_round(peers, number, codec=codec, clip=1.5, experts=number % 3 == 0)
        agree(peers)
        reference = peers[0].reference
        assert reference.versions[0] == number
        assert reference.versions[1:] == (number // 3 * 3,) * 4
        for p, before_N in zip(peers, before, strict=True):
            assert p.reports[-1].experts_covered == 4
            assert p.reports[-1].deferred_experts == plan.deferred
            for expert in p.held:
                live_N, work_N = of_expert(expert, p.live_N), of_expert(expert, before_N)
                if number % 3:
                    assert np.array_equal(live_N, work_N)  # bit by bit
                elif expert != 1:
                    np.testing.assert_allclose(of_expert(expert, reference.values_N), work_N, atol=1e-4)
        if number % 3 == 0:
            experts_N = reference.values_N[LAYOUT.blocks[1].start :].copy()
        assert np.array_equal(reference.values_N[LAYOUT.blocks[1].start :], experts_N)


def test_a_leaving_member_loses_no_work_and_neither_do_those_that_hold_the_same_experts() -> None:
    peers, rng = trained(LAYOUT, [[0, 1], [1, 2], [3]])
    for number in (1, 2):
        train(peers, rng)
        peers[1].leaving = number == 2
        before = [p.live_N.copy() for p in peers]
        hold_round(peers, number, experts=False)
    agree(peers)
    values_N = peers[0].reference.values_N
    np.testing.assert_allclose(of_expert(2, values_N), of_expert(2, before[1]), atol=1e-6)
    mean_N = (of_expert(1, before[0]) + of_expert(1, before[1])) / 2
    np.testing.assert_allclose(of_expert(1, values_N), mean_N, atol=1e-6)
    assert np.array_equal(of_expert(1, peers[0].live_N), of_expert(1, values_N))
    # The others' experts go on as they were.
    assert np.array_equal(of_expert(0, peers[0].live_N), of_expert(0, before[0]))
    assert peers[0].reports[-1].deferred_experts == {0, 3}


def test_a_holder_that_missed_a_result_heals_in_the_next_round_as_in_any_other() -> None:
    """It has an older base of an expert that would not take part yet."""
    peers, rng = trained(LAYOUT, [[0, 1], [1, 2], [3]])
    train(peers, rng)
    lost = {part.index for part in hold_round(copy.deepcopy(peers), 3)[0].parts if part.block == 2}
    hold_round(peers, 3, lose_result=lambda receiver, frame: receiver == 0 and frame.part in lost)
    assert peers[0].reference.versions == (3, 3, 0, 3, 3)
    train(peers, rng)
    others = copy.deepcopy(peers)
    plan, _ = hold_round(peers, 4, experts=False)
    hold_round(others, 4)
    agree(peers)
    assert plan.deferred == {0, 2, 3}
    for mine, other in zip(peers, others, strict=True):
        assert np.array_equal(of_expert(1, mine.reference.values_N), of_expert(1, other.reference.values_N))
        assert np.array_equal(of_expert(1, mine.live_N), of_expert(1, other.live_N))
