"""Calls every peer whose record appears, to connect before the first round and to learn which peers answer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.known_peers import MAX_MADDRS, KnownPeers, checked_maddrs
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.protocol.members.roster import Roster

_TIMEOUT_S = 5.0
_LIST_S = 1.0  # for p2pd to list its connections
FIRST_ANSWER_S = 1.0  # how long a look at the swarm waits for peers that have just appeared
_RETRY_S = 10.0  # until a peer that has never answered is called again
_MAX_UNDER_WAY = 32


@dataclass(eq=False)
class PeerGreeter:
    """Greets peers, and answers their greetings with this peer's own addresses, none while it cannot be reached."""

    rpc: Rpc
    roster: Roster
    known_peers: KnownPeers
    own_maddrs: Callable[[], list[str]]
    connections: Callable[[], Awaitable[dict[str, list[str]]]]
    _tried_at: dict[str, float] = field(default_factory=dict, init=False)
    _under_way: set[asyncio.Task[list[str]]] = field(default_factory=set, init=False)

    async def start(self) -> None:
        """Registers the handler."""
        await self.rpc.serve("ping", self._serve)

    async def _serve(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        seen: list[str] = []
        if request.get("seen"):
            with suppress(Exception):  # of p2pd: the answer shows that this peer is alive, whatever else fails
                async with asyncio.timeout(_LIST_S):
                    seen = (await self.connections()).get(peer_id, [])
        return {"maddrs": self.own_maddrs(), "seen": seen[:MAX_MADDRS]}

    def greet_soon(self, new: Collection[str]) -> None:
        """Greets these peers, and again those that have never answered. Does not wait, since some may be frozen."""
        now = time.monotonic()
        present = {view.peer_id for view in self.roster.present()}
        self._tried_at = {peer: at for peer, at in self._tried_at.items() if peer in present}
        silent = {peer for peer in present if not self.roster.reputation.has_answered(peer)}
        due = [peer for peer in silent if now - self._tried_at.get(peer, -math.inf) >= _RETRY_S]
        # Records without a peer behind them cost an attacker nothing. However many there are, the peer that has waited
        # longest is next.
        due.sort(key=lambda peer: self._tried_at.get(peer, -math.inf))
        for peer_id in dict.fromkeys([*(peer for peer in new if peer not in silent), *due]):
            if len(self._under_way) >= _MAX_UNDER_WAY:
                return
            self._tried_at[peer_id] = now
            task = asyncio.create_task(self.greet(peer_id))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def first_answers(self) -> None:
        """Waits briefly for the answers to the greetings under way."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=FIRST_ANSWER_S)

    async def own_endpoints(self) -> list[str]:
        """Asks some of the other peers at which addresses this peer's identity is connected to them."""

        async def ask(peer_id: str) -> list[str]:
            with suppress(OSError, ProtocolError):
                answer = await self.rpc.call(peer_id, "ping", {"seen": True}, _TIMEOUT_S)
                return checked_maddrs(answer.get("seen"), self.roster.me)
            return []

        peers = [view.peer_id for view in self.roster.answering()[:_MAX_UNDER_WAY]]
        answers = await asyncio.gather(*(ask(peer) for peer in peers))
        return sorted({maddr.rpartition("/p2p/")[0] for answer in answers for maddr in answer})[:MAX_MADDRS]

    async def greet(self, peer_id: str) -> list[str]:
        """Asks a peer for its addresses; returns the last known ones if it does not answer."""
        with suppress(OSError, ProtocolError):  # a round will find out whether it can be reached
            answer = await self.rpc.call(peer_id, "ping", {}, _TIMEOUT_S)
            self.known_peers.note(peer_id, checked_maddrs(answer.get("maddrs"), peer_id))
        return self.known_peers.of([peer_id])
