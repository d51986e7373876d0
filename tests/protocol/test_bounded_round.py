"""Whole rounds with members that go too far: what counts of it, and that honest members do not notice."""

from __future__ import annotations

import numpy as np
import pytest

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.averaging.clipping import MAX_ROUNDS_APART
from spes_swarm.protocol.rounds import round_faults
from spes_swarm.protocol.rounds.frames import Frame
from spes_swarm.protocol.rounds.plan import BlockPlan, Form, make_plan
from spes_swarm.protocol.rounds.results import excessive_results
from spes_swarm.protocol.rounds.round_state import RoundState
from spes_swarm.protocol.rounds.statement import MAX_RMS
from spes_swarm.protocol.rounds.track_record import TrackRecords
from tests.helpers.bounded_rounds import (
    CLIP,
    HOLDINGS,
    HOSTILE,
    LARGE,
    STEP,
    add_noise,
    moved,
    rms,
    states_of,
    swarm,
    train,
    trained,
)
from tests.helpers.rounds import BOUNDED, KEY, FakePeer, form, hold_round, open_round, small_layout
from tests.helpers.signing import signed_result, signed_roots


@pytest.mark.parametrize("loud", [3 * STEP, 0.9, 300.0])
def test_noise_moves_the_reference_no_further_than_an_honest_member_can(loud: float) -> None:
    peers = swarm(LARGE, HOLDINGS)
    before_N = peers[0].reference.values_N.copy()
    train(peers[:HOSTILE])
    add_noise(peers[HOSTILE], loud)
    peers[HOSTILE].tokens = 2**47
    peers[HOSTILE].routed = (2**47, 2**47)
    hold_round(peers, 1, codec="fp16", part_elements=1024, clip=CLIP)
    assert len({p.reference.digest for p in peers}) == 1
    assert moved(before_N, peers[0], 0) <= STEP
    for block in (1, 2, 3, 4):
        assert moved(before_N, peers[0], block) <= 1.05 * STEP
    for block in (5, 6):  # which the noisy member alone holds, and claims twice the work of the others
        assert moved(before_N, peers[0], block) <= 2 * STEP * 1.05


def test_without_bounds_the_same_noise_decides_everything() -> None:
    """So that the test above is one of the bounds."""
    peers = swarm(LARGE, HOLDINGS)
    before_N = peers[0].reference.values_N.copy()
    train(peers[:HOSTILE])
    add_noise(peers[HOSTILE], 0.9)
    peers[HOSTILE].tokens = 2**47
    hold_round(peers, 1, codec="fp16", part_elements=1024)
    assert moved(before_N, peers[0], 0) > 20 * STEP


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["fp32", "fp16"])
def test_honest_members_do_not_notice_the_bounds(codec: str) -> None:
    references = []
    for clip in (0.0, CLIP):
        peers = swarm(LARGE, HOLDINGS)
        for number in (1, 2, 3):
            train(peers, seed=number)
            _, states = hold_round(peers, number, codec=codec, part_elements=1024, clip=clip)
            assert not any(state.reduction.clipped() for state in states)
        references.append(peers[0].reference.values_N)
    np.testing.assert_allclose(references[1], references[0], atol=1e-7)


def begin(peers: list[FakePeer], usual_rms: float) -> None:
    """A round that is called early: one peer has done its usual work, the others a step or two.

    First steps go almost the same way for all; what comes of many steps has little to do with it.
    """
    for number, who in enumerate(peers):
        who.usual_rms = usual_rms, usual_rms
        for block in trained(who):
            common_N = np.random.default_rng(block.index).normal(0, 1, block.size)
            own_N = np.random.default_rng((1 + number, 7 + block.index)).normal(0, 1, block.size)
            learnt_N = STEP * (0.2 * common_N + 0.98 * own_N) if number == 0 else STEP / 10 * (common_N + own_N) / 1.4
            who.live_N[block.start : block.stop] += learnt_N.astype(np.float32)


def test_whoever_has_worked_while_the_others_have_only_begun_counts_whole() -> None:
    peers = swarm(LARGE, HOLDINGS[:4])
    peers[0].tokens = 10_000
    begin(peers, usual_rms=STEP)
    plan, states = hold_round(peers, 1, part_elements=1024, clip=CLIP)
    assert plan.blocks[0].stretch == pytest.approx(8, rel=0.1)
    assert not any(state.reduction.clipped() for state in states)


@pytest.mark.slow
@pytest.mark.parametrize(("usual_rms", "stretch"), [(0.0, 1.0), (STEP, 1.0), (1.2 * STEP, 1.0), (4 * STEP, 3.2)])
def test_a_round_that_is_hardly_shorter_than_usual_is_a_usual_one(usual_rms: float, stretch: float) -> None:
    peers = swarm(LARGE, HOLDINGS[:4])
    train(peers)
    for who in peers:
        who.usual_rms = usual_rms, usual_rms
    plan, _ = states_of(peers)
    assert plan.blocks[0].stretch == pytest.approx(stretch, rel=0.1)


def test_measured_by_those_who_have_only_begun_it_would_be_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above is one of what is remembered."""
    monkeypatch.setattr(BlockPlan, "stretch", 1.0)
    peers = swarm(LARGE, HOLDINGS[:4])
    peers[0].tokens = 10_000
    begin(peers, usual_rms=STEP)
    _, states = hold_round(peers, 1, part_elements=1024, clip=CLIP)
    assert any(state.reduction.clipped() for state in states[1:])


def test_noise_is_shortened_although_the_others_have_only_begun() -> None:
    peers = swarm(LARGE, HOLDINGS)
    before_N = peers[0].reference.values_N.copy()
    begin(peers[1:HOSTILE], usual_rms=STEP)
    add_noise(peers[HOSTILE], 0.9)
    hold_round([*peers[1:HOSTILE], peers[HOSTILE]], 1, part_elements=1024, clip=CLIP)
    assert moved(before_N, peers[1], 0) <= STEP


@pytest.mark.parametrize(("warmup_rounds", "named"), [(0, True), (1, False)])
def test_while_the_rate_rises_ten_steps_are_a_hundred_times_as_long_as_one(warmup_rounds: int, named: bool) -> None:
    peers = swarm(LARGE, HOLDINGS[:4])
    train(peers[1:])
    for block in trained(peers[0]):
        where = slice(block.start, block.stop)
        peers[0].live_N[where] += 100 * (peers[1].live_N - peers[1].reference.values_N)[where]
    peers[0].tokens = 10_000
    group = form(peers, 1)
    plan = make_plan(group, LARGE, 1024, clip=CLIP, warmup_rounds=warmup_rounds)
    assert bool(round_faults.clipped(plan, {}, new={0, 1, 2, 3})) == named


def test_an_expert_that_was_cut_down_does_not_come_back_longer() -> None:
    """Its only holder goes on from what counted, not from its own weights."""
    peers = swarm(LARGE, HOLDINGS)
    train(peers[:HOSTILE])
    add_noise(peers[HOSTILE], 0.9)
    hold_round(peers, 1, part_elements=1024, clip=CLIP)
    assert np.array_equal(peers[HOSTILE].live_N, peers[HOSTILE].reference.values_N)


def refusal(state: RoundState, frame: Frame) -> str:
    """The kind of fault for which the hostile member's contribution is refused, empty if it is not."""
    try:
        state.reduction.accept(HOSTILE, frame)
    except ProtocolError as exc:
        return exc.kind
    return ""


def test_more_than_was_stated_is_refused() -> None:
    peers = swarm(LARGE, HOLDINGS)
    train(peers)
    plan, states = states_of(peers)
    add_noise(peers[HOSTILE], 5 * STEP)  # after the statement
    kinds = [refusal(states[0], states[HOSTILE].contributions.push_frame(part)) for part in plan.pushes(HOSTILE, 0)]
    assert set(kinds) <= {"", "norm"}
    assert kinds.count("norm") > kinds.count("")
    assert HOSTILE in states[0].reduction.refused
    # An honest one passes, all of it.
    for part in plan.pushes(1, 0):
        states[0].reduction.accept(1, states[1].contributions.push_frame(part))


def test_a_statement_of_any_length_is_dealt_with() -> None:
    """The largest that passes the schema must not make anybody's arithmetic overflow."""
    peers = swarm(LARGE, HOLDINGS)
    train(peers)
    peers[HOSTILE].live_N *= np.float32(1e31)
    plan, states = states_of(peers)
    assert plan.blocks[0].contributions[HOSTILE].stated_rms == MAX_RMS
    for part in plan.pushes(HOSTILE, 0):
        assert refusal(states[0], states[HOSTILE].contributions.push_frame(part)) in ("norm", "nonfinite")


@pytest.mark.parametrize("length", [0.9, 10.0])
def test_results_longer_than_their_contributions_are_dropped_by_all(length: float) -> None:
    peers = swarm(LARGE, HOLDINGS)
    train(peers)
    plan, states = states_of(peers)
    before_N = peers[0].reference.values_N.copy()
    receivers = states[:HOSTILE]
    for part in plan.parts:
        if part.reducer == HOSTILE:
            values_N = np.random.default_rng(part.index).normal(0, length * STEP, part.size).astype(np.float32)
            payload = states[0].codec.encode(values_N)
            frame = signed_result(states[HOSTILE], part, payload, signed_roots(states, part))
            for state in receivers:
                state.results.store(frame)
    theirs = {part.index for part in plan.parts if part.reducer == HOSTILE}
    faults = [state.results.refuse_excessive() for state in receivers]
    dropped = [theirs - state.results.known.keys() for state in receivers]
    assert all(who == HOSTILE and error.kind == "norm" for found in faults for who, error in found)
    assert all(same == dropped[0] for same in dropped)
    assert all(set(state.results.excessive) == same for state, same in zip(receivers, dropped, strict=True))
    if length < 1.0:
        assert not dropped[0]
        assert not any(faults)
        return
    assert all(faults)
    for state in receivers:
        state.commit()
    for block in LARGE.blocks:
        mine = [part for part in plan.parts if part.reducer == HOSTILE and part.block == block.index]
        energy = sum(
            rms(peers[0].reference.values_N[p.start : p.start + p.size] - before_N[p.start : p.start + p.size]) ** 2
            * p.size
            for p in mine
        )
        assert energy <= (1.05 * STEP) ** 2 * block.size


def test_what_cannot_be_known_is_not_judged() -> None:
    """A member with another base gets full values: how far they are away says nothing."""
    peers = swarm(LARGE, HOLDINGS)
    train(peers)
    hold_round(peers[:4], 1, part_elements=1024)
    late = peers[HOSTILE]
    train(peers, seed=2)
    plan, _ = states_of(peers, 2)
    huge = {part.index: (frozenset({0, 1}), 1e9) for part in plan.parts}
    assert HOSTILE not in plan.blocks[0].in_base
    assert not [excess for excess in excessive_results(plan, HOSTILE, huge) if excess.block == 0]
    assert [excess for excess in excessive_results(plan, 0, huge) if excess.block == 0]
    assert late.reference.versions[0] == 0


def forked(apart: float) -> list[FakePeer]:
    """Four members with one base, and one that says it comes from the other side of a split."""
    peers = swarm(LARGE, HOLDINGS)
    for who in peers:
        who.reference.finish(1, [(0, 1)])
    peers[HOSTILE].reference.values_N[:] += np.random.default_rng(9).normal(0, apart, LARGE.num_elements)
    peers[HOSTILE].reference.finish(1, [(0, 1)])
    peers[HOSTILE].live_N[:] = peers[HOSTILE].reference.values_N
    train(peers)
    return peers


def test_full_values_are_bounded_by_the_rounds_that_a_split_may_last() -> None:
    peers = forked(apart=1.0)
    before_N = peers[0].reference.values_N.copy()
    plan, _ = hold_round(peers, 2, part_elements=1024, clip=CLIP)
    assert next(c for c in plan.blocks[0].contributions if c.member == HOSTILE).form is Form.FULL
    # A fifth of it at most, and where three honest members or more contribute what pulls aside is cut down anyway.
    assert moved(before_N, peers[0], 0) <= CLIP * (1 + MAX_ROUNDS_APART) * STEP / 5 + STEP


def accepted_from_afar(last_commit: int | None, apart: float = 1.0) -> list[tuple[FloatArray, FloatArray, float]]:
    """What a member with another base pushes to peer 0 in round 2, what counts of it, and a round's limit on its RMS.

    Args:
        last_commit: the round of the last commit with it.
        apart: RMS of the difference between the bases.
    """
    peers = forked(apart)
    plan, states = states_of(peers, 2)
    met = TrackRecords()
    if last_commit is not None:
        met.committed(last_commit, [(states[0].group.members[HOSTILE].peer_id, 1.0)], set())
    state = open_round(
        states[0].group, plan, 0, peers[0].reference, peers[0].live_N, states[0].codec, BOUNDED, KEY, tracks=met
    )
    counted = []
    for part, contribution in plan.contributed(HOSTILE, 0):
        state.reduction.accept(HOSTILE, states[HOSTILE].contributions.push_frame(part))
        where = slice(part.start, part.start + part.size)
        sent_N = peers[HOSTILE].live_N[where] - peers[0].reference.values_N[where]
        differences = (
            state.reduction._accumulators[part.index].differences if part.index in state.reduction._accumulators else {}
        )
        if HOSTILE in differences:
            counted.append((sent_N, differences[HOSTILE], contribution.limit_rms))
    assert counted
    return counted


def test_who_has_just_committed_with_us_cannot_come_from_far_away() -> None:
    for _, counts_N, limit_rms in accepted_from_afar(1):
        assert limit_rms <= CLIP * STEP * 1.05
        assert rms(counts_N) == pytest.approx(2 * limit_rms, rel=1e-4)


@pytest.mark.parametrize("last_commit", [None, 2, 9, 1000])
def test_of_who_has_committed_none_or_a_later_round_with_us_the_direction_counts(last_commit: int | None) -> None:
    """After a split has healed, the swarm may be at an earlier round than the last one that the two have committed."""
    for sent_N, counts_N, limit_rms in accepted_from_afar(last_commit):
        assert rms(counts_N) == pytest.approx((1 + MAX_ROUNDS_APART) * limit_rms, rel=1e-4)
        assert float(sent_N @ counts_N) > 0


def test_values_from_near_by_count_as_they_are() -> None:
    for sent_N, counts_N, limit_rms in accepted_from_afar(1, apart=STEP / 100):
        assert rms(sent_N) < limit_rms
        assert np.array_equal(sent_N, counts_N)


# Weights.


def test_what_most_members_vouch_for_weighs_more() -> None:
    peers = swarm(LARGE, HOLDINGS)
    peers[0].tokens = 100_000
    train(peers)
    alone, _ = states_of(peers, 17)
    assert alone.blocks[0].contributions[0].weight == 2 * 1000
    fast = form(peers, 17).members[0].peer_id
    tracks = TrackRecords()
    for number in range(16):
        tracks.committed(number, [(fast, 100.0)], {fast})
    for who in peers[1:4]:
        who.vouched = tracks.to_vouchers(16)
    vouched, _ = states_of(peers, 17)
    assert vouched.blocks[0].contributions[0].weight == 4 * 1000
    peers[3].vouched = b""
    half, _ = states_of(peers, 17)
    assert half.blocks[0].contributions[0].weight == 2 * 1000


def test_a_commit_tells_whose_claims_are_borne_out() -> None:
    peers = swarm(LARGE, HOLDINGS)
    for who in peers[:2]:
        who.tokens = 8_000
    train(peers)
    peers[0].live_N += 3 * (peers[0].live_N - peers[0].reference.values_N)  # four times as far: eight times the steps
    add_noise(peers[1], 8 * STEP)
    _, states = hold_round(peers, 1, part_elements=1024, clip=CLIP)
    tracks = TrackRecords()
    for number in range(16):
        states[2].record_commit(tracks)
        assert tracks.rounds_since("nobody", number) is None
    ids = [member.peer_id for member in states[2].group.members]
    assert tracks.earned(ids[0]) == 4.0
    assert tracks.earned(ids[1]) == 2.0


@pytest.mark.parametrize(("tokens", "times_as_long", "earned"), [(8_000, 4, 4.0), (8_000, 40, 2.0), (10**8, 4, 2.0)])
def test_claims_that_the_length_contradicts_or_that_nobody_could_work_off_earn_nothing(
    tokens: int, times_as_long: int, earned: float
) -> None:
    peers = swarm(LARGE, HOLDINGS)
    peers[0].tokens = tokens
    train(peers)
    peers[0].live_N += (times_as_long - 1) * (peers[0].live_N - peers[0].reference.values_N)
    _, states = hold_round(peers, 1, part_elements=1024, clip=CLIP)
    tracks = TrackRecords()
    for _ in range(16):
        states[2].record_commit(tracks)
    assert tracks.earned(states[2].group.members[0].peer_id) == earned


# Healing.


def test_a_block_that_was_healed_in_part_stays_behind() -> None:
    """It has neither the old values nor the new ones. With its old version it is late: in the next round it is healed
    whole, and contributes only its own work. With the new version it would pass for the other side of a split."""
    layout = small_layout(2, shared=400)
    peers = swarm(layout, [[0], [1], [0]])
    late, others = peers[0], peers[1:]
    hold_round(peers, 1)
    for number in (2, 3):
        train(others, seed=number)
        hold_round(others, number)
    train(peers, seed=4)
    lost = iter([True, False] * 1000)
    _, states = hold_round(peers, 4, lose_result=lambda receiver, frame: receiver == 0 and next(lost))
    missed = {states[0].plan.parts[index].block for index in states[0].results.missing()}
    assert 0 in missed
    assert late.reports[-1].parts_missing > 0
    behind, ahead = late.reference, others[0].reference
    assert behind.digests[0] != ahead.digests[0]
    assert behind.versions[0] < ahead.versions[0]
    work_N = np.full(400, 0.25, np.float32)
    late.live_N[:400] = behind.values_N[:400] + work_N
    for who in others:
        who.live_N[:400] = who.reference.values_N[:400]
    expected_N = ahead.values_N[:400] + work_N / 3
    plan, _ = hold_round(peers, 5)
    assert plan.blocks[0].contributions[0].form is Form.DELTA
    for who in peers:
        np.testing.assert_allclose(who.reference.values_N[:400], expected_N, atol=1e-6)
    assert len({who.reference.digest for who in peers}) == 1
