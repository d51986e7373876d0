"""What one member keeps of a round: who still wants something of it, what came, what is reported, what is named."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import ProtocolError
from spes_swarm.config.run import RunConfig
from spes_swarm.network.round.deadlines import ExchangeLimits
from spes_swarm.protocol.averaging.commitments import MAX_BATCH, Opening
from spes_swarm.protocol.averaging.signed_result import decode
from spes_swarm.protocol.consensus.codec import EXACT, Codec, get_codec
from spes_swarm.protocol.consensus.reference import Reference
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.protocol.rounds.outcome import Bounds
from spes_swarm.protocol.rounds.plan import Form, Part, Plan, make_plan
from spes_swarm.protocol.rounds.reducing import Reduction
from spes_swarm.protocol.rounds.results import Averaging
from spes_swarm.protocol.rounds.round_state import RoundState
from spes_swarm.protocol.rounds.track_record import TrackRecords
from tests.helpers.rounds import BOUNDED, KEY, UNBOUNDED, FakePeer, complete_all, form, open_round, peer, small_layout
from tests.helpers.signing import resigned_contribution, signed_result, signed_roots
from tests.helpers.swarm import TINY_RUN, merged

LAYOUT = small_layout(3)
HOLDINGS = ([0, 1], [1], [2])


def trained_peers(seed: int = 0, **changes: object) -> list[FakePeer]:
    """Three peers with one base, of which each has trained what it may; the last one is changed."""
    rng = np.random.default_rng(seed)
    start_N = rng.normal(0, 0.1, LAYOUT.num_elements).astype(np.float32)
    peers = [peer(LAYOUT, start_N, held, tokens=100, routed=(100,) * len(held)) for held in HOLDINGS]
    for who in peers:
        for index in (0, *(1 + expert for expert in who.held)):
            block = LAYOUT.blocks[index]
            who.live_N[block.start : block.stop] += rng.normal(0, 0.01, block.size).astype(np.float32)
    peers[-1] = dataclasses.replace(peers[-1], **changes)  # type: ignore[arg-type]
    return peers


def begun(
    peers: list[FakePeer], bounds: Bounds = UNBOUNDED, number: int = 1, clip: float = 0.0
) -> tuple[Plan, list[RoundState]]:
    group = form(peers, number)
    plan = make_plan(group, LAYOUT, 32, clip=clip)
    codec = get_codec("fp32")
    return plan, [open_round(group, plan, i, p.reference, p.live_N, codec, bounds, KEY) for i, p in enumerate(peers)]


def contribute(plan: Plan, states: list[RoundState]) -> None:
    for sender in states:
        for target in states:
            for part in plan.pushes(sender.me, target.me):
                target.reduction.accept(sender.me, sender.contributions.push_frame(part))


def distribute(states: list[RoundState]) -> None:
    for receiver in states:
        for index, part in receiver.results.wanted.items():
            if part.reducer != receiver.me:
                frame = states[part.reducer].results.frame(index, receiver.me)
                assert frame is not None
                receiver.results.store(frame)


def test_a_contribution_that_is_being_checked_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, states = begun(trained_peers())
    reduction, checked = states[0].reduction, Reduction._checked

    def check_slowly(self: Reduction, *args: Any) -> Any:
        owed = reduction.outstanding()[1]
        assert part.index not in owed
        assert reduction.give_up(1) == len(owed) > 0
        return checked(self, *args)

    part = plan.pushes(1, 0)[0]
    monkeypatch.setattr(Reduction, "_checked", check_slowly)
    reduction.accept(1, states[1].contributions.push_frame(part))
    monkeypatch.undo()
    reduction.give_up(2)
    complete_all(reduction)
    assert 1 in states[0].results.known[part.index].included


def test_what_is_averaged_while_a_commit_is_under_way_is_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = trained_peers()
    plan, states = begun(peers)
    contribute(plan, states)
    distribute(states)
    state, reference, live_N = states[0], peers[0].reference, peers[0].live_N
    late = next(part for part in state.results.wanted.values() if part.reducer == 0 and part.block == 0)
    result, old_N, old_live_N = state.results.known.pop(late.index), reference.values_N.copy(), live_N.copy()
    keep = state.previous.keep

    def keep_and_average(*arguments: Any) -> None:
        keep(*arguments)
        state.results.known[late.index] = result

    monkeypatch.setattr(state.previous, "keep", keep_and_average)
    applied = state.apply()
    assert late.index in state.results.known
    assert state.finish(applied).parts_missing == 1
    where = slice(late.start, late.start + late.size)
    np.testing.assert_array_equal(reference.values_N[where], old_N[where])
    np.testing.assert_array_equal(live_N[where], old_live_N[where])
    for part in plan.parts:
        of_part = slice(part.start, part.start + part.size)
        assert np.array_equal(reference.values_N[of_part], old_N[of_part]) == (part == late)
    assert reference.versions == (1, 1, 1, 1)
    assert reference.digests == Reference(LAYOUT, reference.values_N).digests


def with_a_straggler() -> tuple[RoundState, Part, FloatArray]:
    """The round of a reducer, a part of which one member needs full values, and these."""
    peers = trained_peers()
    for who in peers:
        who.reference.finish(1, [(0, 1)])
    peers[2].reference.values_N[:10] += 1.0
    peers[2].reference.finish(1, [(0, 1)])
    plan, states = begun(peers, number=2)
    contribute(plan, states)
    distribute(states)
    part = next(p for p in plan.parts if p.reducer == 0 and plan.block_of(p).result_form(2) is Form.FULL)
    return states[0], part, states[0].results.new_values(part, states[0].results.known[part.index]).copy()


def full_values(state: RoundState, part: Part) -> FloatArray:
    frame = state.results.frame(part.index, 2)
    assert frame is not None
    assert frame.form is Form.FULL
    return EXACT.decode(frame.payload, part.size)


def test_full_values_are_encoded_again_if_a_commit_has_changed_them_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the difference would have been added to values that contain it."""
    state, part, new_N = with_a_straggler()
    codec_of_result, asked = Averaging.codec_of_result, list[int]()

    def commit_first(self: Averaging, which: Part) -> Codec:
        asked.append(which.index)
        if len(asked) == 1:
            state.apply()
        return codec_of_result(self, which)

    monkeypatch.setattr(Averaging, "codec_of_result", commit_first)
    np.testing.assert_array_equal(full_values(state, part), new_N)
    assert asked[0] == part.index
    assert part.index in state.results.applied


def test_full_values_wait_while_a_commit_changes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    state, part, new_N = with_a_straggler()
    where = slice(part.start, part.start + part.size)
    half = part.start + part.size // 2
    state.results.applying = part.index
    state.reference.values_N[part.start : half] = new_N[: part.size // 2]
    waits: list[float] = []

    def go_on(seconds: float) -> None:
        waits.append(seconds)
        state.reference.values_N[where] = new_N
        state.results.applied.add(part.index)
        state.results.applying = -1

    monkeypatch.setattr("spes_swarm.protocol.rounds.results.time.sleep", go_on)
    np.testing.assert_array_equal(full_values(state, part), new_N)
    assert len(waits) == 1


def test_results_that_wait_are_signed_together_when_the_first_is_sent() -> None:
    plan, (state, *others) = begun(trained_peers())
    contribute(plan, [state, *others])
    unsigned = [index for index in state.reduction.reduced if state.results.is_unsigned(index)]
    assert len(unsigned) > 1
    state.results.frame(unsigned[-1], 1)
    assert not any(map(state.results.is_unsigned, unsigned))
    known = [state.results.known[index].signed for index in unsigned]
    signatures = {signed.opening.signature for signed in known if signed is not None}
    assert len(signatures) == -(-len(unsigned) // MAX_BATCH)


@pytest.mark.parametrize(("clip", "bounded"), [(0.0, False), (0.5, True), (1.5, True)])
def test_the_limits_of_an_exchange_are_the_runs(clip: float, bounded: bool) -> None:
    changes = {"round": {"stall_timeout_s": 3.0, "timeout_s": 31.0, "max_update_rms": 0.25, "clip": clip}}
    config = RunConfig.from_dict(merged(TINY_RUN, changes), "test").round
    assert ExchangeLimits.of(config) == ExchangeLimits(stall_timeout_s=3.0, timeout_s=31.0)
    assert Bounds.of(config.clip, config.max_update_rms) == Bounds(0.25, bounded)


def test_a_reducer_knows_who_still_wants_something_of_it() -> None:
    _, states = begun(trained_peers(reachable=False))  # who cannot be reached reduces nothing
    assert [state.unserved for state in states] == [{1, 2}, {0, 2}, set()]
    state = states[0]
    state.served(1)
    assert state.unserved == {2}
    state.served(2)
    assert not state.unserved


def test_before_anything_has_come_nothing_has_come() -> None:
    _, (state, *_) = begun(trained_peers())
    assert not state.ended
    assert not state.finished
    assert not state.unreliable
    assert not state.results.excessive
    assert (state.payload_bytes_sent, state.payload_bytes_received) == (0, 0)
    assert len(state.results.missing()) == len(state.results.wanted) - len(state.reduction.reduced)
    assert state.reduction.num_to_reduce >= len(state.reduction.outstanding()) > 0


def test_what_came_is_counted() -> None:
    plan, (state, sender, _) = begun(trained_peers())
    completions: list[int] = []
    state.reduction.on_reduced = lambda: completions.append(state.reduction.reduced[-1])
    reduced = list(state.reduction.reduced)
    frames = [sender.contributions.push_frame(what) for what in plan.pushes(1, 0)]
    assert all(frame.kind is FrameKind.DATA and Opening.from_wire(frame.extra) for frame in frames)
    for frame in frames:
        state.reduction.accept(1, frame)
    assert state.payload_bytes_received == sum(len(frame.payload) for frame in frames)
    assert reduced + completions == state.reduction.reduced


def test_results_become_ready_one_by_one_and_say_who_is_in_them() -> None:
    plan, states = begun(trained_peers())
    contribute(plan, states)
    for state in states:
        assert sorted(state.reduction.reduced) == [part.index for part in plan.parts if part.reducer == state.me]
        for index in state.reduction.reduced:
            frame = state.results.frame(index, (state.me + 1) % 3)
            assert frame is not None
            assert frame.kind is FrameKind.DATA
            assert frame.part == index
            assert frame.weight == 0.0
            contributors = {c.member for c in plan.block_of(plan.parts[index]).contributions}
            assert decode(frame.extra, 3, [])[0] == contributors


def test_the_report_of_a_commit() -> None:
    peers = trained_peers()
    plan, states = begun(peers, number=7)
    contribute(plan, states)
    distribute(states)
    for state in states:
        report = state.commit()
        assert report.round == 7
        assert report.members == tuple(member.peer_id for member in state.group.members)
        assert report.parts_total == len(plan.parts)
        assert report.parts_missing == 0
        assert report.changed_blocks == (0, 1, 2, 3)
        assert report.experts_covered == 3
        assert state.payload_bytes_received > 0


def test_experts_without_a_holder_are_not_covered() -> None:
    plan, states = begun(trained_peers()[:2])
    contribute(plan, states)
    distribute(states)
    assert states[0].commit().experts_covered == 2


def test_after_the_commit_a_straggler_gets_the_same_values() -> None:
    """One with another base gets full values; once the reference has moved, they are in it already."""
    peers = trained_peers()
    for who in peers:
        who.reference.finish(1, [(0, 1)])
    peers[2].reference.values_N[:10] += 1.0
    peers[2].reference.finish(1, [(0, 1)])
    peers[2].live_N[:] = peers[2].reference.values_N
    plan, states = begun(peers, number=2)
    contribute(plan, states)
    indices = [i for i in states[0].reduction.reduced if plan.block_of(plan.parts[i]).result_form(2) is Form.FULL]
    assert indices
    before = [states[0].results.frame(index, 2) for index in indices]
    assert all(frame is not None and frame.form is Form.FULL for frame in before)
    distribute(states)
    assert states[0].commit().parts_missing == 0
    for index, earlier in zip(indices, before, strict=True):
        later = states[0].results.frame(index, 2)
        assert earlier is not None
        assert later is not None
        size = plan.parts[index].size
        np.testing.assert_allclose(
            EXACT.decode(later.payload, size), EXACT.decode(earlier.payload, size), rtol=0, atol=1e-6
        )


def test_work_that_was_left_out_is_carried_over_to_wherever_the_reference_goes() -> None:
    peers = trained_peers()
    plan, states = begun(peers)
    old_N, live_N = peers[2].reference.values_N.copy(), peers[2].live_N.copy()
    for sender in states[:2]:
        for target in states:
            for part in plan.pushes(sender.me, target.me):
                target.reduction.accept(sender.me, sender.contributions.push_frame(part))
    for target in states[:2]:
        target.reduction.give_up(2)
        complete_all(target.reduction)
    distribute(states)
    states[2].commit()
    new_N = peers[2].reference.values_N
    for part in plan.parts:
        if part.block == 0 and part.reducer != 2:
            where = slice(part.start, part.start + part.size)
            assert not np.array_equal(new_N[where], old_N[where])
            np.testing.assert_allclose(peers[2].live_N[where] - new_N[where], live_N[where] - old_N[where], atol=1e-6)


# What is refused says so to whoever has to find the cause.


def test_a_refused_contribution_names_the_part_and_what_is_wrong_with_it() -> None:
    plan, states = begun(trained_peers())
    part, *_ = plan.pushes(1, 0)
    frame = states[1].contributions.push_frame(part)
    others = next(p for p in plan.parts if p.reducer == 1)
    for wrong, kind, text in (
        (dataclasses.replace(frame, part=others.index), "part", f"part {others.index} is not reduced here"),
        (dataclasses.replace(frame, part=-1), "part", "part -1 is not reduced here"),
        (dataclasses.replace(frame, form=Form.FULL), "form", f"part {part.index} has form"),
    ):
        with pytest.raises(ProtocolError, match=text) as caught:
            begun(trained_peers())[1][0].reduction.accept(1, wrong)
        assert caught.value.kind == kind
    shared_by_two = next(p for p in plan.parts if p.block == 1 + 1)
    with pytest.raises(ProtocolError, match=f"does not contribute to part {shared_by_two.index}") as caught:
        states[shared_by_two.reducer].reduction.accept(2, dataclasses.replace(frame, part=shared_by_two.index))
    assert caught.value.kind == "part"
    states[0].reduction.accept(1, frame)
    with pytest.raises(ProtocolError, match=f"part {part.index} arrived twice") as caught:
        states[0].reduction.accept(1, frame)
    assert caught.value.kind == "duplicate"
    wrong = dataclasses.replace(frame, weight=frame.weight + 1.0)
    with pytest.raises(ProtocolError, match=r"weight .* stated") as caught:
        begun(trained_peers())[1][0].reduction.accept(1, wrong)
    assert caught.value.kind == "weight"


def test_the_first_part_is_a_part_like_any_other() -> None:
    plan, states = begun(trained_peers())
    reducer = plan.parts[0].reducer
    sender = next(i for i in range(3) if i != reducer)
    part = next(push for push in plan.pushes(sender, reducer) if push.index == 0)
    states[reducer].reduction.accept(sender, states[sender].contributions.push_frame(part))
    assert sender not in states[reducer].reduction._accumulators[0].outstanding


def test_a_refused_result_names_the_part_and_what_is_wrong_with_it() -> None:
    plan, states = begun(trained_peers())
    contribute(plan, states)
    index = next(i for i in states[1].reduction.reduced if plan.parts[i].block == 0)
    frame = states[1].results.frame(index, 0)
    assert frame is not None
    unknown = len(plan.parts)
    for wrong, kind, text in (
        (dataclasses.replace(frame, part=unknown), "part", f"result for part {unknown}, which this peer does not need"),
        (dataclasses.replace(frame, form=7), "form", f"result for part {index} has form 7"),
    ):
        with pytest.raises(ProtocolError, match=text) as caught:
            states[0].results.store(wrong)
        assert caught.value.kind == kind
    held_by_one = next(p for p in plan.parts if p.block == 1 and p.reducer != 1)
    reducer = states[held_by_one.reducer]
    result = reducer.results.frame(held_by_one.index, 1)
    assert result is not None
    roots = dict.fromkeys(range(3), signed_roots(states, held_by_one)[0])
    named = signed_result(reducer, held_by_one, result.payload, roots)
    with pytest.raises(ProtocolError, match=f"part {held_by_one.index} names members that do not") as caught:
        states[1].results.store(named)
    assert caught.value.kind == "malformed"


# Bounds.


def lengthened(factor: float, num_parts: int | None = None) -> tuple[int, int]:
    """How many parts member 1 pushes to member 0, and how many of them count, if they are so many times too long.

    Args:
        num_parts: so many are; all by default.
    """
    plan, states = begun(trained_peers(), BOUNDED, clip=1.5)
    pushes = [push for push in plan.pushes(1, 0) if push.block == 0]
    accepted = 0
    for i, part in enumerate(pushes):
        frame = states[1].contributions.push_frame(part)
        if num_parts is None or i < num_parts:
            values_N = factor * get_codec("fp32").decode(frame.payload, part.size)
            longer = dataclasses.replace(frame, payload=get_codec("fp32").encode(values_N))
            frame = resigned_contribution(states[1], longer)
        refusals: list[ProtocolError] = []
        try:
            states[0].reduction.accept(1, frame)
            accepted += 1
        except ProtocolError as exc:
            refusals.append(exc)
        assert all(error.kind == "norm" and f"part {part.index} exceeds" in str(error) for error in refusals)
    return len(pushes), accepted


def test_parts_may_differ_in_length_but_all_together_come_to_what_was_stated() -> None:
    pushed, accepted = lengthened(1.0)
    assert pushed >= 2
    assert accepted == pushed
    assert 1 <= lengthened(2.0)[1] < pushed  # each alone would do
    pushed, accepted = lengthened(20.0, num_parts=1)
    assert accepted == pushed - 1  # one that is beyond every measure, and nothing else


def test_full_values_are_not_bounded_in_a_run_without_bounds() -> None:
    peers = trained_peers()
    for who in peers:
        who.reference.finish(1, [(0, 1)])
    peers[2].reference.values_N[:] += 5.0
    peers[2].reference.finish(1, [(0, 1)])
    peers[2].live_N[:] = peers[2].reference.values_N
    for bounds, clip, shortest, longest in ((UNBOUNDED, 0.0, 4.5, 5.5), (BOUNDED, 1.5, 0.0, 0.5)):
        plan, states = begun(peers, bounds, number=2, clip=clip)
        pushes = [push for push in plan.pushes(2, 0) if push.block == 0]
        assert pushes
        for part in pushes:
            frame = states[2].contributions.push_frame(part)
            assert frame.form is Form.FULL
            states[0].reduction.accept(2, frame)
        lengths = [
            math.sqrt(float(np.mean(np.square(states[0].reduction._accumulators[part.index].differences[2]))))
            for part in pushes
        ]
        assert shortest < min(lengths)
        assert max(lengths) < longest


# The record of a commit.


def test_a_commit_is_remembered_with_its_round_and_lengths() -> None:
    plan, states = begun(trained_peers(), BOUNDED, number=9, clip=1.5)
    contribute(plan, states)
    distribute(states)
    for state in states:
        state.commit()
        tracks = TrackRecords()
        state.record_commit(tracks)
        others = [member.peer_id for i, member in enumerate(state.group.members) if i != state.me]
        assert [tracks.rounds_since(peer_id, 12) for peer_id in others] == [3, 3]
        assert tracks.rounds_since(state.group.members[state.me].peer_id, 12) is None
        assert tracks.usual_rms == plan.median_rms
        assert min(tracks.usual_rms) > 0


def test_frames_that_are_no_results_are_left_out_of_the_count() -> None:
    plan, states = begun(trained_peers())
    contribute(plan, states)
    index = next(i for i, part in states[0].results.wanted.items() if part.reducer == 1)
    frame = states[1].results.frame(index, 0)
    assert isinstance(frame, Frame)
    for _ in range(2):  # the second time it is here already
        states[0].results.store(frame)
    received = states[0].payload_bytes_received
    assert received == sum(
        len(states[s].contributions.push_frame(p).payload) for s in (1, 2) for p in plan.pushes(s, 0)
    ) + len(frame.payload)
