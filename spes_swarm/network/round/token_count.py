"""Asks each peer how many tokens it has processed since the last commit, for training/round_due.py.

Answers are newer than records by seconds, so they also show a peer that has fallen behind where the swarm is now.
"""

from __future__ import annotations

import asyncio
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


@dataclass(eq=False)
class TokenCount:
    """Reports this peer's tokens since the commit of its reference to other peers, and asks them for theirs."""

    rpc: Rpc
    run_state: RunState
    announcer: Announcer  # has this peer's own count
    reachable: Callable[[], bool]  # whether other peers can open connections to this one
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
        return {
            "round": self._reference.round,
            "tokens": presence.tokens if presence else 0,
            "gathering": self.gathering(),
        }

    async def others(self) -> TokenCounts:
        """Asks the voices among the other peers. For a peer that does not answer, its last record counts."""
        largest_step = self._roster.largest_step(self.announcer.tokens_per_step)
        limit = 4 * self._clock.inner_steps_after(self._reference.round) * largest_step
        called = False

        def bounded(tokens: object, number: object) -> int:
            # Counts since an earlier commit mean nothing. Counts since a later one are the swarm's, if this peer has
            # fallen behind. The limit keeps a single peer's claim from making a round due.
            if not (_is_integer(tokens) and _is_integer(number)) or number < self._reference.round:
                return 0
            return max(0, min(tokens, limit))

        async def ask(view: PeerView) -> int:
            nonlocal called
            stale = bounded(view.progress.tokens, view.progress.round)
            if not (self.reachable() or view.progress.reachable):  # between two clients there may be no connection
                return stale
            try:
                answer = await self.rpc.call(view.peer_id, "tokens", {}, _TIMEOUT_S)
            except (OSError, ProtocolError):
                return stale
            number = answer.get("round")
            if _is_integer(number) and number >= self._reference.round:
                self._roster.hear_round(view.peer_id, number)
                # A newcomer follows only the initial peers to a round; while it defers, they are its voices.
                called = called or (self._roster.defers and answer.get("gathering") is True)
            return bounded(answer.get("tokens"), number)

        views = self._roster.voices()
        counts = await asyncio.gather(*(ask(view) for view in views))
        sizes = [max(1, min(view.progress.tokens_per_step, largest_step)) for view in views]
        steps = tuple(count / size for count, size in zip(counts, sizes, strict=True))
        return TokenCounts(
            tokens=sum(counts),
            steps=steps,
            behind=self._roster.swarm_round(self._reference.round) > self._reference.round,
            called=called,
        )


def _is_integer(value: object) -> TypeGuard[int]:
    return type(value) is int  # a bool is an int, too
