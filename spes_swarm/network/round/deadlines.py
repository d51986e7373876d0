"""How long an exchange waits for others, and what it measures of them.

A deadline for each message is not enough: a hostile member could keep all others waiting with a trickle of valid
messages and let the whole exchange time out. So the phases of an exchange have deadlines, too. First, reducers stop
waiting for contributions; then all members stop waiting for reducers; last, they stop waiting for members that report
that they have not finished. The deadlines follow what the group's members measured in earlier exchanges, and are never
longer than shares of the configured timeout. While more than half of the others are late, only the configured ones
count: then the network is slow, or this peer's line, and a minority cannot bring that about.

Members known to be late are not waited for until these deadlines; see protocol/rounds/conduct.py.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sized
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from typing import Any, Self, TypeVar

from spes_swarm.base.changes import Changes
from spes_swarm.config.run import RoundConfig
from spes_swarm.protocol.rounds.conduct import Delivery
from spes_swarm.protocol.rounds.plan import Plan

_Answer = TypeVar("_Answer")

# Of the configured timeout, if nothing was measured: for contributions, for results, for repairs.
_SHARES = (0.5, 0.75, 0.9)
# Otherwise, as multiples of the first one: _COLLECT_FACTOR times what is usual and half a stall timeout on top.
_MULTIPLES = (1.0, 1.5, 2.0)
_COLLECT_FACTOR = 4.0
_BATCH_S = 0.05  # for which the results of a batch wait for each other


@dataclass(frozen=True, slots=True)
class ExchangeLimits:
    """The configured bounds of an exchange, in seconds."""

    stall_timeout_s: float  # a peer that sends no byte for this long is out of this round
    timeout_s: float  # the whole exchange

    @classmethod
    def of(cls, config: RoundConfig) -> Self:
        """The limits of a run."""
        return cls(config.stall_timeout_s, config.timeout_s)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """When the phases of an exchange end, in seconds after its beginning."""

    collect_s: float  # reducers give up contributors
    result_s: float  # all give up reducers
    repair_s: float  # all give up those that have not finished

    @classmethod
    def configured(cls, limits: ExchangeLimits) -> Self:
        """The latest deadlines."""
        return cls(*(share * limits.timeout_s for share in _SHARES))

    @classmethod
    def of(cls, limits: ExchangeLimits, plan: Plan) -> Self:
        """The deadlines of an exchange by this plan."""
        latest = cls.configured(limits)
        if plan.usual_s <= 0:
            return latest
        collect_s = _COLLECT_FACTOR * plan.usual_s + limits.stall_timeout_s / 2
        return cls(*(min(most, times * collect_s) for most, times in zip(astuple(latest), _MULTIPLES, strict=True)))


@dataclass(eq=False)
class Timing:
    """What one peer measures in one exchange. Times are seconds after its beginning."""

    plan: Plan
    me: int
    slack_s: float  # what any member may take longer than the others
    begun: float = field(default_factory=time.monotonic)
    results_s: dict[int, float] = field(default_factory=dict)  # by reducer: when all of its results were here
    waited: bool = False  # for a member that was late
    _parts: set[tuple[int, int]] = field(default_factory=set)  # (member, part) that have arrived
    _arrived: Counter[int] = field(default_factory=Counter)  # elements that each member has delivered
    _num_bytes: Counter[int] = field(default_factory=Counter)
    _heard_s: dict[int, float] = field(default_factory=dict)  # by member: when its last contribution arrived

    def passed_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.begun

    def note_contribution(self, member: int, part: int, num_bytes: int) -> None:
        """Notes a contribution that has arrived, even if it is refused."""
        parts = self.plan.parts
        if not 0 <= part < len(parts) or parts[part].reducer != self.me or (member, part) in self._parts:
            return
        self._parts.add((member, part))
        self._arrived[member] += parts[part].size
        self._num_bytes[member] += num_bytes
        self._heard_s[member] = self.passed_s()

    def note_results(self, reducer: int) -> None:
        """Notes that a reducer has delivered all of its results."""
        self.results_s[reducer] = self.passed_s()

    def deliveries(self) -> dict[int, Delivery]:
        """What each member that owes this peer contributions has delivered."""
        owed: Counter[int] = Counter()
        for part in self.plan.parts:
            if part.reducer == self.me:
                for contribution in self.plan.block_of(part).contributions:
                    owed[contribution.member] += part.size
        del owed[self.me]
        sent = self.plan.sent_elements
        return {
            member: Delivery(
                elements=sent[member],
                share=min(1.0, self._arrived[member] / elements),
                num_bytes=self._num_bytes[member] * sent[member] / elements,
                contributed_s=self._heard_s[member] if self._arrived[member] >= elements else math.inf,
            )
            for member, elements in owed.items()
        }


async def answers_within(
    asked: Mapping[int, Coroutine[Any, Any, _Answer | None]], timeout_s: float
) -> dict[int, _Answer]:
    """Returns the answers that come in time; if there are none by then, all that come later. None is no answer."""
    tasks = {member: asyncio.create_task(ask) for member, ask in asked.items()}
    try:
        if tasks:
            await asyncio.wait(tasks.values(), timeout=max(timeout_s, 0.0))
        if tasks and all(not task.done() or task.result() is None for task in tasks.values()):
            await asyncio.wait(tasks.values())
        return {i: answer for i, task in tasks.items() if task.done() and (answer := task.result()) is not None}
    finally:
        for task in tasks.values():
            task.cancel()


async def a_batch(changes: Changes, results: Sized, count: int) -> None:
    """Waits a little until there are `count` results, to be signed together.

    Parts are rarely complete at the same moment, and all others would verify a signature for each.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(_BATCH_S):
            while len(results) < count:
                await changes.wait()
