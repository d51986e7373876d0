"""Who is called when records appear; the clock and the calls are the test's."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from spes_swarm.network.link import peer_greeter
from spes_swarm.network.link.known_peers import KnownPeers
from spes_swarm.network.link.peer_greeter import PeerGreeter
from spes_swarm.protocol.members.roster import Roster
from tests.helpers.records import progress
from tests.helpers.rounds import identity


def test_silent_records_keep_nobody_from_being_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 identities that never answer, and two honest peers whose records come last."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(peer_greeter, "time", SimpleNamespace(monotonic=lambda: clock.now))
    roster = Roster("me")
    called: list[str] = []

    async def never(peer_id: str, method: str, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        called.append(peer_id)
        await hang_up[-1].wait()
        raise TimeoutError

    hang_up: list[asyncio.Event] = []

    async def look_around() -> None:
        hang_up.append(asyncio.Event())
        rpc: Any = SimpleNamespace(call=never)
        known_peers: Any = SimpleNamespace(of=lambda peers: [])
        nowhere: Any = None
        greeter = PeerGreeter(rpc, roster, known_peers, list, nowhere)
        ghosts = {f"ghost{i}": progress() for i in range(200)}
        greeter.greet_soon(roster.update(ghosts))
        greeter.greet_soon(roster.update({**ghosts, "a": progress(), "b": progress()}))
        for _ in range(8):  # the calls under way end, and their places are free
            await asyncio.sleep(0.01)
            hang_up[-1].set()
            await asyncio.sleep(0.01)
            hang_up.append(asyncio.Event())
            clock.now += 12.0
            greeter.greet_soon([])
        await asyncio.sleep(0.01)
        hang_up[-1].set()

    asyncio.run(look_around())
    assert {"a", "b"} <= set(called)
    assert len(set(called)) == len(roster.peers)


def test_all_addresses_of_a_peer_are_kept() -> None:
    peer = identity(1).peer_id
    maddrs = [f"/ip4/{host}/tcp/4001/p2p/{peer}" for host in ("127.0.0.1", "172.17.0.1")]
    assert KnownPeers([*maddrs, *maddrs[:1]]).of([peer]) == maddrs
