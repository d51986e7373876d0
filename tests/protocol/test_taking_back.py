"""Taking back a commit: who decides it, and what the members have afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_swarm.base.arrays import FloatArray
from spes_swarm.protocol.consensus.lineage import Lineage
from spes_swarm.protocol.ownership.lease_table import reassign_group
from spes_swarm.protocol.ownership.reassignment import Rules
from spes_swarm.protocol.rounds.plan import Form, make_plan
from spes_swarm.protocol.rounds.taking_back import Previous
from spes_swarm.protocol.rounds.vouchers import vouchers
from tests.helpers.rounds import FakePeer, form, hold_round, identities, peer, small_layout

LAYOUT = small_layout(4)
N = LAYOUT.num_elements
HELD = ([0], [1], [2], [3])


def keeping(values_N: FloatArray, held: Sequence[int]) -> FakePeer:
    """A peer that can take back its last commit."""
    return peer(LAYOUT, values_N, held, previous=Previous(np.zeros(N, np.float32), np.zeros(N, np.float32)))


def initial_weights(seed: int) -> FloatArray:
    """Initial weights."""
    return np.random.default_rng(seed).normal(0, 1, N).astype(np.float32)


def swarm(held: Sequence[Sequence[int]] = HELD, seed: int = 0) -> list[FakePeer]:
    """Peers that have committed a first round."""
    peers = [keeping(initial_weights(seed), experts) for experts in held]
    work(peers, seed + 1)
    hold_round(peers, 1)
    return peers


def work(peers: Sequence[FakePeer], seed: int) -> None:
    """Each peer trains what it trains."""
    rng = np.random.default_rng(seed)
    for each in peers:
        for block in LAYOUT.trained_blocks(each.held):
            each.live_N[block.start : block.stop] += rng.normal(0, 0.1, block.size).astype(np.float32)


def trained_weights(each: FakePeer) -> FloatArray:
    """The live weights that a peer trains."""
    return np.concatenate([each.live_N[b.start : b.stop] for b in LAYOUT.trained_blocks(each.held)])


def references(peers: Sequence[FakePeer]) -> list[FloatArray]:
    """Copies of their references."""
    return [each.reference.values_N.copy() for each in peers]


def vote(peers: Sequence[FakePeer], *votes: bool | None) -> None:
    """Sets what they say about the last commit."""
    for each, rose in zip(peers, votes, strict=True):
        each.loss_rose = rose


def assert_agreed(peers: Sequence[FakePeer]) -> None:
    """Their references are the same, bit for bit."""
    assert len({each.reference.digest for each in peers}) == 1
    assert len({each.reference.values_N.tobytes() for each in peers}) == 1


def test_all_go_back_to_the_reference_before_the_commit_and_to_their_own_work_in_it() -> None:
    peers = swarm()
    work(peers, 2)
    before_N, own = references(peers)[0], [trained_weights(each) for each in peers]
    hold_round(peers, 2)
    assert not np.array_equal(peers[0].reference.values_N, before_N)
    work(peers, 3)  # after the commit: dropped
    vote(peers, True, True, True, False)
    plan, states = hold_round(peers, 3)
    assert plan.taken_back is not None
    assert plan.taken_back.round == 2
    assert_agreed(peers)
    assert np.array_equal(peers[0].reference.values_N, before_N)
    assert set(peers[0].reference.versions) == {3}
    for each, own_N in zip(peers, own, strict=True):
        assert np.array_equal(trained_weights(each), own_N)
        assert each.reports[-1].taken_back == 2
        assert not each.reports[-1].keeps_work
    assert sum(state.payload_bytes_sent for state in states) == 0


def test_the_own_work_of_the_round_that_was_taken_back_counts_in_the_next() -> None:
    peers = swarm()
    work(peers, 2)
    before_N, own = references(peers)[0], [each.live_N.copy() for each in peers]
    hold_round(peers, 2)
    vote(peers, True, True, True, True)
    hold_round(peers, 3)
    vote(peers, None, None, None, None)
    plan, _ = hold_round(peers, 4)
    assert plan.taken_back is None
    assert_agreed(peers)
    shared = slice(LAYOUT.blocks[0].start, LAYOUT.blocks[0].stop)
    mean_N = before_N[shared] + np.mean([live_N[shared] - before_N[shared] for live_N in own], axis=0)
    assert np.allclose(peers[0].reference.values_N[shared], mean_N, atol=1e-6)
    for expert, live_N in enumerate(own):
        block = LAYOUT.expert_block(expert)
        where = slice(block.start, block.stop)
        assert np.allclose(peers[0].reference.values_N[where], live_N[where], atol=1e-6)


@pytest.mark.parametrize(
    ("votes", "taken_back"),
    [
        ((True, True, True, True), True),
        ((True, True, True, False), True),
        ((True, True, True, None), True),
        ((True, True, False, False), False),
        ((True, True, None, None), False),
        ((True, None, None, None), False),
        ((None, None, None, None), False),
        ((False, False, False, False), False),
    ],
)
def test_more_than_half_of_the_members_decide(votes: tuple[bool | None, ...], taken_back: bool) -> None:
    peers = swarm()
    vote(peers, *votes)
    work(peers, 2)
    plan, _ = hold_round(peers, 2)
    assert (plan.taken_back is not None) == taken_back
    assert_agreed(peers)


@pytest.mark.parametrize("number", [1, 2])
def test_one_peer_cannot_take_back_a_commit(number: int) -> None:
    peers = swarm(HELD[:number])
    vote(peers, *[True, False][:number])
    work(peers, 2)
    assert hold_round(peers, 2)[0].taken_back is None


def test_strangers_have_no_say() -> None:
    """Trusted are those whom the others vouch for: three identities without work outvote nobody."""
    peers = swarm(([0], [1], [], [], []))
    names = [each.peer_id for each in identities(5)]
    for index in (0, 1):
        peers[index].vouched = vouchers({}, [name for name in names[:2] if name != names[index]])
    work(peers, 2)
    vote(peers, False, False, True, True, True)
    assert hold_round(peers, 2)[0].taken_back is None
    vote(peers, True, True, False, False, False)
    assert hold_round(peers, 3)[0].taken_back is not None


def test_strangers_do_not_decide_what_is_restored() -> None:
    """Head and previous digest are no secret: whoever states them may still lie about the versions."""
    peers = swarm(([0], [1], [], [], []))
    names = [each.peer_id for each in identities(5)]
    work(peers, 2)
    before_N = references(peers)[0]
    hold_round(peers, 2)
    for index in (0, 1):
        peers[index].vouched = vouchers({}, [name for name in names[:2] if name != names[index]])
    for each in peers[2:]:
        each.reference.adopt(each.reference.round, [1] * len(LAYOUT.blocks))
        each.previous._after = each.reference.digest  # it says that it has what was before
    vote(peers, True, True, True, True, True)
    assert hold_round(peers, 3)[0].taken_back is not None
    for each in peers[:2]:
        assert np.array_equal(each.reference.values_N, before_N)


def test_the_vote_of_a_member_that_was_sent_other_results_stands_alone() -> None:
    """A reducer that harms one member only, and votes with it, would otherwise decide among three."""
    peers = swarm(HELD[:3])
    work(peers, 2)
    hold_round(peers, 2)
    victim = peers[1]
    victim.reference.values_N[:50] += 1.0
    victim.reference.finish(2, [(0, 2)])
    victim.previous._after = victim.reference.digest
    vote(peers, True, True, False)
    assert hold_round(peers, 3)[0].taken_back is None


def test_in_a_return_no_expert_changes_hands_and_nobody_has_left() -> None:
    """Their holders' work is in no reference, and who wanted to leave needs another round."""
    peers = swarm()
    vote(peers, True, True, True, True)
    peers[0].leaving, peers[3].room = True, 3
    group = form(peers, 2)
    plan = make_plan(group, LAYOUT, 64)
    assert plan.taken_back is not None
    held = reassign_group(group, plan, LAYOUT.num_experts, Rules())
    assert all({*member.statement.held} <= {*held[member.peer_id]} for member in group.members)
    vote(peers, None, None, None, None)
    group = form(peers, 2)
    held = reassign_group(group, make_plan(group, LAYOUT, 64), LAYOUT.num_experts, Rules())
    assert group.members[0].peer_id not in held


def test_the_last_round_of_a_run_takes_nothing_back() -> None:
    peers = swarm()
    vote(peers, True, True, True, True)
    assert make_plan(form(peers, 2), LAYOUT, 64, may_return=False).taken_back is None


def test_one_that_pretends_to_have_trained_apart_unites_nothing() -> None:
    """Commits that bring sides of a partition together are not judged."""
    peers = swarm(([0], [1], [2], [3], []))
    names = [each.peer_id for each in identities(5)]
    for index in range(4):
        peers[index].vouched = vouchers({}, [name for name in names[:4] if name != names[index]])
    alone = peers[4]
    alone.reference.values_N[:] += 1.0
    alone.reference.finish(1, [(index, 1) for index in range(len(LAYOUT.blocks))])
    alone.lineage = Lineage({1: b"elsewher"})
    work(peers, 2)
    plan, _ = hold_round(peers, 2)
    assert any(c.form is Form.FULL and c.member == 4 for block in plan.blocks.values() for c in block.contributions)
    assert not plan.unites
    assert not peers[0].reports[-1].unites


def test_two_halves_unite() -> None:
    peers = swarm()
    for seed, side in ((2, peers[:2]), (12, peers[2:])):
        work(side, seed)
        hold_round(side, 2)
    work(peers, 3)
    assert hold_round(peers, 3)[0].unites


def test_votes_on_different_commits_do_not_add_up() -> None:
    """Two members are from the other side of a partition."""
    peers = swarm()
    for seed, side in ((2, peers[:2]), (12, peers[2:])):
        work(side, seed)
        # Groups of two have other ids than groups of four.
        hold_round(side, 2)
    vote(peers, True, True, True, True)
    work(peers, 3)
    assert hold_round(peers, 3)[0].taken_back is None


def test_a_member_that_has_kept_nothing_gets_the_values_from_another() -> None:
    peers = swarm()
    peers[3].previous = Previous()
    work(peers, 2)
    before_N = references(peers)[0]
    hold_round(peers, 2)
    vote(peers, True, True, True, None)
    work(peers, 3)
    plan, states = hold_round(peers, 3)
    assert plan.taken_back is not None
    assert plan.taken_back.keepers == {0, 1, 2}
    assert_agreed(peers)
    assert np.array_equal(peers[3].reference.values_N, before_N)
    assert np.array_equal(peers[3].live_N, before_N)  # nobody else has its work
    assert sum(state.payload_bytes_sent for state in states) == 4 * N


def test_a_member_that_missed_the_commit_keeps_its_work() -> None:
    peers = swarm()
    work(peers, 2)
    before_N, own_N = references(peers)[0], trained_weights(peers[3])
    hold_round(peers[:3], 2)
    vote(peers, True, True, True, None)
    plan, states = hold_round(peers, 3)
    assert plan.taken_back is not None
    assert plan.taken_back.keepers == {0, 1, 2, 3}
    assert_agreed(peers)
    assert np.array_equal(peers[3].reference.values_N, before_N)
    assert np.array_equal(trained_weights(peers[3]), own_N)
    assert [each.reports[-1].keeps_work for each in peers] == [False, False, False, True]
    assert sum(state.payload_bytes_sent for state in states) == 0


def test_a_member_that_missed_the_return_heals_in_the_next_round_and_its_work_counts() -> None:
    peers = swarm()
    work(peers, 2)
    before_N = references(peers)[0]
    hold_round(peers, 2)
    after_N = references(peers)[3]
    vote(peers, True, True, True, None)
    hold_round(peers[:3], 3)
    work(peers[3:], 4)
    late_N = peers[3].live_N - after_N
    vote(peers, None, None, None, None)
    for each in peers[:3]:
        each.tokens, each.live_N[:] = 0, each.reference.values_N
    hold_round(peers, 4)
    assert_agreed(peers)
    shared = slice(LAYOUT.blocks[0].start, LAYOUT.blocks[0].stop)
    assert np.allclose(peers[0].reference.values_N[shared], (before_N + late_N)[shared], atol=1e-6)


def test_a_return_is_not_taken_back() -> None:
    peers = swarm()
    vote(peers, True, True, True, True)
    assert hold_round(peers, 2)[0].taken_back is not None
    assert [each.previous.digest(each.reference) for each in peers] == [b""] * 4
    assert hold_round(peers, 3)[0].taken_back is None
    assert_agreed(peers)


def test_an_expert_adopted_after_the_commit_begins_at_the_reference() -> None:
    peers = swarm()
    work(peers, 2)
    before_N = references(peers)[0]
    hold_round(peers, 2)
    peers[0].held, peers[1].held = (0, 1), ()
    vote(peers, True, True, True, True)
    hold_round(peers, 3)
    assert_agreed(peers)
    block = LAYOUT.expert_block(1)
    where = slice(block.start, block.stop)
    assert np.array_equal(peers[0].live_N[where], before_N[where])


def test_experts_that_the_commit_did_not_change_stay_as_they_are() -> None:
    """A round without experts changes the shared layers only."""
    peers = swarm()
    work(peers, 2)
    hold_round(peers, 2, experts=False)
    kept = [trained_weights(each)[LAYOUT.blocks[0].size :] for each in peers]
    vote(peers, True, True, True, True)
    hold_round(peers, 3)
    assert_agreed(peers)
    assert peers[0].reference.versions == (3, 1, 1, 1, 1)
    for each, kept_N in zip(peers, kept, strict=True):
        assert np.array_equal(trained_weights(each)[LAYOUT.blocks[0].size :], kept_N)


def test_missing_values_of_a_return_come_in_the_next_round() -> None:
    peers = swarm()
    peers[3].previous = Previous()
    work(peers, 2)
    before_N = references(peers)[0]
    hold_round(peers, 2)
    vote(peers, True, True, True, None)
    hold_round(peers, 3, lose_result=lambda receiver, frame: frame.part % 2 == 0)
    assert peers[3].reference.digest != peers[0].reference.digest
    vote(peers, None, None, None, None)
    for each in peers:
        each.tokens, each.live_N[:] = 0, each.reference.values_N
    hold_round(peers, 4)
    assert_agreed(peers)
    assert np.array_equal(peers[3].reference.values_N, before_N)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), codec=st.sampled_from(["fp16", "int4"]))
def test_whoever_misses_what_all_agree_in_the_end(data: st.DataObject, codec: str) -> None:
    """Members come and go, some keep nothing, and votes are arbitrary."""
    peers, first = swarm(seed=7), keeping(initial_weights(7), [])
    seen = {first.reference.digest: first.reference.values_N.tobytes()}
    for index in data.draw(st.sets(st.integers(0, 3), max_size=2)):
        peers[index].previous = Previous()
    for number in range(2, 7):
        seen |= {each.reference.digest: each.reference.values_N.tobytes() for each in peers}
        group = [peers[i] for i in sorted(data.draw(st.sets(st.integers(0, 3), min_size=2)))]
        work(group, number)
        vote(
            group,
            *data.draw(st.lists(st.sampled_from([True, True, False]), min_size=len(group), max_size=4))[: len(group)],
        )
        plan, _ = hold_round(group, number, codec=codec)
        if plan.taken_back is not None:
            for index in plan.taken_back.keepers:
                assert group[index].reference.values_N.tobytes() == seen[plan.taken_back.before]
    vote(peers, None, None, None, None)
    work(peers, 7)
    hold_round(peers, 7, codec=codec)
    assert_agreed(peers)


def test_what_is_kept_is_forgotten_when_the_reference_changes() -> None:
    (each,) = swarm(HELD[:1])
    assert each.previous.digest(each.reference)
    each.reference.finish(5, [(0, 5)])  # as after a download
    assert each.previous.digest(each.reference) == b""


def test_a_peer_without_room_keeps_nothing() -> None:
    one = peer(LAYOUT, np.zeros(N, np.float32), [0], lineage=Lineage({}))
    work([one], 1)
    hold_round([one], 1)
    assert one.previous.digest(one.reference) == b""
