"""Connections to other peers: directly if possible, otherwise through a relay."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from spes_swarm.network.link.links import Links
from spes_swarm.protocol.members.reputation import Neighbour
from tests.helpers.hosts import hosts, run


class FakeDaemon:
    """What Links needs of a daemon: who is connected how, and which dials succeed."""

    def __init__(self) -> None:
        self.peers: dict[str, list[str]] = {}
        self.ways: set[str] = set()  # dials that succeed: "direct" or the relay's id
        self.dials: list[tuple[str, str]] = []

    async def connections(self) -> dict[str, list[str]]:
        return {peer: list(maddrs) for peer, maddrs in self.peers.items()}

    async def connect_peer(self, peer_id: str, maddrs: Sequence[str], timeout_s: float) -> None:
        del timeout_s
        for maddr in maddrs or ["direct"]:
            way = maddr.split("/")[2] if maddrs else maddr
            self.dials.append((peer_id, way))
            if way in self.ways:
                self.peers[peer_id] = [f"{maddr}/p2p/{peer_id}" if maddrs else f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id}"]
                return
        raise ConnectionError("no way")

    async def connect(self, maddr: str, timeout_s: float) -> str:
        peer_id = maddr.rpartition("/p2p/")[2]
        await self.connect_peer(peer_id, [], timeout_s)
        return peer_id

    async def disconnect(self, peer_id: str) -> None:
        del self.peers[peer_id]


class Bench:
    """Links of a peer with a public member C, which it is connected to, and one more."""

    def __init__(self, other: Neighbour, *, use_relays: bool = True, maddrs: Sequence[str] = ()) -> None:
        self.daemon = FakeDaemon()
        self.daemon.peers["C"] = ["/ip4/127.0.0.1/tcp/2/p2p/C"]
        self.members = [other, Neighbour("C", True)]
        self.told: list[tuple[str, bool]] = []
        self._maddrs = list(maddrs)
        self.links = Links(
            self.daemon,  # type: ignore[arg-type]
            use_relays=use_relays,
            maddrs_of=self.maddrs_of,
            on_link=lambda peer_id, relayed: self.told.append((peer_id, relayed)),
        )

    async def maddrs_of(self, peer_id: str) -> list[str]:
        del peer_id
        return self._maddrs

    async def tend(self, *, reachable: bool = True, busy: bool = False) -> None:
        """One look at the connections, and what comes of it; the pauses between attempts are skipped."""
        for table in (self.links._attempts, self.links._returns):
            for attempts in table.values():
                attempts.next_at = 0.0
        await self.links.tend(self.members, reachable=reachable, busy=busy)
        while self.links._tasks:
            await asyncio.gather(*self.links._tasks.values())


def test_a_direct_way_is_tried_first_and_a_relay_only_then() -> None:
    async def scenario() -> None:
        bench = Bench(Neighbour("A", True))
        bench.daemon.ways = {"direct", "C"}
        await bench.tend()
        assert bench.daemon.dials == [("A", "direct")]
        await bench.tend()
        assert not bench.told
        bench.daemon.peers.pop("A")
        bench.daemon.ways = {"C"}
        await bench.tend()
        assert bench.daemon.dials[1:] == [("A", "direct"), ("A", "C")]
        await bench.tend()
        assert bench.told == [("A", True)]

    run(scenario)


@pytest.mark.slow
def test_a_relayed_link_becomes_direct_again_but_not_during_a_round() -> None:
    async def scenario() -> None:
        async with hosts(1) as (listening,):
            a = listening.peer_id
            bench = Bench(Neighbour(a, True), maddrs=[f"/ip4/127.0.0.1/tcp/9/p2p/{a}", *await listening.maddrs()])
            bench.daemon.ways = {"C"}
            await bench.tend()
            await bench.tend(busy=True)
            bench.daemon.ways = {"direct"}
            await bench.tend(busy=True)
            assert bench.told == [(a, True)]
            await bench.tend()
            await bench.tend()
            assert bench.told == [(a, True), (a, False)]
            assert bench.daemon.dials[-1] == (a, "direct")

    run(scenario)


def test_clients_wait_to_be_linked_and_many_of_them_are_not_linked_to_each_other() -> None:
    async def scenario() -> None:
        bench = Bench(Neighbour("A", False))
        bench.daemon.ways = {"C"}
        await bench.links.tend(bench.members, reachable=True, busy=False)
        assert not bench.daemon.dials  # A opens the connection itself, in a moment
        await bench.tend(reachable=False)
        assert bench.daemon.dials == [("A", "C")]  # directly it cannot be reached
        bench.daemon.dials.clear()
        bench.members += [Neighbour(f"client {i}", False) for i in range(16)]
        bench.daemon.peers.pop("A")
        await bench.tend(reachable=False)
        await bench.tend(reachable=False)
        assert not bench.daemon.dials

    run(scenario)


def test_without_relays_no_circuit_is_used() -> None:
    async def scenario() -> None:
        bench = Bench(Neighbour("A", True), use_relays=False)
        bench.daemon.ways = {"C"}
        await bench.tend()
        await bench.tend()
        assert bench.daemon.dials == [("A", "direct")] * 2

    run(scenario)
