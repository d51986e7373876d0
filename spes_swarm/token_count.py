"""How many tokens the swarm has processed since the last commit, asked of each peer: decides that a round is due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from spes_swarm.announcer import Announcer
from spes_swarm.errors import ProtocolError
from spes_swarm.reference import Reference
from spes_swarm.roster import PeerView, Roster
from spes_swarm.rpc import Rpc
from spes_swarm.service_messages import TokenCounts

_TIMEOUT_S = 1.0


class TokenCount:
    """Answers others about this peer's tokens, and asks them about theirs.

    Args:
        rpc: how they are asked.
        reference: whose round the counts are since.
        roster: the others.
        announcer: knows what this peer's trainer has done.
        inner_steps: of a round.
        reachable: whether others can open connections to this peer.
    """

    def __init__(
        self,
        rpc: Rpc,
        reference: Reference,
        roster: Roster,
        announcer: Announcer,
        inner_steps: int,
        reachable: Callable[[], bool],
    ) -> None:
        self._rpc = rpc
        self._reference = reference
        self._roster = roster
        self._announcer = announcer
        self._inner_steps = inner_steps
        self._reachable = reachable

    async def start(self) -> None:
        """Registers the handler."""
        await self._rpc.serve("tokens", self._serve)

    async def _serve(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        del peer_id, request
        presence = self._announcer.presence
        return {"round": self._reference.round, "tokens": presence.tokens if presence else 0}

    async def others(self) -> TokenCounts:
        """Asks the others whose word counts; who does not answer counts with its last record."""
        largest_step = self._roster.largest_step(self._announcer.tokens_per_step)
        limit = 4 * self._inner_steps * largest_step

        def bounded(tokens: object, number: object) -> int:
            # Counts since another commit say nothing, and nobody's word may bring a round about on its own.
            return max(0, min(tokens, limit)) if isinstance(tokens, int) and number == self._reference.round else 0

        async def ask(view: PeerView) -> int:
            stale = bounded(view.progress.tokens, view.progress.round)
            if not (self._reachable() or view.progress.reachable):  # between two clients there may be no connection
                return stale
            try:
                answer = await self._rpc.call(view.peer_id, "tokens", {}, _TIMEOUT_S)
            except (OSError, ProtocolError):
                return stale
            return bounded(answer.get("tokens"), answer.get("round"))

        views = self._roster.voices()
        counts = await asyncio.gather(*(ask(view) for view in views))
        sizes = [max(1, min(view.progress.tokens_per_step, largest_step)) for view in views]
        steps = tuple(count / size for count, size in zip(counts, sizes, strict=True))
        return TokenCounts(tokens=sum(counts), steps=steps)
