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
from typing import Any

from hivemind.dht import DHTNode
from hivemind.p2p import PeerID

from spes_swarm.base.address import check_peer_address, peer_id_of
from spes_swarm.base.errors import AddressError
from spes_swarm.network.link.daemon import Daemon

_MAX_PEERS = 128
_MAX_MADDRS = 8
_MAX_MADDR_CHARS = 256
_FORGET_S = 24 * 3600.0
_DIAL_TIMEOUT_S = 3.0
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 2.0, 60.0
_INTERVAL_GROWTH = 1.5
_DIALS_AT_A_TIME = 4


def checked_maddrs(value: Any, peer_id: str) -> list[str]:
    """Returns the usable ones of the addresses that another peer reports as its own."""
    maddrs: list[str] = []
    for maddr in value[:_MAX_MADDRS] if isinstance(value, list) else []:
        if isinstance(maddr, str) and len(maddr) <= _MAX_MADDR_CHARS and maddr.endswith(f"/p2p/{peer_id}"):
            with suppress(AddressError):
                maddrs.append(check_peer_address(maddr))
    return maddrs


class KnownPeers:
    """The addresses of peers that were once live, and when to dial those that no longer are."""

    def __init__(self, initial: Sequence[str]) -> None:
        self._maddrs: OrderedDict[str, list[str]] = OrderedDict()
        self._seen: dict[str, float] = {}
        self._next: dict[str, float] = {}
        self._interval: dict[str, float] = {}
        for maddr in initial:
            self.note(peer_id_of(maddr), [maddr])

    def note(self, peer_id: str, maddrs: Sequence[str]) -> None:
        """Remembers where a peer can be reached; forgets the peers met longest ago when there are too many."""
        if not maddrs:
            return
        self._maddrs[peer_id] = list(maddrs)
        self._maddrs.move_to_end(peer_id)
        self._seen[peer_id] = time.monotonic()
        while len(self._maddrs) > _MAX_PEERS:
            self._forget(next(iter(self._maddrs)))

    def _forget(self, peer_id: str) -> None:
        for table in (self._maddrs, self._seen, self._next, self._interval):
            table.pop(peer_id, None)

    def of(self, peers: Collection[str]) -> list[str]:
        """The known addresses of these peers."""
        return [maddr for peer in peers for maddr in self._maddrs.get(peer, [])]

    def due(self, live: Collection[str]) -> list[str]:
        """Returns the peers that are not live and should be dialled now; pauses between attempts become longer."""
        now = time.monotonic()
        for peer in live:
            if peer in self._maddrs:
                self._seen[peer] = now
            self._next.pop(peer, None)
            self._interval.pop(peer, None)
        for peer in [p for p, seen in self._seen.items() if now - seen > _FORGET_S]:
            self._forget(peer)
        missing = [peer for peer in self._maddrs if peer not in live and now >= self._next.get(peer, 0.0)]
        missing.sort(key=lambda peer: self._next.get(peer, 0.0))
        for peer in missing[:_DIALS_AT_A_TIME]:
            interval_s = self._interval.get(peer, _MIN_INTERVAL_S)
            self._next[peer] = now + interval_s
            self._interval[peer] = min(_INTERVAL_GROWTH * interval_s, _MAX_INTERVAL_S)
        return missing[:_DIALS_AT_A_TIME]

    async def dial(self, daemon: Daemon, peers: Collection[str]) -> list[str]:
        """Dials these peers at their addresses; returns those that answer."""

        async def try_one(peer_id: str) -> str | None:
            for maddr in self._maddrs.get(peer_id, []):
                with suppress(OSError, ValueError):
                    await daemon.connect(maddr, _DIAL_TIMEOUT_S)
                    return peer_id
            return None

        answers = await asyncio.gather(*(try_one(peer) for peer in peers))
        return [peer for peer in answers if peer is not None]

    async def reunite(self, live: Collection[str], daemon: Daemon, node: DHTNode) -> None:
        """Dials peers that are not live, and brings those that answer back into the DHT."""
        for peer_id in await self.dial(daemon, self.due(live)):
            peer = PeerID.from_base58(peer_id)
            # This adds each node to the other's routing table, so that records pass between the two parts again.
            if await node.protocol.call_ping(peer) is None:
                await daemon.disconnect(peer_id)  # the connection was dead: see Rpc.on_silence
            else:
                node.blacklist.register_success(peer)
