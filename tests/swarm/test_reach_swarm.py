"""Swarms with peers that others cannot reach, and pairs that have no way to each other."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from scripts.testing.forked_peer import ForkServer
from scripts.testing.local_network import LocalNetwork, enter_namespace, unavailable_reason
from scripts.testing.local_peer import PATIENCE_S, LocalPeer
from spes_swarm.base.address import tcp_endpoint
from spes_swarm.network.link import links
from spes_swarm.storage.checkpoint import load_newest
from tests.helpers.home_network import LAN_HOST, HomeNetwork
from tests.helpers.slow_join import sleeping_main
from tests.helpers.swarm import PATIENT, Swarm, equal_digests, swarm
from tests.helpers.tiny_model import tiny_layout

pytestmark = pytest.mark.swarm

_REASON = unavailable_reason()
MOST_ROUNDS = 40
STEP_S = 0.2
needs_namespaces = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))


def _main(arguments: list[str]) -> int:
    # Attempts to do better are rare, since they cost others something; here they are only to be seen.
    links._CLIENT_PAUSE_S = 4.0
    links._MIN_RETURN_S = 8.0
    return sleeping_main(STEP_S, arguments)


def complete_rounds(peers: Sequence[LocalPeer], first: int, count: int) -> int:
    """Waits for `count` rounds in a row, from `first` on, in which all these peers take part and no part is missing.

    On a busy machine a peer may miss a round; the count then restarts. Returns the last round.
    """
    number = first
    in_a_row = 0
    while in_a_row < count:
        assert number < first + MOST_ROUNDS, f"no {count} rounds in a row with all in them"
        events = [peer.wait_for_round(number) for peer in peers]
        if all((e["round"], e["peers"], e["parts_missing"]) == (number, len(peers), 0) for e in events):
            equal_digests(peers, number)
            in_a_row += 1
        else:
            in_a_row = 0
        number += 1
    return number - 1


def first_complete_round(peers: Sequence[LocalPeer], after: int = 0, timeout_s: float = PATIENCE_S) -> int:
    return max(
        int(peer.wait_for("round", lambda e: e["round"] > after and e["peers"] == len(peers), timeout_s)["round"])
        for peer in peers
    )


def next_complete_round(peers: Sequence[LocalPeer]) -> int:
    """One after the first complete round to come."""
    return first_complete_round(peers, max(max(peer.rounds()) for peer in peers)) + 1


def newest_versions(peer: LocalPeer) -> tuple[int, list[int]]:
    """The round of the newest checkpoint, and the versions of its blocks."""
    join = peer.events("join")[0]
    checkpoint, complaints = load_newest(
        peer.output_dir / "checkpoints", join["run_id"], join["peer_id"], tiny_layout()
    )
    assert checkpoint is not None
    assert not complaints
    return checkpoint.meta.round, list(checkpoint.meta.versions)


def test_client_mode_peers_train_their_experts_with_one_public_peer(tmp_path: Path) -> None:
    with swarm(tmp_path, round=PATIENT) as running:
        common = ("--wait-for-peers", 3, "--max-rounds", 4)
        public = running.found(*common, "--experts", "0,1")
        clients = [running.join(*common, "--client-mode", "--experts", experts) for experts in ("2,3,4", "5,6,7")]
        peers = [public, *clients]
        assert [peer.wait() for peer in peers] == [0, 0, 0]
        for number in range(1, 5):
            equal_digests(peers, number)
            for peer in peers:
                assert peer.rounds()[number]["peers"] == 3
                assert peer.rounds()[number]["parts_missing"] == 0
                assert peer.rounds()[number]["experts_covered"] == 8
        # Each expert was changed by the work of its holder in the last round: also on the public peer's disk.
        last, versions = newest_versions(public)
        assert versions == [last] * 9
        assert [peer.events("reach")[0]["reachable"] for peer in clients] == [False, False]
        assert all(not peer.events("join")[0]["maddrs"] for peer in clients)
        assert not [fault for peer in peers for fault in peer.events("fault")]


def test_a_peer_that_comes_back_listens_where_it_did(tmp_path: Path) -> None:
    def port_of(peer: LocalPeer) -> int:
        (maddr,) = peer.wait_for("join")["maddrs"]
        endpoint = tcp_endpoint(maddr)
        assert endpoint is not None
        return endpoint[1]

    with swarm(tmp_path) as running:
        first = running.found()
        port = port_of(first)
        first.kill()
        second = running.found()
        assert port_of(second) == port
        assert second.terminate() == 0
        with socket.create_server(("127.0.0.1", port)):  # somebody else has it now
            third = running.found()
            assert port_of(third) != port
            refused = running.start("peer1", "--config", running.config, "--host-maddrs", f"/ip4/127.0.0.1/tcp/{port}")
            assert refused.wait() == 2
            assert f"/ip4/127.0.0.1/tcp/{port}: the port is in use" in refused.text().splitlines()[-1]


class Forwarder:
    """Passes connections to a port on to another, as a router does that was told to. In a thread, on any host.

    Attributes:
        num_connections: so far.
    """

    def __init__(self, listen: tuple[str, int], target: tuple[str, int], namespace: str | None = None) -> None:
        self._listen, self._target, self._namespace = listen, target, namespace
        self.num_connections = 0
        self.port = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._done = asyncio.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Forwarder:
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        return self

    def __exit__(self, *details: object) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join()

    def _run(self) -> None:
        if self._namespace is not None:
            enter_namespace(self._namespace)
        with closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        tasks: set[asyncio.Task[None]] = set()

        async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while data := await reader.read(1 << 16):
                    writer.write(data)
                    await writer.drain()
            except OSError:
                pass
            finally:
                writer.close()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.num_connections += 1
            try:
                onward = await asyncio.open_connection(*self._target)
            except OSError:
                writer.close()
                return
            for pair in ((reader, onward[1]), (onward[0], writer)):
                tasks.add(asyncio.create_task(copy(*pair)))

        server = await asyncio.start_server(accept, *self._listen)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._done.wait()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_others_use_the_address_that_a_peer_announces(tmp_path: Path) -> None:
    own = free_port()
    with Forwarder(("127.0.0.1", 0), ("127.0.0.1", own)) as forwarder, swarm(tmp_path) as running:
        announced = f"/ip4/127.0.0.1/tcp/{forwarder.port}"
        common = ("--wait-for-peers", 3)
        founder = running.found(*common, "--host-maddrs", f"/ip4/127.0.0.1/tcp/{own}", "--announce-maddrs", announced)
        assert founder.address().startswith(f"{announced}/p2p/")
        second = running.join(*common)
        reach = second.wait_for("reach")
        assert reach["reachable"] is True
        assert reach["address"].startswith("/ip4/127.0.0.1/tcp/")
        assert len(reach["via"]) == 1
        assert forwarder.num_connections >= 1
        before = forwarder.num_connections
        # The third learns the founder's address from the second.
        third = running.join(*common, via=second)
        complete_rounds([founder, second, third], first_complete_round([founder, second, third]), 1)
        assert forwarder.num_connections > before
        (maddr,) = founder.events("join")[0]["maddrs"]
        assert maddr.startswith(f"{announced}/p2p/")
        # A peer on the same machine finds nothing worth saying.
        assert "reachable" not in second.text()
        # Later the founder hears whether it is reachable: when it began there was nobody to ask.
        assert founder.wait_for("reach", lambda e: e["reachable"] is None)["via"] == []
        heard = founder.wait_for("reach", lambda e: e["reachable"] is True)
        assert set(heard["via"]) <= {peer.events("join")[0]["peer_id"] for peer in (second, third)}
        assert heard["via"]


# Swarms of hosts that are namespaces.


class Hosts:
    """Peers on the hosts of a network; peer i is on host i."""

    def __init__(self, swarm: Swarm, network: LocalNetwork) -> None:
        self._swarm = swarm
        self._network = network

    def start(self, host: int, *arguments: Any, name: str | None = None) -> LocalPeer:
        peer = LocalPeer(
            self._swarm.directory / (name or f"host{host}"),
            ["--num-threads", "1", *map(str, arguments)],
            ForkServer(self._network.namespace(host), main=_main),
        )
        self._swarm.peers.append(peer)
        return peer

    def found(self, host: int, *arguments: Any) -> LocalPeer:
        return self.start(host, "--config", self._swarm.config, *arguments)

    def address(self, founder: LocalPeer, host: int) -> str:
        return founder.address(host=self._network.address(host))


@needs_namespaces
def test_two_peers_that_only_reach_a_third_train_together(tmp_path: Path) -> None:
    """What A and B send each other goes through C while they cannot exchange a packet: at first, and once more later.

    In between they can, and stop asking C.
    """
    with LocalNetwork(3) as network, swarm(tmp_path) as running:
        on = Hosts(running, network)
        network.cut([0], [1])
        common = ("--wait-for-peers", 3, "--experts", 3)
        c = on.found(2, *common)
        a, b = (on.start(host, *common, "--initial-peers", on.address(c, 2)) for host in (0, 1))
        peers = [a, b, c]
        for peer in (a, b):
            assert peer.wait_for("link")["relayed"] is True
            assert peer.events("reach")[0]["reachable"] is True  # by C, that is
        last = complete_rounds(peers, first_complete_round(peers) + 1, 2)
        # A and B reduce their share: more than they would send as clients.
        sent = {peer.output_dir.name: peer.rounds()[last]["payload_bytes_sent"] for peer in peers}
        assert min(sent.values()) > 0.6 * max(sent.values()), sent
        network.heal()
        for peer in (a, b):
            peer.wait_for("link", lambda e: not e["relayed"])
        complete_rounds(peers, next_complete_round(peers), 1)
        before = [*a.events("link"), *b.events("link")]
        network.cut([0], [1])
        for peer in (a, b):
            peer.wait_for("link", lambda e: e["relayed"] and e not in before)
        complete_rounds(peers, next_complete_round(peers), 2)


@needs_namespaces
def test_peers_behind_home_routers_notice_it_and_train_as_clients(tmp_path: Path) -> None:
    with HomeNetwork(3, behind_nat=[0, 1]) as network, swarm(tmp_path) as running:
        on = Hosts(running, network)
        common = ("--wait-for-peers", 3, "--experts", 3)
        public = on.found(2, *common)
        homes = [on.start(host, *common, "--initial-peers", on.address(public, 2)) for host in (0, 1)]
        peers = [*homes, public]
        complete_rounds(peers, first_complete_round(peers) + 1, 2)
        for host, home in enumerate(homes):
            event = home.events("reach")[0]
            assert event["reachable"] is False
            assert event["address"].startswith(f"/ip4/{network.address(host)}/tcp/")
            assert event["via"] == [public.events("join")[0]["peer_id"]]
            assert f"not reachable from outside: {network.address(host)} accepts no connections" in home.text()
            assert "others join with" not in home.text()
            # Nobody asked for it, but the two greet each other.
            home.wait_for("link", lambda e: e["relayed"])
        number = max(public.rounds())
        assert homes[0].wait_for_round(number)["payload_bytes_sent"] < public.rounds()[number]["payload_bytes_sent"]


@needs_namespaces
def test_a_port_opened_in_the_router_makes_a_peer_reachable(tmp_path: Path) -> None:
    """Without --announce-maddrs: the address that others see turns out to take connections."""
    with HomeNetwork(2, behind_nat=[0]) as network, swarm(tmp_path) as running:
        network.open_router(0)
        on = Hosts(running, network)
        public = on.found(1, "--wait-for-peers", 2)
        outside = (network.address(0), 31337)
        with Forwarder(outside, (LAN_HOST, 31337), network.router(0)) as forwarder:
            home = on.start(
                0, "--wait-for-peers", 2, "--initial-peers", on.address(public, 1),
                "--host-maddrs", "/ip4/0.0.0.0/tcp/31337",
            )  # fmt: skip
            complete_rounds([public, home], first_complete_round([public, home]) + 1, 1)
            event = home.events("reach")[0]
            assert event["reachable"] is True
            assert event["address"] == f"/ip4/{network.address(0)}/tcp/31337"
            assert home.events("join")[0]["maddrs"][0].startswith(event["address"])
            assert f"--initial-peers {event['address']}/p2p/" in home.text()
            before = forwarder.num_connections
            third = on.start(1, "--initial-peers", on.address(home, 0), name="third")
            third.wait_for("join")
            assert forwarder.num_connections > before
