"""Hostile bytes are refused, named in the metrics, and change nothing that honest peers agree on."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.consensus.codec import EXACT, get_codec
from spes_swarm.protocol.consensus.reference import Reference
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.protocol.rounds.plan import Form, Plan, make_plan
from spes_swarm.protocol.rounds.round_state import RoundState
from tests.helpers.rounds import (
    KEY,
    UNBOUNDED,
    FakePeer,
    complete_all,
    form,
    hold_round,
    open_round,
    peer,
    small_layout,
)
from tests.helpers.signing import resigned_contribution, resigned_result, signed_result, signed_roots

HOSTILE = 2  # index of the hostile member among three
LOSSY = ("fp16", "int8", "int4")
CODEC = get_codec("fp16")
# Of values after a round with differences of about 0.01.
TOLERANCE = {"fp16": 1e-4, "int8": 3e-4, "int4": 5e-3}
Spoil = Callable[[Frame, str], Frame]  # takes the codec's name, too


def float_bytes(value: float, count: int) -> bytes:
    return np.full(count, value, "<f4").tobytes()


def num_values(frame: Frame, codec: str) -> int:
    """How many values the frame has; no part here has more than a block, or an odd number."""
    return {
        "fp16": (len(frame.payload) - 4) // 2,
        "int8": len(frame.payload) - 6,
        "int4": 2 * (len(frame.payload) - 6),
    }[codec]


def scaled(scale: float, value: float, frame: Frame, codec: str) -> Frame:
    """A payload with this scale of the part, whose values, or the scale of its block, are `value`."""
    header = struct.pack("<f", scale)
    if codec == "fp16":
        return dataclasses.replace(frame, payload=header + np.full(num_values(frame, codec), value, "<f2").tobytes())
    return dataclasses.replace(frame, payload=header + struct.pack("<e", value) + b"\x01" * (len(frame.payload) - 6))


def other_value(frame: Frame, codec: str) -> Frame:
    """Right in all but its last value."""
    return dataclasses.replace(frame, payload=frame.payload[:-1] + bytes([frame.payload[-1] ^ 1]))


def other_signature(frame: Frame, codec: str) -> Frame:
    """Right in all but the last byte of what goes along, which is a part of a path or a signature."""
    return dataclasses.replace(frame, extra=frame.extra[:-1] + bytes([frame.extra[-1] ^ 1]))


# What a hostile contributor sends in place of a right frame, and how it is named.
BAD_CONTRIBUTIONS: dict[str, tuple[Spoil, str]] = {
    "no part of this round": (lambda f, c: dataclasses.replace(f, part=2**32 - 1), "part"),
    "no payload": (lambda f, c: dataclasses.replace(f, payload=b""), "shape"),
    "payload too short": (lambda f, c: dataclasses.replace(f, payload=f.payload[:-1]), "shape"),
    "payload too long": (lambda f, c: dataclasses.replace(f, payload=f.payload + b"\0"), "shape"),
    "dtype of another codec": (
        lambda f, c: dataclasses.replace(f, payload=float_bytes(0.1, num_values(f, c))),
        "shape",
    ),
    "full values instead of a difference": (lambda f, c: dataclasses.replace(f, form=Form.FULL), "form"),
    "unknown form": (lambda f, c: dataclasses.replace(f, form=255), "form"),
    "NaN": (lambda f, c: scaled(1.0, math.nan, f, c), "nonfinite"),
    "infinite": (lambda f, c: scaled(1.0, math.inf, f, c), "nonfinite"),
    "NaN scale": (lambda f, c: scaled(math.nan, 1.0, f, c), "nonfinite"),
    "negative scale": (lambda f, c: scaled(-1.0, 1.0, f, c), "nonfinite"),
    "overflow in decoding": (lambda f, c: scaled(2.0**127, 60000.0, f, c), "nonfinite"),
    "huge norm": (lambda f, c: scaled(2.0**20, 1.0, f, c), "norm"),
    "huge weight": (lambda f, c: dataclasses.replace(f, weight=1e300), "weight"),
    "NaN weight": (lambda f, c: dataclasses.replace(f, weight=math.nan), "weight"),
    "negative weight": (lambda f, c: dataclasses.replace(f, weight=-1.0), "weight"),
    "infinite weight": (lambda f, c: dataclasses.replace(f, weight=math.inf), "weight"),
    "another value than signed": (other_value, "signature"),
    "another signature": (other_signature, "signature"),
    "no signature": (lambda f, c: dataclasses.replace(f, extra=b""), "malformed"),
}
BAD_RESULTS: dict[str, tuple[Spoil, str]] = {
    **{name: case for name, case in BAD_CONTRIBUTIONS.items() if "weight" not in name},
    "full values instead of a difference": (
        lambda f, c: dataclasses.replace(f, form=Form.FULL, payload=float_bytes(0.1, num_values(f, c))),
        "form",
    ),
    "a bitmap alone": (lambda f, c: dataclasses.replace(f, extra=f.extra[:1]), "malformed"),
    "too much": (lambda f, c: dataclasses.replace(f, extra=b"\xff" * 4096), "malformed"),
}


def three_peers(codec: str = "fp16") -> tuple[list[FakePeer], Plan, list[RoundState]]:
    """Everybody has trained the shared block and an expert of its own; nothing has been exchanged yet."""
    layout = small_layout(4, shared=400)
    rng = np.random.default_rng(7)
    start_N = rng.normal(0, 0.1, layout.num_elements).astype(np.float32)
    peers = [peer(layout, start_N, [e], tokens=10 * (e + 1)) for e in range(3)]
    for p in peers:
        p.live_N += rng.normal(0, 0.01, p.live_N.size).astype(np.float32)
    group = form(peers, 1)
    plan = make_plan(group, layout, 64)
    states = [
        open_round(group, plan, i, p.reference, p.live_N, get_codec(codec), UNBOUNDED, KEY) for i, p in enumerate(peers)
    ]
    return peers, plan, states


def finish(plan: Plan, states: list[RoundState], *, hostile_results: Callable[[int, Frame], None]) -> None:
    """Ends the round for the honest members; the hostile one has had its say and is given up."""
    honest = [s for s in states if s.me != HOSTILE]
    for sender in honest:
        for target in honest:
            for part in plan.pushes(sender.me, target.me):
                target.reduction.accept(sender.me, sender.contributions.push_frame(part))
    for target in honest:
        target.reduction.give_up(HOSTILE)
        complete_all(target.reduction)
        assert not target.reduction.outstanding()
    for receiver in honest:
        for index, part in receiver.results.wanted.items():
            frame = states[part.reducer].results.frame(index, receiver.me) if part.reducer != receiver.me else None
            if frame is None:
                continue
            if part.reducer == HOSTILE:
                hostile_results(receiver.me, frame)
            else:
                receiver.results.store(frame)
    for receiver in honest:
        receiver.commit()


@lru_cache(maxsize=1)
def expected_without_hostile() -> tuple[np.ndarray, set[int]]:
    """Values after a round in which nothing came from the hostile member, and the parts that it would have reduced."""
    peers, plan, _ = three_peers()
    values_N = peers[0].reference.values_N.astype(np.float64)
    lost = {part.index for part in plan.parts if part.reducer == HOSTILE}
    for part in plan.parts:
        where = slice(part.start, part.start + part.size)
        contributors = [c for c in plan.block_of(part).contributions if c.member != HOSTILE]
        if part.index in lost or not contributors:
            continue
        weights = [c.weight for c in contributors]
        live_VN = np.stack([peers[c.member].live_N[where].astype(np.float64) for c in contributors])
        values_N[where] = np.average(live_VN, axis=0, weights=weights)
    return values_N, lost


def assert_honest_outcome(peers: list[FakePeer], codec: str = "fp16") -> None:
    honest = [p for i, p in enumerate(peers) if i != HOSTILE]
    expected_N, lost = expected_without_hostile()
    assert lost
    assert len({p.reference.digest for p in honest}) == 1
    for p in honest:
        np.testing.assert_allclose(p.reference.values_N, expected_N, rtol=0, atol=TOLERANCE[codec])
        assert p.reference.round == 1
        assert np.isfinite(p.live_N).all()
        assert Reference(p.reference.layout, p.reference.values_N).digests == p.reference.digests


def drop(receiver: int, frame: Frame) -> None:
    """The hostile member's results do not arrive."""


@pytest.mark.parametrize("name", BAD_CONTRIBUTIONS)
@pytest.mark.parametrize("codec", LOSSY)
def test_a_bad_contribution_is_refused_and_the_part_completes_without_it(name: str, codec: str) -> None:
    spoil, kind = BAD_CONTRIBUTIONS[name]
    peers, plan, states = three_peers(codec)
    num_sent = 0
    for target in states[:HOSTILE]:
        for part in plan.pushes(HOSTILE, target.me):
            with pytest.raises(ProtocolError) as caught:
                target.reduction.accept(HOSTILE, spoil(states[HOSTILE].contributions.push_frame(part), codec))
            assert caught.value.kind == kind
            num_sent += 1
            if kind != "part":  # its word for this part is spent: the right frame comes too late
                assert HOSTILE not in target.reduction._accumulators[part.index].outstanding
                with pytest.raises(ProtocolError, match="duplicate"):
                    target.reduction.accept(HOSTILE, states[HOSTILE].contributions.push_frame(part))
    assert num_sent
    finish(plan, states, hostile_results=drop)
    assert_honest_outcome(peers, codec)
    for state in states[:HOSTILE]:
        assert not any(HOSTILE in result.included for result in state.results.known.values())


def test_contributions_to_others_parts_or_experts_are_refused() -> None:
    peers, plan, states = three_peers()
    template = states[HOSTILE].contributions.push_frame(plan.pushes(HOSTILE, 0)[0])
    mine = {part.index for part in plan.pushes(HOSTILE, 0)}
    for part in plan.parts:
        if part.index in mine:
            continue
        frame = dataclasses.replace(template, part=part.index)
        if part.reducer == 0 and part.index in states[0].results.known:
            states[0].reduction.accept(HOSTILE, frame)  # complete before it came: late, and without effect
        else:
            with pytest.raises(ProtocolError, match="part"):
                states[0].reduction.accept(HOSTILE, frame)
    finish(plan, states, hostile_results=drop)
    assert_honest_outcome(peers)


def test_a_contribution_counts_once() -> None:
    _, plan, states = three_peers()
    part = plan.pushes(HOSTILE, 0)[0]
    frame = states[HOSTILE].contributions.push_frame(part)
    states[0].reduction.accept(HOSTILE, frame)
    with pytest.raises(ProtocolError, match="duplicate"):
        states[0].reduction.accept(HOSTILE, frame)


@pytest.mark.parametrize("name", BAD_RESULTS)
@pytest.mark.parametrize("codec", LOSSY)
def test_a_bad_result_is_refused_and_counts_as_missing(name: str, codec: str) -> None:
    spoil, kind = BAD_RESULTS[name]
    peers, plan, states = three_peers(codec)
    refused = 0

    def results(receiver: int, frame: Frame) -> None:
        nonlocal refused
        with pytest.raises(ProtocolError) as caught:
            states[receiver].results.store(spoil(frame, codec))
        assert caught.value.kind == kind
        assert frame.part in states[receiver].results.missing()
        refused += 1

    for sender in states[:HOSTILE]:  # the hostile reducer has averaged properly, and only then lies
        for part in plan.pushes(sender.me, HOSTILE):
            states[HOSTILE].reduction.accept(sender.me, sender.contributions.push_frame(part))
    finish(plan, states, hostile_results=results)
    assert refused
    assert_honest_outcome(peers, codec)


def test_a_result_cannot_name_members_that_do_not_contribute() -> None:
    _, plan, states = three_peers()
    part = next(p for p in plan.parts if p.block == 1 + HOSTILE)
    assert part.reducer == HOSTILE
    frame = states[HOSTILE].results.frame(part.index, 0)
    assert frame is not None
    roots = dict.fromkeys((0, HOSTILE), signed_roots(states, part)[HOSTILE])
    with pytest.raises(ProtocolError, match=r"malformed: .* names members that do not contribute"):
        states[0].results.store(signed_result(states[HOSTILE], part, frame.payload, roots))
    states[0].results.store(frame)


@pytest.mark.parametrize("codec", LOSSY)
def test_a_peer_whose_own_weights_are_nan_spoils_nothing(codec: str) -> None:
    """A diverged peer is as harmful as a hostile one; as a reducer it must leave its own work out."""
    peers, plan, _ = three_peers(codec)
    peers[HOSTILE].live_N[:] = math.nan
    group = form(peers, 1)
    states = [
        open_round(group, plan, i, p.reference, p.live_N, get_codec(codec), UNBOUNDED, KEY) for i, p in enumerate(peers)
    ]
    assert {error.kind for error in states[HOSTILE].reduction.own_faults} == {"nonfinite"}
    for sender in states:
        for target in states:
            for part in plan.pushes(sender.me, target.me):
                frame = sender.contributions.push_frame(part)
                if sender.me != HOSTILE:
                    target.reduction.accept(sender.me, frame)
                else:
                    with pytest.raises(ProtocolError, match="nonfinite"):
                        target.reduction.accept(sender.me, frame)
    for state in states:
        for index, part in state.results.wanted.items():
            result = states[part.reducer].results.frame(index, state.me) if part.reducer != state.me else None
            if result is not None:
                state.results.store(result)
    for state in states:
        state.commit()
    assert len({p.reference.digest for p in peers}) == 1
    assert np.isfinite(peers[0].reference.values_N).all()


@pytest.mark.parametrize("codec", LOSSY)
def test_different_results_for_different_members_heal_in_the_next_round(codec: str) -> None:
    """A reducer that equivocates is not noticed at once, but the digests differ and plurality decides."""
    peers, plan, states = three_peers(codec)

    def results(receiver: int, frame: Frame) -> None:
        lie_N = np.full(plan.parts[frame.part].size, 1e-3 * (receiver + 1), np.float32)
        lie = dataclasses.replace(frame, payload=get_codec(codec).encode(lie_N))
        states[receiver].results.store(resigned_result(states[HOSTILE], lie))

    for sender in states[:HOSTILE]:
        for part in plan.pushes(sender.me, HOSTILE):
            states[HOSTILE].reduction.accept(sender.me, sender.contributions.push_frame(part))
    finish(plan, states, hostile_results=results)
    honest = peers[:HOSTILE]
    assert len({p.reference.digest for p in honest}) == 2
    hold_round(honest, 2, codec=codec)
    assert len({p.reference.digest for p in honest}) == 1
    for p in honest:
        assert Reference(p.reference.layout, p.reference.values_N).digests == p.reference.digests


sizes = st.sampled_from([4 + 2 * 64, 4 * 64, 6 + 64, 6 + 32])
strange_frames = st.builds(
    Frame,
    kind=st.just(FrameKind.DATA),
    form=st.integers(0, 255) | st.sampled_from([0, 1]),
    part=st.integers(0, 40) | st.integers(0, 2**32 - 1),
    weight=st.floats() | st.sampled_from([10.0, 20.0, 30.0]),
    extra=st.binary(max_size=8),
    payload=st.binary(max_size=300) | sizes.flatmap(lambda n: st.binary(min_size=n, max_size=n)),
)
plausible_frames = st.builds(
    Frame,
    kind=st.just(FrameKind.DATA),
    form=st.just(Form.DELTA),
    part=st.integers(0, 12),
    weight=st.just(30.0),
    extra=st.binary(max_size=8),
    # Positive, finite scales and values.
    payload=sizes.flatmap(
        lambda n: st.binary(min_size=n, max_size=n).map(lambda data: bytes(byte & 0x3B for byte in data))
    ),
)
frames = strange_frames | plausible_frames


@pytest.mark.slow
@settings(max_examples=100)
@given(st.lists(frames, max_size=12), st.lists(frames, max_size=12), st.sampled_from(LOSSY), st.booleans())
def test_arbitrary_frames_are_refused_or_harmless(
    pushes: list[Frame], results: list[Frame], codec: str, signed: bool
) -> None:
    """Whatever arrives: only ProtocolError, all honest members agree, and everything stays finite."""
    peers, plan, states = three_peers(codec)
    for pushed in pushes:
        frame = resigned_contribution(states[HOSTILE], pushed) if signed else pushed
        for state in states[:HOSTILE]:
            try:
                state.reduction.accept(HOSTILE, frame)
            except ProtocolError:
                continue
    for frame in results:
        wrong = [s for s in states[:HOSTILE] if frame.part not in s.results.wanted]
        for state in wrong:
            with pytest.raises(ProtocolError):
                state.results.store(frame)
    finish(plan, states, hostile_results=drop)
    honest = peers[:HOSTILE]
    assert len({p.reference.digest for p in honest}) == 1
    for p in honest:
        moved_N = p.reference.values_N - expected_without_hostile()[0]
        assert np.isfinite(p.live_N).all()
        assert np.sqrt(np.mean(np.square(moved_N))) <= UNBOUNDED.max_update_rms


@pytest.mark.slow
@settings(max_examples=100)
@given(st.lists(frames, max_size=12), st.sampled_from(LOSSY), st.booleans())
def test_arbitrary_results_are_refused_or_valid(results: list[Frame], codec: str, signed: bool) -> None:
    _, plan, states = three_peers(codec)
    state = states[0]
    before_N = state.reference.values_N.copy()
    for result in results:
        frame = result
        if signed and frame.part < len(plan.parts):
            part = plan.parts[frame.part]
            of_reducer = signed_result(states[part.reducer], part, frame.payload, signed_roots(states, part))
            frame = dataclasses.replace(frame, extra=of_reducer.extra)
        held = dict(state.results.known)
        try:
            state.results.store(frame)
        except ProtocolError:
            assert state.results.known == held
    np.testing.assert_array_equal(state.reference.values_N, before_N)
    state.commit()  # must not fail half-way, whatever has been accepted
    assert np.isfinite(state.reference.values_N).all()
    assert Reference(state.reference.layout, state.reference.values_N).digests == state.reference.digests


def split_peers() -> tuple[Plan, list[RoundState]]:
    """One has a base as new as the swarm's, but another one: the swarm had split."""
    peers, _, _ = three_peers()
    for p in peers:
        p.reference.finish(1, [(0, 1)])
    peers[HOSTILE].reference.values_N[0] += 1.0
    peers[HOSTILE].reference.finish(1, [(0, 1)])
    group = form(peers, 2)
    plan = make_plan(group, peers[0].reference.layout, 64)
    states = [open_round(group, plan, i, p.reference, p.live_N, CODEC, UNBOUNDED, KEY) for i, p in enumerate(peers)]
    return plan, states


@pytest.mark.parametrize(
    ("length", "value", "kind"), [(-1, 0.1, "shape"), (1, 0.1, "shape"), (0, math.nan, "nonfinite")]
)
def test_bad_full_values_are_refused_as_a_result_where_the_base_is_another(
    length: int, value: float, kind: str
) -> None:
    plan, states = split_peers()
    for sender in states:
        for part in plan.pushes(sender.me, 0):
            states[0].reduction.accept(sender.me, sender.contributions.push_frame(part))
    results = [states[0].results.frame(index, HOSTILE) for index in states[0].reduction.reduced]
    full = [frame for frame in results if frame is not None and frame.form is Form.FULL]
    assert full
    for frame in full:
        wrong = dataclasses.replace(frame, payload=float_bytes(value, len(frame.payload) // 4 + length))
        with pytest.raises(ProtocolError) as caught:
            states[HOSTILE].results.store(wrong)
        assert caught.value.kind == kind
        assert frame.part in states[HOSTILE].results.missing()
        states[HOSTILE].results.store(frame)


def test_a_full_contribution_that_overflows_is_refused() -> None:
    plan, (state, *_) = split_peers()
    part, contribution = next((p, c) for p, c in plan.contributed(HOSTILE, 0) if c.form is Form.FULL)
    state.reference.values_N[part.start : part.start + part.size] = -3e38
    payload = EXACT.encode(np.full(part.size, 3e38, np.float32))
    with pytest.raises(ProtocolError, match="norm"):
        state.reduction.accept(HOSTILE, Frame(FrameKind.DATA, Form.FULL, part.index, contribution.weight, b"", payload))
