"""Hostile leaders that treat honest peers differently: these meet in one group all the same, and none goes on alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import combinations, product
from typing import Any

import pytest

from spes_swarm.base.errors import RoundError
from spes_swarm.network.round.rendezvous import Rendezvous
from spes_swarm.protocol.rounds.statement import Group
from tests.helpers.meeting import EXCHANGE_S, WINDOW_S, Meeting
from tests.helpers.rounds import RUN_ID, sign_statement
from tests.helpers.virtual_time import run_at_once

LATE_S = [(), (2.0,), (0.0, 2.0), (0.0, 0.0, 3.0)]  # how many seconds late A, B and C join


def some(names: str, most: int) -> list[tuple[str, ...]]:
    return [victims for count in range(1, most + 1) for victims in combinations(names, count)]


# Names by rank, those whom H fails, for how many seconds it holds the polls of the others, and who is late. F and G
# fail everybody at once.
DIVISIONS = [
    *product(["HABC"], some("ABC", 2), [0.0, 3.4], LATE_S),
    *product(["GHABC", "FGHABC"], some("ABC", 2), [3.4], LATE_S[::3]),
    *product(["HABCDE"], some("ABCDE", 3), [3.4], LATE_S[-1:]),
]


async def silent(caller: str, statement: bytes | None) -> dict[str, Any]:
    return {}


async def failing(caller: str, statement: bytes | None) -> dict[str, Any]:
    return {"group": 7}


@pytest.mark.parametrize(("ranks", "victims", "poll_s", "late_s"), DIVISIONS)
@pytest.mark.parametrize("failure", [{"group": 7}, {"defers": True}])
def test_a_leader_that_fails_only_some_makes_nobody_go_on_alone(
    ranks: str, victims: tuple[str, ...], poll_s: float, late_s: tuple[float, ...], failure: dict[str, Any]
) -> None:
    meeting = Meeting(ranks)

    async def divide(caller: str, statement: bytes | None) -> dict[str, Any]:
        if caller in victims:
            return failure
        await asyncio.sleep(poll_s)
        return {}

    before = ranks[: ranks.index("H")]
    for name, lead in [("H", divide), *((name, failing) for name in before)]:
        meeting.answers(name, "gather", lead)
        meeting.answers(name, "call", silent)
    meeting.meet(limit_s=(4 + 2 * len(before)) * WINDOW_S, late_s=late_s)


@pytest.mark.parametrize("late_s", LATE_S)
@pytest.mark.parametrize("ranks", ["HABCZ", "HAZBC"])
@pytest.mark.parametrize("lead", [silent, failing])
def test_a_peer_that_claims_to_follow_a_failed_leader_neither_divides_nor_delays_the_others(
    lead: Any, ranks: str, late_s: tuple[float, ...]
) -> None:
    meeting = Meeting(ranks)

    async def claim(caller: str, statement: bytes | None) -> dict[str, Any]:
        return {"leader": meeting.hostile.peer_id}

    for name, method, answer in (("H", "gather", lead), ("H", "call", silent), ("Z", "call", claim)):
        meeting.answers(name, method, answer)
    meeting.answers("Z", "gather", silent)
    meeting.meet(limit_s=4 * WINDOW_S, late_s=late_s)


@pytest.mark.parametrize("ranks", ["HABC", "GHABC", "FGHABC"])
@pytest.mark.parametrize("poll_s", [0.0, 3.4])
def test_leaders_that_never_close_a_group_cost_their_time_only(ranks: str, poll_s: float) -> None:
    meeting = Meeting(ranks)

    async def hold(caller: str, statement: bytes | None) -> dict[str, Any]:
        await asyncio.sleep(poll_s)
        return {}

    for name in ranks[:-3]:
        meeting.answers(name, "gather", hold)
        meeting.answers(name, "call", silent)
    meeting.meet(limit_s=3 * WINDOW_S * len(ranks[:-3]), late_s=(0.0, 1.3, 2.1))


@pytest.mark.parametrize("left_out", [False, True])
def test_a_leader_that_gives_each_peer_another_group_is_passed_over(left_out: bool) -> None:
    """It can hold up one round, until its groups have failed twice."""
    meeting = Meeting()
    gathered: dict[str, bytes] = {}
    given: list[bytes] = []

    async def divide(caller: str, statement: bytes | None) -> dict[str, Any]:
        assert statement is not None
        gathered[caller] = statement
        if len(gathered) < 3:
            await asyncio.sleep(1.0)
            return {}
        given.append(sign_statement(meeting.hostile, RUN_ID, meeting.statement(tokens=len(given))))
        return {"group": [given[-1], *(sealed for name, sealed in gathered.items() if not left_out or name != caller)]}

    async def first_group() -> Group:
        for who in meeting.peers:
            await who.start()
        attempts = [asyncio.create_task(meeting.keep_trying(who, meeting.fail_with_hostile)) for who in meeting.peers]
        done, others = await asyncio.wait(attempts, return_when=asyncio.FIRST_COMPLETED)
        for attempt in others:
            attempt.cancel()
        return done.pop().result()

    meeting.answers("H", "gather", divide)
    meeting.answers("H", "call", silent)
    # A group without this peer may be under way among the others, so that each costs the time of an exchange.
    group = run_at_once(first_group(), 2 * (EXCHANGE_S + 2 * WINDOW_S) if left_out else 6 * WINDOW_S)
    assert len(group.members) >= 2  # the third may be in an exchange


def test_leaders_that_send_their_followers_to_and_fro_are_passed_over() -> None:
    meeting = Meeting("GHABC")
    since: dict[tuple[str, str], float] = {}

    def lead(me: str, other: str) -> None:
        async def send_away(caller: str, statement: bytes | None) -> dict[str, Any]:
            now = asyncio.get_running_loop().time()
            started = since.setdefault((me, caller), now)
            await asyncio.sleep(1.0)
            if now - started < 1.1 * WINDOW_S:
                return {}
            del since[me, caller]
            return {"leader": meeting.identity[other].peer_id}

        meeting.answers(me, "gather", send_away)
        meeting.answers(me, "call", silent)

    lead("G", "H")
    lead("H", "G")
    meeting.meet(limit_s=12 * WINDOW_S)


@pytest.mark.parametrize("ranks", ["ABH", "ABCH", "ABCDH"])
@pytest.mark.parametrize("failures", [1, 2, 3, 4, 5])
def test_after_two_groups_that_fail_all_turn_to_the_next_leader(ranks: str, failures: int) -> None:
    """Nobody is hostile here: exchanges fail on slow links, too. H cannot be reached."""
    meeting = Meeting(ranks)
    failed: Counter[str] = Counter()
    leaders: list[str] = []

    async def enter(who: Rendezvous) -> Group:
        group = await who.join(meeting.statement(tokens=10 + failed[who.identity.peer_id]))
        leaders.append(meeting.name[who.machine.leader])
        if failed[who.identity.peer_id] < failures:
            failed[who.identity.peer_id] += 1
            await asyncio.sleep(5.0)
            who.spend(group)
            raise RoundError("the exchange has failed")
        return group

    meeting.meet(limit_s=(failures + 1) * 2 * WINDOW_S, enter=enter, late_s=(0.0, 1.0))
    assert "B" in leaders or failures < 2


@pytest.mark.parametrize("ranks", ["HABC", "ABCH", "AHB", "ABH"])
def test_a_peer_that_gives_a_group_to_whoever_calls_it_does_not_stop_the_round(ranks: str) -> None:
    meeting = Meeting(ranks)
    sealed = dict(zip(sorted(set(ranks) - {"H"}, key=ranks.index), meeting.sealed, strict=True))
    given: list[bytes] = []

    async def give(caller: str, statement: bytes | None) -> dict[str, Any]:
        given.append(sign_statement(meeting.hostile, RUN_ID, meeting.statement(tokens=len(given))))
        return {"group": [given[-1], sealed[caller]]}

    meeting.answers("H", "gather", give)
    meeting.answers("H", "call", give)
    meeting.meet(limit_s=25 * WINDOW_S, enter=meeting.fail_with_hostile)


def test_a_better_leader_that_leaves_before_it_is_followed_is_forgotten() -> None:
    """Another peer came first, and was to be sent to that leader."""
    meeting = Meeting()
    me, other = meeting.peers[:2]
    live = meeting.known[me.identity.peer_id]

    async def follow_it(caller: str, statement: bytes | None) -> dict[str, Any]:
        return {"leader": meeting.hostile.peer_id}

    async def join() -> Group:
        await me.start()
        request = {"run": RUN_ID, "round": 1, "statement": meeting.sealed[1]}
        await me._serve_gather(other.identity.peer_id, request)
        await asyncio.sleep(1.0)
        assert await me._serve_gather(other.identity.peer_id, request) == {"leader": meeting.hostile.peer_id}
        live[:] = [neighbour for neighbour in live if neighbour.peer_id != meeting.hostile.peer_id]
        return await meeting.keep_trying(me)

    meeting.answers("C", "call", follow_it)
    assert run_at_once(join(), limit_s=5 * WINDOW_S).index_of(me.identity.peer_id) is not None
