"""Hostile statements, leaders and callers: honest peers still meet, all in one group."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest

from spes_swarm.base.errors import ProtocolError, RoundError
from spes_swarm.network.round.rendezvous import Rendezvous
from spes_swarm.protocol.averaging.commitments import Signer, SigningKey
from spes_swarm.protocol.meeting.attempt import Fate
from spes_swarm.protocol.meeting.gathering import POLL_S
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.rounds.statement import Group, Statement, form_group, seal_statement
from tests.helpers.meeting import EXCHANGE_S, WINDOW_S, Meeting, statement_fields
from tests.helpers.rounds import KEY, RUN_ID, certificate, identities, identity, sign_statement
from tests.helpers.virtual_time import run_at_once

# Statements.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bandwidth_mbps", math.nan),
        ("bandwidth_mbps", math.inf),
        ("bandwidth_mbps", 0.0),
        ("bandwidth_mbps", -1.0),
        ("rms", [0.01]),
        ("rms", [0.01, -1.0]),
        ("rms", [math.nan, 0.01]),
        ("rms", [math.inf, 0.01]),
        ("usual_rms", [0.0]),
        ("usual_rms", [0.0, math.nan]),
        ("vouched", b"short"),
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
        ("certificate", bytes(545)),  # of an RSA key of more than 4096 bits
        ("certificate", "no bytes"),
    ],
)
def test_absurd_statements_are_refused(field: str, value: object) -> None:
    Statement.model_validate(statement_fields())
    with pytest.raises(ValueError, match=r".+"):
        Statement.model_validate({**statement_fields(), field: value})


def test_a_statement_serves_for_its_round_and_run_only() -> None:
    sealed = sign_statement(identities(1)[0], RUN_ID, Statement.model_validate(statement_fields()))
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


def test_the_key_in_a_statement_is_certified_by_its_peer_for_the_run() -> None:
    who, other = identities(2)
    good, public = certificate(who), KEY.public
    another = SigningKey.generate().public
    for wrong in (b"", public, good[:-1], good + b"\0", another + good[len(another) :], certificate(other)):
        statement = Statement.model_validate({**statement_fields(), "certificate": wrong})
        with pytest.raises(ProtocolError, match="signature"):
            form_group(RUN_ID, 5, [seal_statement(who, RUN_ID, statement)], 3)
    of_another_run = Statement.model_validate({**statement_fields(), "certificate": certificate(who, "other-run")})
    with pytest.raises(ProtocolError, match="signature"):
        form_group(RUN_ID, 5, [seal_statement(who, RUN_ID, of_another_run)], 3)
    (member,) = form_group(RUN_ID, 5, [sign_statement(who, RUN_ID, of_another_run)], 3).members
    assert member.signer == Signer(who.peer_id, public)
    assert Signer.of(member.credentials, RUN_ID) == member.signer


# The rendezvous.


@pytest.fixture
def meeting() -> Meeting:
    return Meeting()


def alone(meeting: Meeting) -> bytes:
    return sign_statement(meeting.hostile, RUN_ID, meeting.statement())


def always(meeting: Meeting, answer: Callable[[bytes | None], dict[str, object]]) -> None:
    """Has the hostile peer give this answer to every follower and caller, the latter without a statement."""

    async def lead(caller: str, statement: bytes | None) -> dict[str, object]:
        return answer(statement)

    for method in ("gather", "call"):
        meeting.answers("H", method, lead)


BAD_LEADERS: dict[str, Callable[[Meeting, bytes | None], dict[str, object]]] = {
    "never closes the group": lambda m, statement: {},
    "says that the round is over": lambda m, statement: {"over": True},
    "says that it is over, and then that it leads": lambda m, statement: (
        {"leader": m.hostile.peer_id} if statement is None else {"over": True}
    ),
    "sends to itself": lambda m, statement: {"leader": m.hostile.peer_id},
    "sends to nobody": lambda m, statement: {"leader": "no peer id at all"},
    "sends to a number": lambda m, statement: {"leader": 7},
    "sends in circles": lambda m, statement: {"leader": m.honest[0].peer_id},
    # So does an honest peer that stands aside and follows the last in rank.
    "sends to whoever ranks last": lambda m, statement: {"leader": m.honest[-1].peer_id},
    "defers": lambda m, statement: {"defers": True},
    "gives a group of its own": lambda m, statement: {"group": [alone(m)]},
    "gives an empty group": lambda m, statement: {"group": []},
    "gives garbage": lambda m, statement: {"group": [b"garbage"]},
    "gives no list": lambda m, statement: {"group": 7},
    "gives a forged member": lambda m, statement: {"group": [alone(m), alone(m)[:-1] + b"x"]},
}


@pytest.mark.parametrize("name", BAD_LEADERS)
def test_a_hostile_leader_is_passed_over(meeting: Meeting, name: str) -> None:
    always(meeting, lambda statement: BAD_LEADERS[name](meeting, statement))
    meeting.meet(limit_s=120.0)
    assert {peer_id for peer_id, _ in meeting.wire.faults} <= {meeting.hostile.peer_id}


def test_a_leader_that_goes_back_to_a_round_is_found_by_those_whom_it_had_sent_away(meeting: Meeting) -> None:
    """A peer that was cut off had gone on alone; it takes over the others' reference and comes back."""
    others = meeting.peers
    back = meeting.rendezvous(meeting.hostile, lambda: 1 if gone_back.is_set() else 9)
    gone_back = asyncio.Event()

    async def meet() -> list[Group]:
        for who in (back, *others):
            await who.start()
        for who in others:
            with pytest.raises(RoundError, match="over"):
                await who.join(meeting.statement())
        gone_back.set()
        return await asyncio.gather(*(who.join(meeting.statement()) for who in (back, *others)))

    groups = run_at_once(meet(), limit_s=0.9 * WINDOW_S)  # before any window is over
    assert {len(group.members) for group in groups} == {4}
    assert len({group.id for group in groups}) == 1


def test_a_member_that_has_returned_ranks_first_but_leads_nothing(meeting: Meeting) -> None:
    """The others still know it as a member, while it defers to its initial peers. It comes when it is called."""
    others = meeting.peers
    called = asyncio.Event()
    back = meeting.rendezvous(meeting.hostile, defers=lambda: True, on_called=lambda _: called.set())

    async def come() -> Group:
        await called.wait()
        return await back.join(meeting.statement())

    async def meet() -> list[Group]:
        for who in (back, *others):
            await who.start()
        return await asyncio.gather(come(), *(who.join(meeting.statement()) for who in others))

    groups = run_at_once(meet(), limit_s=0.2 * WINDOW_S)
    assert {len(group.members) for group in groups} == {4}
    assert len({group.id for group in groups}) == 1
    assert not meeting.wire.faults


def test_a_newcomer_that_knows_only_another_one_follows_it_to_the_members() -> None:
    """It turns to no stranger, although that one ranks first and has a group for it."""
    meeting = Meeting("HABCD")
    who = {name: meeting.rendezvous(meeting.identity[name], electorate="AB") for name in "AB"}
    who["C"] = meeting.rendezvous(meeting.identity["C"], defers=lambda: True, electorate="AB")
    who["D"] = meeting.rendezvous(meeting.identity["D"], defers=lambda: True, electorate="C")
    always(meeting, lambda statement: {"group": [alone(meeting), *([statement] if statement else [])]})

    async def meet() -> list[Group]:
        for each in who.values():
            await each.start()
        return await asyncio.gather(*(each.join(meeting.statement()) for each in who.values()))

    groups = run_at_once(meet(), limit_s=2 * WINDOW_S)
    assert {len(group.members) for group in groups} == {4}
    assert len({group.id for group in groups}) == 1


def test_a_group_that_fails_shuts_nobody_out_of_the_round(meeting: Meeting) -> None:
    """A hostile leader and two others begin the round without a peer, and the exchange fails at its deadline."""
    sealed = [alone(meeting), *meeting.sealed[1:]]
    always(meeting, lambda statement: {"group": sealed})

    async def enter(who: Rendezvous) -> Group:
        try:
            group = await who.join(meeting.statement())
        except RoundError as exc:
            refusals.append(str(exc))
            raise
        if group.id == form_group(RUN_ID, 1, sealed, 3).id:
            await asyncio.sleep(EXCHANGE_S)
            who.spend(group)
            raise RoundError("the exchange has failed")
        return group

    refusals: list[str] = []
    meeting.meet(EXCHANGE_S + 3 * WINDOW_S, enter)
    assert set(refusals) == {"round 1 began without this peer"}


def test_strangers_neither_begin_rounds_nor_move_the_clock(meeting: Meeting) -> None:
    stranger = identity(50)

    async def attack() -> None:
        me = meeting.peers[0]
        await me.start()
        for round_number in (1, 2):
            fields = {**statement_fields(), "round": round_number, "versions": [0, 0, 0]}
            sealed = sign_statement(stranger, RUN_ID, Statement.model_validate(fields))
            request = {"run": RUN_ID, "round": round_number, "statement": sealed}
            assert await me._serve_call(stranger.peer_id, request) == {"target": 1}
            assert await me._serve_gather(stranger.peer_id, request) == {"early": True, "defers": False}
        with pytest.raises(ProtocolError, match="round"):
            await me._serve_call(stranger.peer_id, {"run": RUN_ID, "round": 3})
        assert not me.machine._leading.gatherings

    run_at_once(attack(), limit_s=60.0)
    assert not meeting.called
    assert not meeting.ahead


def poll(meeting: Meeting, me: Rendezvous, who: Identity, round_number: int = 1) -> asyncio.Task[dict[str, object]]:
    """A peer polls another one."""
    statement = Statement.model_validate({**meeting.statement().model_dump(), "round": round_number})
    request = {"run": RUN_ID, "round": round_number, "statement": sign_statement(who, RUN_ID, statement)}
    return asyncio.create_task(me._serve_gather(who.peer_id, request))


def test_a_stranger_that_polls_early_is_in_the_round_as_soon_as_it_begins(meeting: Meeting) -> None:
    stranger, member = identity(50), meeting.honest[1]

    async def come_early() -> None:
        me = meeting.peers[0]
        await me.start()
        early = poll(meeting, me, stranger)
        await asyncio.sleep(POLL_S / 2)
        assert not me.machine._leading.gatherings
        poll(meeting, me, member)
        await asyncio.sleep(POLL_S / 4)
        assert not early.done()
        assert me.machine._leading.gatherings[1].sealed.keys() == {stranger.peer_id, member.peer_id}

    run_at_once(come_early(), limit_s=60.0)


def test_a_round_that_waits_for_nobody_includes_a_stranger_that_came_early(meeting: Meeting) -> None:
    async def come_early() -> None:
        me = meeting.rendezvous(meeting.honest[0], alone=True)
        await me.start()
        early = poll(meeting, me, identity(50))
        await asyncio.sleep(POLL_S / 2)
        group = await me.join(meeting.statement())
        assert {member.peer_id for member in group.members} == {me.identity.peer_id, identity(50).peer_id}
        assert await early == {"group": list(group.sealed), "over": False}

    run_at_once(come_early(), limit_s=60.0)


def test_a_stranger_that_polls_early_is_sent_to_the_leader_as_soon_as_there_is_one(meeting: Meeting) -> None:
    always(meeting, lambda statement: {})

    async def come_early() -> None:
        me = meeting.peers[0]
        await me.start()
        early = poll(meeting, me, identity(50))
        await asyncio.sleep(POLL_S / 2)
        joining = asyncio.create_task(me.join(meeting.statement()))
        await asyncio.sleep(POLL_S / 4)
        assert early.result() == {"leader": meeting.hostile.peer_id, "defers": False}
        joining.cancel()

    run_at_once(come_early(), limit_s=60.0)


def test_a_round_that_ends_meanwhile_is_not_begun_again_by_a_poll_that_waits(meeting: Meeting) -> None:
    targets = [1]
    me = meeting.rendezvous(meeting.honest[0], target_round=lambda: targets[-1])

    async def wait() -> None:
        await me.start()
        me.machine._state.memory.round = 1
        me.machine._state.memory.leaders[me.identity.peer_id] = Fate.FAILED  # groups that it led have failed
        waiting = poll(meeting, me, meeting.honest[1])
        await asyncio.sleep(POLL_S / 2)
        targets.append(2)
        me.reset()
        poll(meeting, me, meeting.honest[2], round_number=2)
        assert await waiting == {"over": True}
        assert me.machine._leading.gatherings.keys() == {2}

    run_at_once(wait(), limit_s=60.0)


def test_one_peer_cannot_move_the_clock_but_most_of_them_can(meeting: Meeting) -> None:
    async def calls() -> None:
        me = meeting.peers[0]
        request = {"run": RUN_ID, "round": 2}
        for _ in range(5):
            await me._serve_call(meeting.hostile.peer_id, request)
        assert not meeting.ahead
        await me._serve_call(meeting.honest[1].peer_id, request)
        assert meeting.ahead

    run_at_once(calls(), limit_s=60.0)


def test_a_group_with_an_outdated_statement_of_this_peer_is_not_entered(meeting: Meeting) -> None:
    me, who = meeting.peers[0], meeting.honest[0]
    older = Statement.model_validate({**meeting.statement().model_dump(), "held": [], "routed": [], "rms": [0.01]})

    async def join() -> None:
        await me.start()
        always(meeting, lambda statement: {"group": [sign_statement(who, RUN_ID, older)]})
        with pytest.raises(RoundError, match="outdated"):
            await me.join(meeting.statement())

    run_at_once(join(), limit_s=60.0)
