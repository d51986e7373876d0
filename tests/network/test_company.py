"""Whom a peer's first round waits for."""

from __future__ import annotations

import asyncio

import pytest

from spes_swarm.network.round.company import Company
from spes_swarm.protocol.members.records import Progress
from spes_swarm.protocol.members.reputation import Reputation
from spes_swarm.protocol.members.roster import Roster
from tests.helpers.records import progress


def reads_before_the_first_round(*records: dict[str, Progress]) -> int:
    """How often a peer that finds these records, one after another, reads again before its first round begins."""
    reputation = Reputation()
    for peer in records[0]:
        reputation.note_answer(peer)
    roster = Roster("me", reputation=reputation)
    later = iter(records)
    roster.update(next(later))
    reads = 0

    async def refresh() -> None:
        nonlocal reads
        reads += 1
        roster.update(next(later))

    asyncio.run(Company(roster, 60.0, refresh).await_beginners())
    return reads


TRAINING, WAITING = progress(round=0), progress(round=0, state="waiting")


def test_the_first_round_of_a_run_waits_for_all_that_wait_for_company_although_another_one_trains() -> None:
    begun = {"a": progress(2.0, round=0), "b": progress(2.0, round=0)}
    assert reads_before_the_first_round({"a": TRAINING, "b": WAITING}, begun) == 1


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"a": TRAINING},
        {"a": progress(round=1), "b": WAITING},
        {"a": progress(round=9, state="waiting")},  # it has ended, and waits for those that are late
    ],
)
def test_it_waits_for_nobody_if_none_waits_or_the_run_has_begun(others: dict[str, Progress]) -> None:
    assert reads_before_the_first_round(others) == 0
