"""Leaders that have lost their duties: whoever knows it and whoever does not, the peers meet in one group."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from tests.helpers.meeting import WINDOW_S, Meeting

AT_ONCE_S = 2.0
SUBSETS = [names for count in range(4) for names in combinations("ABC", count)]


def relieve(meeting: Meeting, name: str, known_to: tuple[str, ...], wait_s: float = math.inf) -> None:
    """Has these peers know that a peer has no duty; it can be among them itself."""
    relieved = meeting.identity[name].peer_id
    for who in known_to:
        peer_id = meeting.identity[who].peer_id
        (peer,) = (peer for peer in meeting.peers if peer.identity.peer_id == peer_id)
        peer.run_state.roster.reputation.without_duty = {relieved: 1}
        meeting.known[peer_id][:] = [
            replace(other, wait_s=wait_s) if other.peer_id == relieved else other for other in meeting.known[peer_id]
        ]


async def stall(caller: str, statement: bytes | None) -> dict[str, Any]:
    await asyncio.sleep(1.0)
    return {}


@pytest.mark.parametrize("known_to", SUBSETS)
def test_a_leader_that_never_closes_costs_nothing_once_all_know(known_to: tuple[str, ...]) -> None:
    meeting = Meeting("HABC")
    meeting.answers("H", "gather", stall)
    meeting.answers("H", "call", stall)
    relieve(meeting, "H", known_to, wait_s=0.0)
    meeting.meet(AT_ONCE_S if known_to == ("A", "B", "C") else 4 * WINDOW_S)


# A peer that has missed the last commit knows of nobody.
@pytest.mark.parametrize("known_to", [(), ("A", "B"), ("A", "C"), ("B", "C"), ("A", "B", "C")])
def test_an_honest_peer_without_duty_is_in_the_group(known_to: tuple[str, ...]) -> None:
    meeting = Meeting("ABCH")
    relieve(meeting, "A", known_to)
    meeting.meet(AT_ONCE_S if known_to in ((), ("A", "B", "C")) else 4 * WINDOW_S)


def test_if_nobody_else_can_lead_a_peer_without_duty_does() -> None:
    meeting = Meeting("ABCH")
    relieve(meeting, "A", ("A", "B", "C"))
    for known in meeting.known.values():
        known[:] = [replace(other, reachable=meeting.name[other.peer_id] == "A") for other in known]
    for peer in meeting.peers[1:]:
        peer.run_state.reachable = False
    meeting.meet(AT_ONCE_S)
