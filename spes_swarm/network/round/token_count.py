"""Asks each peer how many tokens it has processed since the last commit, for training/rounds/due.py.

Answers are newer than records by seconds, so they also show a peer that has fallen behind where the swarm is now. They
carry the speed of the step that is under way and how long ago it began, so that the trainer can tell where a peer is
between two answers.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from spes_swarm.base.errors import ProtocolError
from spes_swarm.config.round_clock import RoundClock
from spes_swarm.network.announcer import Announcer
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.run_state import RunState
from spes_swarm.port.messages import TokenCounts
from spes_swarm.protocol.members.roster import PeerView

_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class _Count:
    """What one peer has done since the last commit, by its own account."""

    tokens: int  # in finished steps
    begun: float  # in the step that it was taking at `at`
    tokens_per_second: float
    at: float  # monotonic time


@dataclass(eq=False)
class TokenCount:
    """Reports this peer's tokens since the commit of its reference to other peers, and asks them for theirs."""

    rpc: Rpc
    run_state: RunState
    announcer: Announcer  # has this peer's own count
    gathering: Callable[[], bool]  # whether this peer waits for the group of a round

    def __post_init__(self) -> None:
        self._reference, self._roster = self.run_state.reference, self.run_state.roster
        self._clock = RoundClock.of(self.run_state.run)

    async def start(self) -> None:
        """Registers the handler."""
        await self.rpc.serve("tokens", self._serve)

    async def _serve(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        del peer_id, request
        presence = self.announcer.presence
        tokens, gathering = presence.tokens if presence else 0, self.gathering()
        # Before its first step since a commit a peer may still evaluate.
        stepping = presence is not None and tokens > 0 and not self.announcer.in_round
        return {
            "round": self._reference.round,
            "tokens": tokens,
            "gathering": gathering,
            "speed": presence.tokens_per_second if presence is not None and stepping else 0.0,
            "step_s": time.monotonic() - self.announcer.presence_at if stepping else 0.0,
        }

    async def others(self) -> TokenCounts:
        """Asks the other peers of the electorate. For a peer that does not answer, its last record counts."""
        largest_step = self._roster.largest_step(self.announcer.tokens_per_step)
        limit = 4 * self._clock.inner_steps_after(self._reference.round) * largest_step
        called = False

        def bounded(tokens: object, number: object) -> int:
            # Counts since an earlier commit mean nothing. Counts since a later one are the swarm's, if this peer has
            # fallen behind. The limit keeps a single peer's claim from making a round due.
            if not (_is_integer(tokens) and _is_integer(number)) or number < self._reference.round:
                return 0
            return max(0, min(tokens, limit))

        async def ask(view: PeerView) -> _Count:
            nonlocal called
            step = max(1, min(view.progress.tokens_per_step, largest_step))
            asked = time.monotonic()
            # A silent peer is assumed to be in the middle of a step.
            stale = _Count(bounded(view.progress.tokens, view.progress.round), step / 2, 0.0, asked)
            if not (self.run_state.reachable or view.progress.reachable):  # two clients may have no connection
                return stale
            try:
                answer = await self.rpc.call(view.peer_id, "tokens", {}, _TIMEOUT_S)
            except (OSError, ProtocolError):
                return stale
            number = answer.get("round")
            if _is_integer(number) and number >= self._reference.round:
                self._roster.hear_round(view.peer_id, number)
                # A newcomer follows only the initial peers to a round; while it defers, they are its electorate.
                called = called or (self._roster.defers and answer.get("gathering") is True)
            tokens = bounded(answer.get("tokens"), number)
            if not tokens:  # also of a peer that has not committed the last round yet
                return _Count(0, 0.0, 0.0, asked)
            speed, begun_s = (_number(answer.get(key)) for key in ("speed", "step_s"))
            if speed is None or begun_s is None:  # an older version
                return _Count(tokens, step / 2, 0.0, asked)
            answered = time.monotonic()
            speed = min(speed, limit / _TIMEOUT_S)
            return _Count(tokens, speed * begun_s, speed, (asked + answered) / 2)

        views = self._roster.electorate()
        counts = await asyncio.gather(*(ask(view) for view in views))
        sizes = [max(1, min(view.progress.tokens_per_step, largest_step)) for view in views]
        now = time.monotonic()
        return TokenCounts(
            tokens=sum(count.tokens for count in counts),
            steps=tuple(count.tokens / size for count, size in zip(counts, sizes, strict=True)),
            begun=sum(
                min(size, count.begun + count.tokens_per_second * (now - count.at))
                for count, size in zip(counts, sizes, strict=True)
            ),
            tokens_per_second=sum(count.tokens_per_second for count in counts),
            at=now,
            behind=self._roster.swarm_round(self._reference.round) > self._reference.round,
            called=called,
        )


def _is_integer(value: object) -> TypeGuard[int]:
    return type(value) is int  # a bool is an int, too


def _number(value: Any) -> float | None:
    """Returns a finite number that is not negative; None if `value` is not one."""
    return float(value) if type(value) in (int, float) and 0 <= value < math.inf else None
