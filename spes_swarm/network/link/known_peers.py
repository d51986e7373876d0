"""Addresses of peers met before, so that parts of a swarm that were cut off from each other find each other again.

While two parts are cut off, each forgets the other: records expire, and the DHT drops nodes that do not answer. Nothing
else would ever reunite them, so every peer keeps dialling the addresses of peers that it met before, a few at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from spes_swarm.base.address import peer_id_of, usable_peer_addresses
from spes_swarm.network.transport.daemon import Daemon
from spes_swarm.network.transport.dht import DhtNode

_MAX_PEERS = 128
MAX_MADDRS = 8
_MAX_MADDR_CHARS = 256
_FORGET_S = 24 * 3600.0
_DIAL_TIMEOUT_S = 3.0
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 2.0, 60.0
_INTERVAL_GROWTH = 1.5
_DIALS_AT_A_TIME = 4


def checked_maddrs(value: Any, peer_id: str) -> list[str]:
    """Returns the usable ones of the addresses that another peer reports as its own."""
    given = value[:MAX_MADDRS] if isinstance(value, list) else []
    maddrs = [maddr for maddr in given if isinstance(maddr, str) and len(maddr) <= _MAX_MADDR_CHARS]
    return [maddr for maddr in usable_peer_addresses(maddrs) if peer_id_of(maddr) == peer_id]


@dataclass(slots=True)
class _Known:
    """One peer; times are monotonic."""

    maddrs: list[str]
    seen_at: float
    next_dial: float = 0.0
    interval_s: float = _MIN_INTERVAL_S


class KnownPeers:
    """The addresses of peers that were once live, and when to dial those that no longer are."""

    def __init__(self, initial: Sequence[str]) -> None:
        self._known: OrderedDict[str, _Known] = OrderedDict()  # the one met longest ago is first
        for maddr in initial:
            peer_id = peer_id_of(maddr)
            self.note(peer_id, list(dict.fromkeys([*self.of([peer_id]), maddr])))

    def note(self, peer_id: str, maddrs: Sequence[str]) -> None:
        """Remembers where a peer can be reached; forgets the peers met longest ago when there are too many."""
        if not maddrs:
            return
        known = self._known.setdefault(peer_id, _Known([], 0.0))
        known.maddrs, known.seen_at = list(maddrs), time.monotonic()
        self._known.move_to_end(peer_id)
        while len(self._known) > _MAX_PEERS:
            self._known.popitem(last=False)

    def of(self, peers: Collection[str]) -> list[str]:
        """The known addresses of these peers."""
        return [maddr for peer in peers if peer in self._known for maddr in self._known[peer].maddrs]

    def due(self, live: Collection[str]) -> list[str]:
        """Returns the peers that are not live and should be dialled now; pauses between attempts become longer."""
        now = time.monotonic()
        for peer in self._known.keys() & live:
            self._known[peer] = _Known(self._known[peer].maddrs, seen_at=now)
        for peer in [peer for peer, known in self._known.items() if now - known.seen_at > _FORGET_S]:
            del self._known[peer]
        missing = [peer for peer, known in self._known.items() if peer not in live and now >= known.next_dial]
        turn = sorted(missing, key=lambda peer: self._known[peer].next_dial)[:_DIALS_AT_A_TIME]
        for known in map(self._known.__getitem__, turn):
            known.next_dial = now + known.interval_s
            known.interval_s = min(_INTERVAL_GROWTH * known.interval_s, _MAX_INTERVAL_S)
        return turn

    async def dial(self, daemon: Daemon, peers: Collection[str]) -> list[str]:
        """Dials these peers at their addresses; returns those that answer."""

        async def try_one(peer_id: str) -> str | None:
            for maddr in self.of([peer_id]):
                with suppress(OSError, ValueError):
                    await daemon.connect(maddr, _DIAL_TIMEOUT_S)
                    return peer_id
            return None

        answers = await asyncio.gather(*(try_one(peer) for peer in peers))
        return [peer for peer in answers if peer is not None]

    async def reunite(self, live: Collection[str], daemon: Daemon, node: DhtNode) -> bool:
        """Dials peers that are not live, and brings those that answer back into the DHT; returns True if any has."""
        found = False
        for peer_id in await self.dial(daemon, self.due(live)):
            # Once it answers, records pass between the two parts again.
            if await node.ping(peer_id):
                found = True
            else:
                await daemon.disconnect(peer_id)  # the connection was dead: see Rpc.on_silence
        return found
