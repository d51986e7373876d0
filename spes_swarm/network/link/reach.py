"""Checks whether other peers can open connections to this one, by asking connected peers to try.

A peer that is asked opens a plain TCP connection, as any newcomer would, and reads the greeting that every libp2p
listener sends first. It tries only the IP address that the request came from, and a few ports (as AutoNAT does, see
github.com/libp2p/specs/blob/master/autonat/README.md), so no peer can be made to probe a third party.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from spes_swarm.base.address import tcp_endpoint
from spes_swarm.base.errors import ProtocolError
from spes_swarm.metrics import events
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.transport.daemon import Daemon

_GREETING = b"\x13/multistream/1.0.0\n"
_PROBE_TIMEOUT_S = 1.5  # time for one lost packet
_ASK_TIMEOUT_S = 4.0  # longer than a probe whose packets are lost
_MAX_PORTS = 4
_MAX_ASKED = 3
# Between two requests of a peer; a request costs a few packets to its own address.
_MIN_INTERVAL_S = 2.0
_MAX_PROBES = 16
_MAX_REMEMBERED = 4096


async def greets(host: str, port: int, timeout_s: float) -> bool:
    """Returns True if a libp2p peer listens on that port: opens a connection and reads its greeting."""
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port, limit=4096)
            return await reader.readexactly(len(_GREETING)) == _GREETING
    except (OSError, EOFError):
        return False
    finally:
        if writer is not None:
            writer.transport.abort()


@dataclass(frozen=True)
class _Answer:
    """One peer's answer."""

    peer_id: str
    host: str
    open_ports: tuple[int, ...]


def judge(answers: Sequence[_Answer], ports: Sequence[int]) -> events.Reach:
    """Combines the answers: the majority decides, and a tie counts as reachable.

    Peers of the same local network get through where others do not. If any peer asked sees a public address of this
    one, only such answers count.
    """
    public = [answer for answer in answers if ipaddress.ip_address(answer.host).is_global]
    counting = public or list(answers)
    if not counting:
        return events.UNKNOWN_REACH
    through = [answer for answer in counting if answer.open_ports]
    reachable = 2 * len(through) >= len(counting)
    first = through[0] if reachable else next(answer for answer in counting if not answer.open_ports)
    port = first.open_ports[0] if reachable else ports[0]
    address = f"/ip{ipaddress.ip_address(first.host).version}/{first.host}/tcp/{port}"
    return events.Reach(reachable=reachable, address=address, via=tuple(answer.peer_id for answer in counting))


class ReachService:
    """Answers other peers' requests, and sends this peer's own."""

    def __init__(self, daemon: Daemon, rpc: Rpc) -> None:
        self._daemon = daemon
        self._rpc = rpc
        self._asked_at: dict[str, float] = {}
        self._num_probes = 0

    async def start(self) -> None:
        """Registers the handler."""
        await self._rpc.serve("reach", self._serve)

    async def _serve(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        ports = request.get("ports")
        if not (isinstance(ports, list) and 0 < len(ports) <= _MAX_PORTS):
            raise ProtocolError("malformed", f"a reachability request names 1 to {_MAX_PORTS} ports")
        if not all(type(port) is int and 0 < port < 65536 for port in ports):
            raise ProtocolError("malformed", "not a TCP port")
        now = time.monotonic()
        if now - self._asked_at.get(peer_id, -_MIN_INTERVAL_S) < _MIN_INTERVAL_S or self._num_probes >= _MAX_PROBES:
            return {"busy": True}
        while len(self._asked_at) >= _MAX_REMEMBERED:
            del self._asked_at[next(iter(self._asked_at))]
        self._asked_at.pop(peer_id, None)  # the newest is last
        self._asked_at[peer_id] = now
        endpoints = map(tcp_endpoint, (await self._daemon.connections()).get(peer_id, []))
        host = next((endpoint[0] for endpoint in endpoints if endpoint is not None), None)
        if host is None:  # it is connected through a relay, or over UDP
            return {"busy": False}
        self._num_probes += 1
        try:
            found = await asyncio.gather(*(greets(host, port, _PROBE_TIMEOUT_S) for port in ports))
        finally:
            self._num_probes -= 1
        return {"host": host, "open": [port for port, is_open in zip(ports, found, strict=True) if is_open]}

    async def check(self, peers: Collection[str], maddrs: Sequence[str], *, announced: bool = False) -> events.Reach:
        """Asks up to three connected peers whether this one can be reached on the TCP ports of its own addresses.

        If the user has `announced` these, results for other hosts are ignored. Takes as long as the slowest answer, 4 s
        at most; next to no time if all get through, or all are refused.
        """
        endpoints = [endpoint for endpoint in map(tcp_endpoint, maddrs) if endpoint is not None]
        ports = list(dict.fromkeys(port for _, port in endpoints))[:_MAX_PORTS]
        if not ports:
            return events.UNKNOWN_REACH
        answers = await asyncio.gather(*(self._ask(peer, ports) for peer in list(peers)[:_MAX_ASKED]))
        hosts = {host for host, _ in endpoints}
        relevant = [answer for answer in answers if answer is not None and (not announced or answer.host in hosts)]
        return judge(relevant, ports)

    async def _ask(self, peer_id: str, ports: list[int]) -> _Answer | None:
        with suppress(OSError, ProtocolError, ValueError):  # no result: the peer is outdated, busy or gone
            answer = await self._rpc.call(peer_id, "reach", {"ports": ports}, _ASK_TIMEOUT_S)
            host, found = answer.get("host"), answer.get("open")
            if isinstance(host, str) and isinstance(found, list):
                known = tuple(port for port in ports if port in found)
                return _Answer(peer_id, str(ipaddress.ip_address(host)), known)
        return None
