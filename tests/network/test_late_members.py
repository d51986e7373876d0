"""For how long an exchange waits for a member that sends nothing yet. No training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.wire import open_channel
from spes_swarm.network.round.deadlines import Deadlines, ExchangeLimits
from spes_swarm.network.round.exchange import Exchange
from spes_swarm.protocol.consensus.codec import get_codec
from spes_swarm.protocol.rounds.conduct import Delivery
from spes_swarm.protocol.rounds.outcome import CommitReport
from spes_swarm.protocol.rounds.plan import Plan, make_plan
from spes_swarm.protocol.rounds.round_state import RoundState
from spes_swarm.protocol.rounds.statement import Group
from spes_swarm.protocol.rounds.vouchers import vouchers
from tests.helpers.hosts import MEMBERS, Endpoint, connected, run
from tests.helpers.rounds import KEY, RUN_ID, UNBOUNDED, form, identities, identity, peer, small_layout
from tests.helpers.virtual_time import run_at_once

LAYOUT = small_layout()
LIMITS = ExchangeLimits(stall_timeout_s=600.0, timeout_s=3600.0)  # far longer than a test may take
LIMIT_S = 500.0  # of virtual time: less than a stalled member is waited for
SHORT_S = 0.5  # for what is expected not to happen
SLOW = identity(3).peer_id  # cannot be reached, so that it reduces nothing


@dataclass
class Meeting:
    """Three members that exchange, and a fourth that has sent nothing yet."""

    group: Group
    plan: Plan
    states: list[RoundState]
    slow_host: Endpoint
    rounds: list[asyncio.Task[CommitReport]] = field(default_factory=list)
    faults: list[ProtocolError] = field(default_factory=list)

    @property
    def slow(self) -> int:
        index = self.group.index_of(SLOW)
        assert index is not None
        return index

    async def send(self) -> None:
        """The fourth sends everything that it owes."""
        for member in range(4):
            pushes = self.plan.pushes(self.slow, member)
            if pushes:
                to = self.group.members[member].peer_id
                async with open_channel(self.slow_host.transport, to, f"{RUN_ID}/push", 60.0) as channel:
                    await channel.send_hello(group=self.group.id)
                    for part in pushes:
                        await channel.send(self.states[self.slow].contributions.push_frame(part))
                    await channel.end()


def always_late(state: RoundState) -> None:
    """Two exchanges in which the fourth came much later than the others."""
    for number in (1, 2):
        others = [member.peer_id for member in state.group.members]
        times_s = {peer_id: 5.0 if peer_id == SLOW else 0.1 for peer_id in others}
        deliveries = {peer_id: Delivery(1, 1.0, 1.0, seconds) for peer_id, seconds in times_s.items()}
        times: dict[str, Any] = {"usual_s": 0.1, "slack_s": 0.1, "passed_s": 9.0}
        state.tracks.conduct.exchanged(number, deliveries, {}, trusted=others, **times)


@asynccontextmanager
async def meeting(
    pace: float, doubted: Sequence[str] = (), *, known_as_late: bool = False, real: bool = False
) -> AsyncIterator[Meeting]:
    initial_N = np.zeros(LAYOUT.num_elements, np.float32)
    ids = [who.peer_id for who in identities(4)]
    members = [
        peer(
            LAYOUT,
            initial_N,
            range(4),
            reachable=peer_id != SLOW,
            pace=pace,
            vouched=vouchers({}, set(ids) - {peer_id}, doubted=set(doubted) - {peer_id}),
        )
        for peer_id in ids
    ]
    for who in members:
        who.live_N += 1.0
    group = form(members, 3)
    plan = make_plan(group, LAYOUT, 64)
    states = [
        RoundState(group, plan, i, who.reference, who.live_N, get_codec("fp32"), UNBOUNDED, KEY)
        for i, who in enumerate(members)
    ]
    async with connected(4, real=real) as found:
        by_id = {host.peer_id: host for host in found}
        meets = Meeting(group, plan, states, by_id[SLOW])
        exchanges: list[tuple[Exchange, RoundState]] = []
        for state, member in zip(states, group.members, strict=True):
            if member.peer_id != SLOW:
                if known_as_late:
                    always_late(state)
                host = by_id[member.peer_id]
                exchange = Exchange(
                    host.transport, host.rpc, RUN_ID, LIMITS, lambda _, error: meets.faults.append(error), MEMBERS
                )
                await exchange.start()
                exchanges.append((exchange, state))
        meets.rounds += [asyncio.create_task(exchange.run(state, slack_s=0.5)) for exchange, state in exchanges]
        try:
            yield meets
        finally:
            for task in meets.rounds:
                task.cancel()


def included(meets: Meeting) -> set[frozenset[int]]:
    """Whose work is in the results that the three hold."""
    return {result.included for state in meets.states for result in state.results.known.values()}


@pytest.mark.parametrize(
    ("pace", "real"),
    [(0.0, False), (1.0, False), (1.0, True)],
    ids=["before anything was measured", "afterwards", "through daemons"],
)
def test_a_member_that_was_never_late_is_waited_for(pace: float, real: bool) -> None:
    async def test() -> None:
        async with meeting(pace, real=real) as meets:
            await asyncio.sleep(4 * SHORT_S)
            assert not any(task.done() for task in meets.rounds)
            await meets.send()
            assert [report.parts_missing for report in await asyncio.gather(*meets.rounds)] == [0, 0, 0]
            assert included(meets) == {frozenset(range(4))}
            assert not meets.faults

    run(test) if real else run_at_once(test(), LIMIT_S)


@pytest.mark.parametrize("because", ["it was late twice", "most doubt it"])
def test_a_member_that_is_always_late_or_has_no_duty_is_not(because: str) -> None:
    async def test() -> None:
        late = because == "it was late twice"
        async with meeting(1.0, () if late else (SLOW,), known_as_late=late) as meets:
            assert meets.plan.without_duty == (frozenset() if late else {meets.slow})
            assert [report.parts_missing for report in await asyncio.gather(*meets.rounds)] == [0, 0, 0]
            assert included(meets) == {frozenset(range(4)) - {meets.slow}}
            assert not meets.faults  # it is known already
            await meets.send()  # what comes now is no fault, either
            assert not meets.faults

    run_at_once(test(), LIMIT_S)


def plan_with(pace: float) -> Plan:
    initial_N = np.zeros(LAYOUT.num_elements, np.float32)
    return make_plan(form([peer(LAYOUT, initial_N, range(4), pace=pace) for _ in range(3)], 3), LAYOUT, 64)


def test_deadlines_follow_what_was_measured_within_the_configured_ones() -> None:
    limits = ExchangeLimits(stall_timeout_s=4.0, timeout_s=100.0)
    assert Deadlines.of(limits, plan_with(0.0)) == Deadlines(50.0, 75.0, 90.0)
    plan = plan_with(1e3)
    usual_s = 1e-3 * max(plan.sent_elements.values())
    assert Deadlines.of(limits, plan) == Deadlines(*(factor * (4 * usual_s + 2.0) for factor in (1.0, 1.5, 2.0)))
    assert Deadlines.of(limits, plan_with(1e9)) == Deadlines(50.0, 75.0, 90.0)
