"""Leaders that were frozen, or out of reach for a moment: they close no group beside that of the others."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from spes_swarm.base.errors import NoLeaderError, RoundError
from spes_swarm.network.round.rendezvous import Rendezvous
from spes_swarm.protocol.members.reputation import Reputation
from spes_swarm.protocol.rounds.statement import Group
from tests.helpers.meeting import WINDOW_S, Meeting
from tests.helpers.rounds import RUN_ID
from tests.helpers.virtual_time import freeze, run_at_once, skip

_EXCHANGE_S = 0.2


def groups_of(
    meeting: Meeting,
    late_s: list[float],
    freezes: list[tuple[str, float, float]],
    meanwhile: Callable[[], Awaitable[None]] | None = None,
    limit_s: float = 6 * WINDOW_S,
) -> list[Group]:
    """Returns the groups of the peers that commit round 1; the others learn where most are.

    `late_s`: how many seconds late each joins; `freezes`: who is frozen, from when, for how many seconds.
    """

    async def join(who: Rendezvous, delay_s: float) -> Group | None:
        await asyncio.sleep(delay_s)
        group = None
        try:
            group = await who.join(meeting.statement())
        except RoundError as exc:
            if not any(why in str(exc) for why in ("is over", "began without this peer", "most others are not at")):
                raise
        await asyncio.sleep(_EXCHANGE_S)
        state: Any = who.run_state
        state.target_round = lambda: 2  # by the exchange, or from the others
        return group

    async def freeze_later(name: str, from_s: float, seconds: float) -> None:
        await asyncio.sleep(from_s)
        await freeze(meeting.identity[name].peer_id, seconds)

    async def hold() -> list[Group | None]:
        for who in meeting.peers:
            await who.start()
        joining = [meeting.begin(who, join(who, delay_s)) for who, delay_s in zip(meeting.peers, late_s, strict=True)]
        await asyncio.gather(*(freeze_later(*each) for each in freezes), *([meanwhile()] if meanwhile else []))
        return await asyncio.gather(*joining)

    return [group for group in run_at_once(hold(), limit_s) if group is not None]


def check_one(groups: list[Group]) -> None:
    assert len({group.id for group in groups}) == 1
    assert len(groups) == len(groups[0].members)


@pytest.mark.parametrize("late_s", [0.0, 3.0, 6.0, 8.0, 20.0])  # how late D joins
@pytest.mark.parametrize("frozen_s", [2.7, 3.6, 5.0, 7.0, 9.5, 14.0])
@pytest.mark.parametrize("frozen_from_s", [0.1, 0.9, 2.0, 5.0, 7.3])
def test_a_leader_that_was_frozen_closes_no_group_beside_that_of_the_others(
    frozen_from_s: float, frozen_s: float, late_s: float
) -> None:
    meeting = Meeting("ABCDH")  # H cannot be reached
    groups = groups_of(meeting, [0.0, 0.0, 2.5, late_s], [("A", frozen_from_s, frozen_s)])
    check_one(groups)
    assert len(groups) >= 2
    assert not meeting.wire.faults


def test_a_follower_that_is_back_before_the_last_one_comes_is_in_the_round() -> None:
    meeting = Meeting("ABCDH")
    groups = groups_of(meeting, [0.0, 0.0, 0.0, 4.8], [("B", 0.5, 4.7)])
    check_one(groups)
    assert len(groups) == 4


def test_a_newcomer_waits_for_a_founder_that_follows_it() -> None:
    """It ranks first, and both begin at once. If it gave the founder up, nobody could call it any more."""
    meeting = Meeting("ABH")
    newcomer, founder = meeting.honest
    joining = [meeting.rendezvous(founder), meeting.rendezvous(newcomer, defers=lambda: True)]
    for known in meeting.known.values():
        known[:] = [neighbour for neighbour in known if neighbour.peer_id != meeting.hostile.peer_id]

    async def meet() -> list[Group]:
        for who in joining:
            await who.start()
        return await asyncio.gather(*(who.join(meeting.statement()) for who in joining))

    groups = run_at_once(meet(), limit_s=0.2 * WINDOW_S)
    assert {len(group.members) for group in groups} == {2}
    assert not meeting.wire.faults


def test_of_two_newcomers_that_follow_each_other_one_leads() -> None:
    """Both have their reference from a peer that has died."""
    meeting = Meeting("ABH")
    following = {who.peer_id: Reputation([other.peer_id for other in meeting.honest]) for who in meeting.honest}

    async def enter(who: Rendezvous) -> Group:
        try:
            return await who.join(meeting.statement())
        except NoLeaderError:
            following[who.identity.peer_id].stop_following()  # as SyncRounds does
            raise

    def defers(me: str) -> bool:
        return following[me].defers(n.peer_id for n in meeting.known[me])

    meeting.peers = [meeting.rendezvous(who, defers=partial(defers, who.peer_id)) for who in meeting.honest]
    for who, reputation in following.items():
        reputation.follow()
        meeting.known[who][:] = [n for n in meeting.known[who] if n.peer_id != meeting.hostile.peer_id]
        assert defers(who)
    meeting.meet(limit_s=2 * WINDOW_S, enter=enter)


def test_a_peer_that_wakes_when_the_round_is_over_learns_so_at_once() -> None:
    meeting = Meeting("ABCH")
    groups = groups_of(meeting, [0.0, 0.0, 20.0], [("C", 19.0, 1.0)], limit_s=21.0)
    check_one(groups)
    assert len(groups) == 2


@pytest.mark.parametrize("seed", range(200))
def test_whoever_is_frozen_there_is_one_group(seed: int) -> None:
    chance = random.Random(seed)
    names = "ABCDE"[: chance.randint(2, 5)]
    meeting = Meeting(names + "H")
    late_s = [chance.choice([0.0, 0.0, 0.0, chance.uniform(0, 2), chance.uniform(0, 9)]) for _ in names]
    frozen_s = chance.choice([chance.uniform(1, 5), chance.uniform(2.5, 8), chance.uniform(5, 20)])
    frozen = chance.choice(["A", "A", *names])
    check_one(groups_of(meeting, late_s, [(frozen, chance.uniform(0, 6), frozen_s)]))


@pytest.mark.parametrize("frozen", ["A", "B"])  # a leader, and a follower
def test_a_peer_that_slept_until_all_records_had_expired_finds_the_others_before_it_goes_on(frozen: str) -> None:
    meeting = Meeting("ABCH")
    sleeper = meeting.peers[meeting.honest.index(meeting.identity[frozen])]
    live = meeting.known[sleeper.identity.peer_id]
    known = list(live)

    async def expire() -> None:
        await asyncio.sleep(1.0)
        live.clear()
        meeting.blind.add(sleeper.identity.peer_id)
        await asyncio.sleep(12.6)  # a second and a half after it wakes
        live[:] = known

    groups = groups_of(meeting, [0.0, 0.0, 2.0], [(frozen, 0.1, 12.0)], meanwhile=expire)
    check_one(groups)
    assert len(groups) >= 2


def test_a_newcomer_whose_first_poll_is_lost_follows_the_leader_as_soon_as_it_is_called() -> None:
    """Otherwise it would wait for another newcomer, which leads nothing, until the round has begun without it."""
    meeting = Meeting("ABCH")
    founder = meeting.rendezvous(meeting.identity["C"])
    newcomers = [meeting.rendezvous(meeting.identity[name], defers=lambda: True, electorate="C") for name in "AB"]
    meeting.wire.lost.append((meeting.identity["A"].peer_id, meeting.identity["C"].peer_id))

    async def meet() -> list[Group]:
        for who in (founder, *newcomers):
            await who.start()
        return await asyncio.gather(*(who.join(meeting.statement()) for who in (founder, *newcomers)))

    groups = run_at_once(meet(), limit_s=0.5 * WINDOW_S)
    check_one(groups)
    assert len(groups) == 3


@pytest.mark.parametrize("frozen_s", [3.6, 5.0, 9.5])
@pytest.mark.parametrize("frozen_from_s", [0.1, 0.9])
def test_a_leader_that_was_frozen_waits_even_for_those_for_whom_rounds_hardly_wait(
    frozen_from_s: float, frozen_s: float
) -> None:
    meeting = Meeting("ABCH")
    for known in meeting.known.values():
        known[:] = [replace(peer, wait_s=1.0) for peer in known]
    check_one(groups_of(meeting, [0.0, 0.0, 0.0], [("A", frozen_from_s, frozen_s)]))


async def never(caller: str, statement: bytes | None) -> dict[str, object]:
    await asyncio.sleep(60.0)
    return {}


@pytest.mark.parametrize("called", ["ABC", "A", "BC"])
@pytest.mark.parametrize("answers_from_s", [3.4, math.inf])
@pytest.mark.parametrize("call_at_s", [4.0, 13.0])
def test_a_leader_that_comes_back_but_closes_no_group_divides_nobody(
    call_at_s: float, answers_from_s: float, called: str
) -> None:
    meeting = Meeting()

    async def hold(caller: str, statement: bytes | None) -> dict[str, object]:
        await asyncio.sleep(60.0 if asyncio.get_running_loop().time() < answers_from_s else 3.4)
        return {}

    async def call() -> None:
        await asyncio.sleep(call_at_s)
        while True:
            for name in called:
                handle = meeting.wire.handlers[meeting.identity[name].peer_id, "call"]
                await handle(meeting.hostile.peer_id, {"run": RUN_ID, "round": 1})
            await asyncio.sleep(0.5)

    async def enter(who: Rendezvous) -> Group:
        calling = asyncio.create_task(call())
        try:
            return await meeting.join(who)
        finally:
            calling.cancel()

    meeting.answers("H", "gather", hold)
    meeting.answers("H", "call", never)
    meeting.meet(limit_s=3 * WINDOW_S, enter=enter)


async def claim_that_it_is_over(caller: str, statement: bytes | None) -> dict[str, object]:
    return {"target": 2} if statement is None else {"over": True}


def test_a_round_that_seemed_over_begins_again_with_those_that_come() -> None:
    """The two that claim so were most of those in reach before this peer joined."""
    meeting = Meeting("ABCHZ")
    me, early, late = meeting.peers
    for name in "HZ":
        meeting.answers(name, "call", claim_that_it_is_over)

    async def come() -> Group:
        await asyncio.sleep(2.0)
        await late.start()
        return await late.join(meeting.statement())

    async def lead() -> Group:
        await asyncio.sleep(4.0)
        return await me.join(meeting.statement())

    async def meet() -> list[Group]:
        for who in (me, early):
            await who.start()
        return list(await asyncio.gather(lead(), early.join(meeting.statement()), come()))

    check_one(run_at_once(meet(), limit_s=WINDOW_S))


def test_peers_that_come_outweigh_those_that_say_that_the_round_is_over_even_if_they_cannot_be_called() -> None:
    meeting = Meeting("ABCHZY")
    for name in "HZ":
        for method in ("call", "gather"):
            meeting.answers(name, method, claim_that_it_is_over)

    async def later(caller: str, statement: bytes | None) -> dict[str, object]:
        return {}

    async def unreachable(caller: str, statement: bytes | None) -> dict[str, object]:
        raise ConnectionError

    async def meet() -> list[Group]:
        for who in meeting.peers:
            await who.start()
        for name in "BC":
            meeting.answers(name, "call", unreachable)
        return list(await asyncio.gather(*(who.join(meeting.statement()) for who in meeting.peers)))

    meeting.answers("Y", "call", later)
    check_one(run_at_once(meet(), limit_s=1.3 * WINDOW_S))


def test_a_machine_that_is_always_slow_does_not_wait_for_ever() -> None:
    meeting = Meeting("AH")

    async def slow(caller: str, statement: bytes | None) -> dict[str, object]:
        skip(2.6)
        return {}

    meeting.answers("H", "call", slow)
    meeting.meet(limit_s=2 * WINDOW_S)
