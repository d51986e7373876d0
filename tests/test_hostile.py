"""Hostile bytes are refused, named in the metrics, and change nothing that honest peers agree on."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_swarm import rendezvous
from spes_swarm.bitmap import bitmap
from spes_swarm.codec import EXACT, get_codec
from spes_swarm.errors import ProtocolError, RoundError
from spes_swarm.plan import Form, Plan, make_plan
from spes_swarm.reference import Reference
from spes_swarm.rendezvous import Neighbour, Rendezvous, rank
from spes_swarm.round_state import RoundState
from spes_swarm.rpc import RemoteError
from spes_swarm.statement import Group, Statement, form_group, seal_statement
from spes_swarm.transfer import table_from_wire, table_to_wire
from spes_swarm.wire import Frame, FrameKind
from tests.rounds import LIMITS, RUN_ID, FakePeer, form, hold_round, identities, identity, peer, small_layout

HOSTILE = 2  # index of the hostile member among three
CODEC = get_codec("fp16")
Spoil = Callable[[Frame], Frame]


def float_bytes(value: float, count: int) -> bytes:
    return np.full(count, value, "<f4").tobytes()


def halves(scale: float, value: float, frame: Frame) -> Frame:
    """A payload of the fp16 codec: a scale and as many equal values as the frame had."""
    count = (len(frame.payload) - 4) // 2
    return dataclasses.replace(frame, payload=struct.pack("<f", scale) + np.full(count, value, "<f2").tobytes())


# What a hostile contributor sends in place of a right frame, and how it is named.
BAD_CONTRIBUTIONS: dict[str, tuple[Spoil, str]] = {
    "no part of this round": (lambda f: dataclasses.replace(f, part=2**32 - 1), "part"),
    "no payload": (lambda f: dataclasses.replace(f, payload=b""), "shape"),
    "payload too short": (lambda f: dataclasses.replace(f, payload=f.payload[:-1]), "shape"),
    "payload too long": (lambda f: dataclasses.replace(f, payload=f.payload + b"\0"), "shape"),
    "dtype of another codec": (
        lambda f: dataclasses.replace(f, payload=float_bytes(0.1, (len(f.payload) - 4) // 2)),
        "shape",
    ),
    "full values instead of a difference": (lambda f: dataclasses.replace(f, form=Form.FULL), "form"),
    "unknown form": (lambda f: dataclasses.replace(f, form=255), "form"),
    "NaN": (lambda f: halves(1.0, math.nan, f), "nonfinite"),
    "infinite": (lambda f: halves(1.0, math.inf, f), "nonfinite"),
    "NaN scale": (lambda f: halves(math.nan, 1.0, f), "nonfinite"),
    "negative scale": (lambda f: halves(-1.0, 1.0, f), "nonfinite"),
    "overflow in decoding": (lambda f: halves(2.0**127, 60000.0, f), "nonfinite"),
    "huge norm": (lambda f: halves(2.0**20, 1.0, f), "norm"),
    "huge weight": (lambda f: dataclasses.replace(f, weight=1e300), "weight"),
    "NaN weight": (lambda f: dataclasses.replace(f, weight=math.nan), "weight"),
    "negative weight": (lambda f: dataclasses.replace(f, weight=-1.0), "weight"),
    "infinite weight": (lambda f: dataclasses.replace(f, weight=math.inf), "weight"),
}
BAD_RESULTS: dict[str, tuple[Spoil, str]] = {
    **{name: case for name, case in BAD_CONTRIBUTIONS.items() if "weight" not in name},
    "full values instead of a difference": (
        lambda f: dataclasses.replace(f, form=Form.FULL, payload=float_bytes(1e38, (len(f.payload) - 4) // 2)),
        "norm",
    ),
    "full values of the wrong length": (lambda f: dataclasses.replace(f, form=Form.FULL), "shape"),
    "NaN as full values": (
        lambda f: dataclasses.replace(f, form=Form.FULL, payload=float_bytes(math.nan, (len(f.payload) - 4) // 2)),
        "nonfinite",
    ),
    "no bitmap": (lambda f: dataclasses.replace(f, extra=b""), "malformed"),
    "long bitmap": (lambda f: dataclasses.replace(f, extra=b"\xff" * 4096), "malformed"),
}


def three_peers() -> tuple[list[FakePeer], Plan, list[RoundState]]:
    """Everybody has trained the shared block and an expert of its own; nothing has been exchanged yet."""
    layout = small_layout(4, shared=400)
    rng = np.random.default_rng(7)
    start_N = rng.normal(0, 0.1, layout.num_elements).astype(np.float32)
    peers = [peer(layout, start_N, [e], tokens=10 * (e + 1)) for e in range(3)]
    for p in peers:
        p.live_N += rng.normal(0, 0.01, p.live_N.size).astype(np.float32)
    group = form(peers, 1)
    plan = make_plan(group, layout, 64)
    states = [RoundState(group, plan, i, p.reference, p.live_N, CODEC, LIMITS) for i, p in enumerate(peers)]
    return peers, plan, states


def finish(plan: Plan, states: list[RoundState], *, hostile_results: Callable[[int, Frame], None]) -> None:
    """Ends the round for the honest members; the hostile one has had its say and is given up."""
    honest = [s for s in states if s.me != HOSTILE]
    for sender in honest:
        for target in honest:
            for part, contribution in plan.pushes(sender.me, target.me):
                target.accept(sender.me, sender.push_frame(part, contribution))
    for target in honest:
        target.give_up(HOSTILE)
        assert not target.awaited_contributors()
    for receiver in honest:
        for index, part in receiver.wanted.items():
            frame = states[part.reducer].result_frame(index, receiver.me) if part.reducer != receiver.me else None
            if frame is None:
                continue
            if part.reducer == HOSTILE:
                hostile_results(receiver.me, frame)
            else:
                receiver.store_result(frame)
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
        voices = [c for c in plan.block_of(part).contributions if c.member != HOSTILE]
        if part.index in lost or not voices:
            continue
        weights = [c.weight for c in voices]
        live_VN = np.stack([peers[c.member].live_N[where].astype(np.float64) for c in voices])
        values_N[where] = np.average(live_VN, axis=0, weights=weights)
    return values_N, lost


def assert_honest_outcome(peers: list[FakePeer]) -> None:
    honest = [p for i, p in enumerate(peers) if i != HOSTILE]
    expected_N, lost = expected_without_hostile()
    assert lost
    assert len({p.reference.digest for p in honest}) == 1
    for p in honest:
        np.testing.assert_allclose(p.reference.values_N, expected_N, rtol=0, atol=1e-4)
        assert p.reference.round == 1
        assert np.isfinite(p.live_N).all()
        assert Reference(p.reference.layout, p.reference.values_N).digests == p.reference.digests


def drop(receiver: int, frame: Frame) -> None:
    """The hostile member's results do not arrive."""


@pytest.mark.parametrize("name", BAD_CONTRIBUTIONS)
def test_a_bad_contribution_is_refused_and_the_part_completes_without_it(name: str) -> None:
    spoil, kind = BAD_CONTRIBUTIONS[name]
    peers, plan, states = three_peers()
    num_sent = 0
    for target in states[:HOSTILE]:
        for part, contribution in plan.pushes(HOSTILE, target.me):
            with pytest.raises(ProtocolError) as caught:
                target.accept(HOSTILE, spoil(states[HOSTILE].push_frame(part, contribution)))
            assert caught.value.kind == kind
            num_sent += 1
            if kind != "part":  # its word for this part is spent: the right frame comes too late
                assert HOSTILE not in target._accumulators[part.index].outstanding
                with pytest.raises(ProtocolError, match="duplicate"):
                    target.accept(HOSTILE, states[HOSTILE].push_frame(part, contribution))
    assert num_sent
    finish(plan, states, hostile_results=drop)
    assert_honest_outcome(peers)
    for state in states[:HOSTILE]:
        assert not any(HOSTILE in result.included for result in state.results.values())


def test_contributions_to_others_parts_or_experts_are_refused() -> None:
    peers, plan, states = three_peers()
    template = states[HOSTILE].push_frame(*plan.pushes(HOSTILE, 0)[0])
    mine = {part.index for part, _ in plan.pushes(HOSTILE, 0)}
    for part in plan.parts:
        if part.index in mine:
            continue
        frame = dataclasses.replace(template, part=part.index)
        if part.reducer == 0 and part.index in states[0].results:
            states[0].accept(HOSTILE, frame)  # complete before it came: late, and without effect
        else:
            with pytest.raises(ProtocolError, match="part"):
                states[0].accept(HOSTILE, frame)
    finish(plan, states, hostile_results=drop)
    assert_honest_outcome(peers)


def test_a_contribution_counts_once() -> None:
    _, plan, states = three_peers()
    part, contribution = plan.pushes(HOSTILE, 0)[0]
    frame = states[HOSTILE].push_frame(part, contribution)
    states[0].accept(HOSTILE, frame)
    with pytest.raises(ProtocolError, match="duplicate"):
        states[0].accept(HOSTILE, frame)


@pytest.mark.parametrize("name", BAD_RESULTS)
def test_a_bad_result_is_refused_and_counts_as_missing(name: str) -> None:
    spoil, kind = BAD_RESULTS[name]
    peers, plan, states = three_peers()
    refused = 0

    def results(receiver: int, frame: Frame) -> None:
        nonlocal refused
        with pytest.raises(ProtocolError) as caught:
            states[receiver].store_result(spoil(frame))
        assert caught.value.kind == kind
        assert frame.part in states[receiver].missing()
        refused += 1

    for sender in states[:HOSTILE]:  # the hostile reducer has averaged properly, and only then lies
        for part, contribution in plan.pushes(sender.me, HOSTILE):
            states[HOSTILE].accept(sender.me, sender.push_frame(part, contribution))
    finish(plan, states, hostile_results=results)
    assert refused
    assert_honest_outcome(peers)


def test_a_result_cannot_name_members_that_do_not_contribute() -> None:
    _, plan, states = three_peers()
    part = next(p for p in plan.parts if p.block == 1 + HOSTILE)
    assert part.reducer == HOSTILE
    frame = states[HOSTILE].result_frame(part.index, 0)
    assert frame is not None
    with pytest.raises(ProtocolError, match="malformed"):
        states[0].store_result(dataclasses.replace(frame, extra=bitmap([0, HOSTILE], 3)))
    states[0].store_result(frame)


def test_a_peer_whose_own_weights_are_nan_spoils_nothing() -> None:
    """A diverged peer is as harmful as a hostile one; as a reducer it must leave its own work out."""
    peers, plan, _ = three_peers()
    peers[HOSTILE].live_N[:] = math.nan
    group = form(peers, 1)
    states = [RoundState(group, plan, i, p.reference, p.live_N, CODEC, LIMITS) for i, p in enumerate(peers)]
    assert {error.kind for error in states[HOSTILE].own_faults} == {"norm"}
    for sender in states:
        for target in states:
            for part, contribution in plan.pushes(sender.me, target.me):
                frame = sender.push_frame(part, contribution)
                if sender.me != HOSTILE:
                    target.accept(sender.me, frame)
                else:
                    with pytest.raises(ProtocolError, match="nonfinite"):
                        target.accept(sender.me, frame)
    for state in states:
        for index, part in state.wanted.items():
            result = states[part.reducer].result_frame(index, state.me) if part.reducer != state.me else None
            if result is not None:
                state.store_result(result)
    for state in states:
        state.commit()
    assert len({p.reference.digest for p in peers}) == 1
    assert np.isfinite(peers[0].reference.values_N).all()


def test_different_results_for_different_members_heal_in_the_next_round() -> None:
    """A reducer that equivocates is not noticed at once, but the digests differ and plurality decides."""
    peers, plan, states = three_peers()

    def results(receiver: int, frame: Frame) -> None:
        lie_N = np.full(plan.parts[frame.part].size, 1e-3 * (receiver + 1), np.float32)
        states[receiver].store_result(dataclasses.replace(frame, payload=CODEC.encode(lie_N)))

    for sender in states[:HOSTILE]:
        for part, contribution in plan.pushes(sender.me, HOSTILE):
            states[HOSTILE].accept(sender.me, sender.push_frame(part, contribution))
    finish(plan, states, hostile_results=results)
    honest = peers[:HOSTILE]
    assert len({p.reference.digest for p in honest}) == 2
    hold_round(honest, 2, codec="fp16")
    assert len({p.reference.digest for p in honest}) == 1
    for p in honest:
        assert Reference(p.reference.layout, p.reference.values_N).digests == p.reference.digests


frames = st.builds(
    Frame,
    kind=st.just(FrameKind.DATA),
    form=st.integers(0, 255) | st.sampled_from([0, 1]),
    part=st.integers(0, 40) | st.integers(0, 2**32 - 1),
    weight=st.floats() | st.sampled_from([10.0, 20.0, 30.0]),
    extra=st.binary(max_size=8),
    payload=st.binary(max_size=300)
    | st.sampled_from([4 + 2 * 64, 4 * 64]).flatmap(lambda n: st.binary(min_size=n, max_size=n)),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(frames, max_size=12), st.lists(frames, max_size=12))
def test_arbitrary_frames_are_refused_or_harmless(pushes: list[Frame], results: list[Frame]) -> None:
    """Whatever arrives: only ProtocolError, all honest members agree, and everything stays finite."""
    peers, plan, states = three_peers()
    for frame in pushes:
        for state in states[:HOSTILE]:
            try:
                state.accept(HOSTILE, frame)
            except ProtocolError:
                continue
    for frame in results:
        wrong = [s for s in states[:HOSTILE] if frame.part not in s.wanted]
        for state in wrong:
            with pytest.raises(ProtocolError):
                state.store_result(frame)
    finish(plan, states, hostile_results=drop)
    honest = peers[:HOSTILE]
    assert len({p.reference.digest for p in honest}) == 1
    for p in honest:
        moved_N = p.reference.values_N - expected_without_hostile()[0]
        assert np.isfinite(p.live_N).all()
        assert np.sqrt(np.mean(np.square(moved_N))) <= LIMITS.max_update_rms


@settings(max_examples=100, deadline=None)
@given(st.lists(frames, max_size=12))
def test_arbitrary_results_are_refused_or_valid(results: list[Frame]) -> None:
    _, _, states = three_peers()
    state = states[0]
    before_N = state.reference.values_N.copy()
    for frame in results:
        held = dict(state.results)
        try:
            state.store_result(frame)
        except ProtocolError:
            assert state.results == held
    np.testing.assert_array_equal(state.reference.values_N, before_N)
    state.commit()  # must not fail half-way, whatever has been accepted
    assert np.isfinite(state.reference.values_N).all()
    assert Reference(state.reference.layout, state.reference.values_N).digests == state.reference.digests


# Statements and tables.


def statement_fields() -> dict[str, object]:
    return {
        "round": 5,
        "held": [1],
        "tokens": 10,
        "routed": [10],
        "bandwidth_mbps": 1.0,
        "reachable": True,
        "versions": [0, 1, 2],
        "digests": [b"\0" * 32] * 3,
        "commits": [0],
        "marks": b"\0" * 8,
        "room": 1,
        "fixed": False,
        "leaving": False,
        "leased": b"\0",
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bandwidth_mbps", math.nan),
        ("bandwidth_mbps", math.inf),
        ("bandwidth_mbps", 0.0),
        ("bandwidth_mbps", -1.0),
        ("tokens", -1),
        ("tokens", 2**60),
        ("tokens", True),
        ("tokens", 1.5),
        ("round", 2**63),
        ("routed", [2**63]),
        ("routed", []),
        ("held", [2]),
        ("held", [1, 1]),
        ("held", [-1]),
        ("versions", [0, 0, 5]),  # not before round 5 is committed
        ("versions", [0, 0, 2**62]),
        ("digests", [b"\0" * 31] * 3),
        ("digests", [b"\0" * 32] * 2),
        ("reachable", 1),
        ("commits", [5]),  # not before round 5 is committed
        ("commits", list(range(2**14))),
        ("marks", b"\0" * 15),
        ("room", -1),
        ("room", 2**62),
        ("fixed", 0),
        ("leaving", 0),
        ("leased", b""),
        ("leased", bytes(2)),
    ],
)
def test_absurd_statements_are_refused(field: str, value: object) -> None:
    Statement.model_validate(statement_fields())
    with pytest.raises(ValueError, match=r".+"):
        Statement.model_validate({**statement_fields(), field: value})


def test_a_statement_serves_for_its_round_and_run_only() -> None:
    sealed = seal_statement(identities(1)[0], RUN_ID, Statement.model_validate(statement_fields()))
    assert len(form_group(RUN_ID, 5, [sealed], 3).members) == 1
    for run_id, round_number, num_blocks, kind in (
        (RUN_ID, 6, 3, "round"),
        ("other-run", 5, 3, "signature"),
        (RUN_ID, 5, 4, "shape"),
    ):
        with pytest.raises(ProtocolError) as caught:
            form_group(run_id, round_number, [sealed], num_blocks)
        assert caught.value.kind == kind
    with pytest.raises(ProtocolError, match="duplicate"):
        form_group(RUN_ID, 5, [sealed, sealed], 3)


@pytest.mark.parametrize(
    "change",
    [
        {"round": 2**63},
        {"round": True},
        {"round": -1},
        {"round": "1"},
        {"versions": [0]},
        {"versions": [2**63] * 5},
        {"versions": [True] * 5},
        {"chunks": []},
        {"chunks": [b"\0" * 33] * 5},
        {"chunks": [b"\0" * 32 * 10_000] * 5},
        {"chunks": None},
    ],
)
def test_absurd_tables_are_refused(change: dict[str, object]) -> None:
    layout = small_layout(4)
    wire = table_to_wire(Reference(layout, np.zeros(layout.num_elements, np.float32)).table)
    table_from_wire(wire, layout)
    with pytest.raises(ProtocolError):
        table_from_wire({**wire, **change}, layout)


def test_a_full_contribution_that_overflows_is_refused() -> None:
    """A member whose base is as new as the swarm's, but another one, sends full values: the swarm had split."""
    peers, _, _ = three_peers()
    for p in peers:
        p.reference.finish(1, [(0, 1)])
    peers[HOSTILE].reference.values_N[0] += 1.0
    peers[HOSTILE].reference.finish(1, [(0, 1)])
    group = form(peers, 2)
    plan = make_plan(group, peers[0].reference.layout, 64)
    state = RoundState(group, plan, 0, peers[0].reference, peers[0].live_N, CODEC, LIMITS)
    part, contribution = next((p, c) for p, c in plan.pushes(HOSTILE, 0) if c.form is Form.FULL)
    state.reference.values_N[part.start : part.start + part.size] = -3e38
    payload = EXACT.encode(np.full(part.size, 3e38, np.float32))
    with pytest.raises(ProtocolError, match="norm"):
        state.accept(HOSTILE, Frame(FrameKind.DATA, Form.FULL, part.index, contribution.weight, b"", payload))


# The rendezvous. Calls are handed over directly; the hostile peer answers as each test says.

WINDOW_S = 0.4
Answer = Callable[[dict[str, Any]], dict[str, Any]]


class Wire:
    """All peers of a test, each with what it answers."""

    def __init__(self) -> None:
        self.handlers: dict[tuple[str, str], Callable[[str, dict[str, Any]], Any]] = {}
        self.faults: list[tuple[str, str]] = []

    def lie(self, peer_id: str, method: str, answer: Answer) -> None:
        async def handle(caller: str, arguments: dict[str, Any]) -> dict[str, Any]:
            return answer(arguments)

        self.handlers[peer_id, method] = handle


class FakeRpc:
    """The part of Rpc that a rendezvous uses."""

    def __init__(self, wire: Wire, peer_id: str) -> None:
        self._wire = wire
        self._peer_id = peer_id

    def on_fault(self, peer_id: str, error: ProtocolError) -> None:
        self._wire.faults.append((peer_id, error.kind))

    async def serve(self, method: str, handler: Callable[[str, dict[str, Any]], Any]) -> None:
        self._wire.handlers[self._peer_id, method] = handler

    async def call(self, peer_id: str, method: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        handler = self._wire.handlers.get((peer_id, method))
        if handler is None:
            raise ConnectionError(peer_id)
        try:
            answer: dict[str, Any] = await asyncio.wait_for(handler(self._peer_id, arguments), timeout_s)
        except ProtocolError as exc:
            raise RemoteError(str(exc)) from exc
        return answer


class Meeting:
    """Three honest peers and a hostile one (the best-ranked for round 1) that knows all that they know."""

    def __init__(self) -> None:
        self.wire = Wire()
        everybody = sorted(identities(4), key=lambda i: rank(RUN_ID, 1, i.peer_id))
        self.hostile, self.honest = everybody[0], everybody[1:]
        self.called: list[int] = []
        self.ahead: list[int] = []
        self.peers: list[Rendezvous] = []
        for who in self.honest:
            others = [Neighbour(i.peer_id, True) for i in everybody if i is not who]
            self.peers.append(
                Rendezvous(
                    FakeRpc(self.wire, who.peer_id),  # type: ignore[arg-type]
                    who,
                    RUN_ID,
                    3,
                    reachable=True,
                    window_s=WINDOW_S,
                    live_peers=lambda others=others: others,  # type: ignore[misc]
                    target_round=lambda: 1,
                    on_called=self.called.append,
                    on_ahead=self.ahead.append,
                )
            )

    def statement(self) -> Statement:
        return Statement.model_validate({**statement_fields(), "round": 1, "versions": [0, 0, 0]})

    async def hold(self) -> list[Group | BaseException]:
        """All honest peers join round 1, as often as it takes, but at most three times."""
        for rendezvous_ in self.peers:
            await rendezvous_.start()

        async def join(who: Rendezvous) -> Group:
            for _ in range(2):
                try:
                    return await who.join(self.statement())
                except RoundError:
                    continue
            return await who.join(self.statement())

        return await asyncio.gather(*(join(r) for r in self.peers), return_exceptions=True)


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Meeting:
    monkeypatch.setattr(rendezvous, "_POLL_S", 0.1)
    monkeypatch.setattr(rendezvous, "_CALL_TIMEOUT_S", 0.3)
    monkeypatch.setattr(rendezvous, "_LEADER_GRACE_S", 0.2)
    return Meeting()


def alone(meeting: Meeting) -> bytes:
    return seal_statement(meeting.hostile, RUN_ID, meeting.statement())


BAD_LEADERS: dict[str, Callable[[Meeting], Answer]] = {
    "never closes the group": lambda m: lambda request: {},
    "says that the round is over": lambda m: lambda request: {"over": True},
    "says that it is over, and then that it leads": lambda m: (
        lambda request: {"over": True} if "statement" in request else {"leader": m.hostile.peer_id}
    ),
    "sends to itself": lambda m: lambda request: {"leader": m.hostile.peer_id},
    "sends to nobody": lambda m: lambda request: {"leader": "no peer id at all"},
    "sends to a number": lambda m: lambda request: {"leader": 7},
    "sends in circles": lambda m: lambda request: {"leader": m.honest[0].peer_id},
    "gives a group of its own": lambda m: lambda request: {"group": [alone(m)]},
    "gives an empty group": lambda m: lambda request: {"group": []},
    "gives garbage": lambda m: lambda request: {"group": [b"garbage"]},
    "gives no list": lambda m: lambda request: {"group": 7},
    "gives a forged member": lambda m: lambda request: {"group": [alone(m), alone(m)[:-1] + b"x"]},
}


@pytest.mark.parametrize("name", BAD_LEADERS)
def test_a_hostile_leader_is_passed_over(meeting: Meeting, name: str) -> None:
    answer = BAD_LEADERS[name](meeting)
    for method in ("gather", "call"):
        meeting.wire.lie(meeting.hostile.peer_id, method, answer)
    groups = asyncio.run(asyncio.wait_for(meeting.hold(), 20.0))
    assert all(isinstance(group, Group) for group in groups), groups
    assert len({group.id for group in groups if isinstance(group, Group)}) == 1
    members = {member.peer_id for group in groups if isinstance(group, Group) for member in group.members}
    assert members == {who.peer_id for who in meeting.honest}
    assert {peer_id for peer_id, _ in meeting.wire.faults} <= {meeting.hostile.peer_id}


def test_a_leader_that_goes_back_to_a_round_is_found_by_those_whom_it_had_sent_away(meeting: Meeting) -> None:
    """A peer that was cut off had gone on alone; it takes over the others' reference and comes back."""
    others = meeting.peers
    back = Rendezvous(
        FakeRpc(meeting.wire, meeting.hostile.peer_id),  # type: ignore[arg-type]
        meeting.hostile,
        RUN_ID,
        3,
        reachable=True,
        window_s=10.0,
        live_peers=lambda: [Neighbour(who.peer_id, True) for who in meeting.honest],
        target_round=lambda: 1 if gone_back.is_set() else 9,
        on_called=lambda round_number: None,
        on_ahead=lambda round_number: None,
    )
    gone_back = asyncio.Event()

    async def meet() -> list[Group]:
        for who in (back, *others):
            await who.start()
        for who in others:
            with pytest.raises(RoundError, match="over"):
                await who.join(meeting.statement())
        gone_back.set()
        return await asyncio.gather(*(who.join(meeting.statement()) for who in (back, *others)))

    groups = asyncio.run(asyncio.wait_for(meet(), 9.0))  # before any window of its is over
    assert {len(group.members) for group in groups} == {4}
    assert len({group.id for group in groups}) == 1


def test_strangers_neither_begin_rounds_nor_move_the_clock(meeting: Meeting) -> None:
    stranger = identity(50)

    async def attack() -> None:
        me = meeting.peers[0]
        await me.start()
        for round_number in (1, 2):
            fields = {**statement_fields(), "round": round_number, "versions": [0, 0, 0]}
            sealed = seal_statement(stranger, RUN_ID, Statement.model_validate(fields))
            request = {"run": RUN_ID, "round": round_number, "statement": sealed}
            assert await me._serve_call(stranger.peer_id, request) == {"target": 1}
            assert await me._serve_gather(stranger.peer_id, request) == {}
        with pytest.raises(ProtocolError, match="round"):
            await me._serve_call(stranger.peer_id, {"run": RUN_ID, "round": 3})
        assert not me._gatherings

    asyncio.run(attack())
    assert not meeting.called
    assert not meeting.ahead


def test_one_peer_cannot_move_the_clock_but_most_of_them_can(meeting: Meeting) -> None:
    async def calls() -> None:
        me = meeting.peers[0]
        request = {"run": RUN_ID, "round": 2}
        for _ in range(5):
            await me._serve_call(meeting.hostile.peer_id, request)
        assert not meeting.ahead
        await me._serve_call(meeting.honest[1].peer_id, request)
        assert meeting.ahead

    asyncio.run(calls())


def test_a_group_with_an_outdated_statement_of_this_peer_is_not_entered(meeting: Meeting) -> None:
    me, who = meeting.peers[0], meeting.honest[0]
    older = Statement.model_validate({**meeting.statement().model_dump(), "held": [], "routed": []})

    async def join() -> None:
        await me.start()
        for method in ("gather", "call"):
            meeting.wire.lie(
                meeting.hostile.peer_id, method, lambda request: {"group": [seal_statement(who, RUN_ID, older)]}
            )
        with pytest.raises(RoundError, match="outdated"):
            await me.join(meeting.statement())

    asyncio.run(asyncio.wait_for(join(), 10.0))
