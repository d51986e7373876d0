"""Keeps this peer connected to the others that it works with: directly, or else through another one (relay.py).

libp2p detects and closes a dead connection within 40 s; here it is replaced by one that works.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from spes_swarm.base.address import tcp_endpoint
from spes_swarm.network.link.reach import greets
from spes_swarm.network.link.relay import CIRCUIT, is_circuit
from spes_swarm.network.transport.daemon import Daemon
from spes_swarm.protocol.members.reputation import Neighbour

_DIRECT_TIMEOUT_S = 6.0  # libp2p itself gives a TCP connection five
_HEAD_START_S = 1.5  # of a direct connection before relays are tried as well
_CIRCUIT_TIMEOUT_S = 10.0
_RELAYS_AT_A_TIME = 3
_MAX_OTHER_CLIENTS = 16
_MIN_PAUSE_S, _MAX_PAUSE_S = 4.0, 60.0  # between attempts to connect
# Before two clients are linked: when a circuit begins, libp2p must have learnt their addresses from others, or it does
# not try to connect them directly (hole punching).
_CLIENT_PAUSE_S = 20.0
_MIN_RETURN_S, _MAX_RETURN_S = 60.0, 1800.0  # between attempts to replace a circuit by a direct connection
_PROBE_TIMEOUT_S = 3.0


@dataclass(slots=True)
class _Attempts:
    """When to retry; the pauses double."""

    pause_s: float
    longest_s: float
    next_at: float = 0.0

    def due(self) -> bool:
        return time.monotonic() >= self.next_at

    def postpone(self) -> None:
        self.next_at = time.monotonic() + self.pause_s
        self.pause_s = min(2 * self.pause_s, self.longest_s)


@dataclass(eq=False)
class Links:
    """The connections of one peer to the others of its run, through relays if `use_relays`.

    `on_link` is called when a peer's connection starts (True) or stops (False) going through a relay.
    """

    daemon: Daemon
    _: KW_ONLY
    use_relays: bool
    maddrs_of: Callable[[str], Awaitable[list[str]]]  # asks a peer for its addresses
    on_link: Callable[[str, bool], None]
    _attempts: dict[str, _Attempts] = field(default_factory=dict, init=False)
    _returns: dict[str, _Attempts] = field(default_factory=dict, init=False)  # to a direct connection
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)

    async def tend(self, peers: Collection[Neighbour], *, reachable: bool, busy: bool) -> None:
        """Maintains the connections to the other live peers of the run; dialling continues in the background.

        Two peers that are not `reachable` need no connection to each other: neither reduces nor leads. While `busy` in
        a round, connections that work are left alone.
        """
        connections = await self.daemon.connections()
        # Two clients exchange only greetings, which show that a peer runs: worth a circuit while clients are few.
        all_pairs = sum(not peer.reachable for peer in peers) <= _MAX_OTHER_CLIENTS
        wanted = {peer.peer_id: peer for peer in peers if reachable or peer.reachable or all_pairs}
        for table in (self._attempts, self._returns):
            for peer_id in table.keys() - wanted.keys():
                del table[peer_id]
        relays = [
            peer.peer_id
            for peer in sorted(peers, key=lambda peer: not peer.reachable)
            if any(not is_circuit(maddr) for maddr in connections.get(peer.peer_id, []))
        ]
        for peer_id, peer in wanted.items():
            maddrs = connections.get(peer_id, [])
            relayed = bool(maddrs) and all(is_circuit(maddr) for maddr in maddrs)
            if relayed and peer_id not in self._returns:
                self._returns[peer_id] = _Attempts(_MIN_RETURN_S, _MAX_RETURN_S)
                self._returns[peer_id].postpone()
                self.on_link(peer_id, True)
            if maddrs and not relayed:
                self._attempts.pop(peer_id, None)
                if self._returns.pop(peer_id, None) is not None:
                    self.on_link(peer_id, False)
            elif peer_id in self._tasks:
                continue
            elif relayed and self._returns[peer_id].due() and not busy:
                self._returns[peer_id].postpone()
                self._spawn(peer_id, self._return(peer_id))
            elif not maddrs:
                attempts = self._attempts.get(peer_id)
                if attempts is None:
                    attempts = self._attempts[peer_id] = _Attempts(_MIN_PAUSE_S, _MAX_PAUSE_S)
                    if not peer.reachable:
                        # The peer opens the connection itself, and needs a moment to find this peer.
                        attempts.next_at = time.monotonic() + (_MIN_PAUSE_S if reachable else _CLIENT_PAUSE_S)
                if attempts.due():
                    attempts.postpone()
                    self._spawn(peer_id, self._connect(peer, [relay for relay in relays if relay != peer_id]))

    def _spawn(self, peer_id: str, coroutine: Coroutine[Any, Any, None]) -> None:
        task: asyncio.Task[None] = asyncio.create_task(coroutine)
        self._tasks[peer_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(peer_id, None))

    async def _connect(self, peer: Neighbour, relays: Sequence[str]) -> None:
        """Connects directly and, if that takes long, through relays at the same time; the first success counts."""
        attempts: set[asyncio.Task[bool]] = set()
        try:
            if peer.reachable:
                attempts.add(asyncio.create_task(self._dial(peer.peer_id, [], _DIRECT_TIMEOUT_S)))
                finished, attempts = await asyncio.wait(attempts, timeout=_HEAD_START_S)
                if any(task.result() for task in finished):
                    return
            attempts.add(asyncio.create_task(self._dial_through(peer.peer_id, relays if self.use_relays else [])))
            while attempts:
                finished, attempts = await asyncio.wait(attempts, return_when=asyncio.FIRST_COMPLETED)
                if any(task.result() for task in finished):
                    return
        finally:
            for task in attempts:
                task.cancel()

    async def _dial(self, peer_id: str, maddrs: Sequence[str], timeout_s: float) -> bool:
        try:
            await self.daemon.connect_peer(peer_id, maddrs, timeout_s)
        except OSError:
            return False
        return True

    async def _dial_through(self, peer_id: str, relays: Sequence[str]) -> bool:
        for first in range(0, len(relays), _RELAYS_AT_A_TIME):
            circuits = [f"/p2p/{relay}{CIRCUIT}" for relay in relays[first : first + _RELAYS_AT_A_TIME]]
            if await self._dial(peer_id, circuits, _CIRCUIT_TIMEOUT_S):
                return True
        return False

    async def _return(self, peer_id: str) -> None:
        """Returns to a direct connection if the peer answers at an address that it reports."""
        for maddr in await self.maddrs_of(peer_id):
            endpoint = tcp_endpoint(maddr)
            if endpoint is not None and await greets(*endpoint, _PROBE_TIMEOUT_S):
                await self.daemon.disconnect(peer_id)
                with suppress(OSError):  # the next call of `tend` finds the connection missing
                    await self.daemon.connect(maddr, _DIRECT_TIMEOUT_S)
                    return

    def stop(self) -> None:
        """Cancels the attempts that are under way."""
        for task in self._tasks.values():
            task.cancel()
