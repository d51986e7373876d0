"""Peers that others cannot reach, and pairs that have no way to each other: checks, circuits, clients, ports."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from hivemind.p2p import P2P, PeerID

from spes_swarm.checkpoint import load_newest
from spes_swarm.daemon import Daemon, bootstrap, listen_again, port_is_free
from spes_swarm.errors import AddressError, ProtocolError
from spes_swarm.forked_peer import ForkServer
from spes_swarm.links import Links
from spes_swarm.local_network import LAN_HOST, LocalNetwork, enter_namespace, unavailable_reason
from spes_swarm.local_peer import LocalPeer
from spes_swarm.reach import UNKNOWN, Reach, ReachService, _Answer, greets, judge, tcp_endpoint
from spes_swarm.relay import HOP, Relay, Status, decode, encode
from spes_swarm.rendezvous import Neighbour
from spes_swarm.rpc import RemoteError, Rpc
from spes_swarm.run_directory import RunDirectory
from tests.rounds import identity
from tests.swarm import Swarm, equal_digests, swarm
from tests.test_swarm import tiny_layout

_REASON = unavailable_reason()
needs_namespaces = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))

# What others say about a peer.


def answer(host: str, *open_ports: int, who: str = "A") -> _Answer:
    return _Answer(who, host, open_ports)


def test_the_majority_of_those_asked_decides_whether_a_peer_is_reachable() -> None:
    yes, no = answer("8.8.8.8", 7), answer("8.8.8.8")
    assert judge([yes, no, no], [7]) == Reach(False, "/ip4/8.8.8.8/tcp/7", ("A", "A", "A"))
    assert judge([no, yes, yes], [7]).reachable
    assert judge([no, yes], [7]).reachable  # somebody did get through
    assert judge([no], [7]).reachable is False
    assert judge([], [7]) == UNKNOWN


def test_peers_of_the_same_local_network_have_no_say_when_others_were_asked() -> None:
    local, remote = answer("192.168.0.9", 7, who="L"), answer("8.8.8.8", who="R")
    assert judge([local, local, remote], [7]) == Reach(False, "/ip4/8.8.8.8/tcp/7", ("R",))
    assert judge([local], [7]) == Reach(True, "/ip4/192.168.0.9/tcp/7", ("L",))
    assert judge([answer("2001:4860::1", 9)], [7, 9]).address == "/ip6/2001:4860::1/tcp/9"


def test_only_what_matters_is_told_to_the_user() -> None:
    assert UNKNOWN.describe() == []
    assert Reach(True, "/ip4/127.0.0.1/tcp/7", ("A",)).describe() == []
    assert Reach(False, None, ()).describe() == []
    (line,) = Reach(True, "/ip4/8.8.8.8/tcp/7", ("A", "B")).describe()
    assert line == "reachable at /ip4/8.8.8.8/tcp/7 (tried by 2 peers)"
    found, advice = Reach(False, "/ip4/8.8.8.8/tcp/7", ("A",)).describe()
    assert "not reachable from outside: 8.8.8.8 takes no connections on TCP port 7" in found
    assert "open TCP port 7" in advice
    assert "--announce-maddrs" in advice


def test_endpoints_are_plain_ip_addresses_with_a_tcp_port() -> None:
    peer = identity(0).peer_id
    assert tcp_endpoint(f"/ip4/1.2.3.4/tcp/5/p2p/{peer}") == ("1.2.3.4", 5)
    assert tcp_endpoint("/ip6/::1/tcp/5") == ("::1", 5)
    for maddr in (
        "/ip4/1.2.3.4/udp/5/quic",
        "/dns4/example.org/tcp/5",
        f"/ip4/1.2.3.4/tcp/5/p2p/{peer}/p2p-circuit",
        "rubbish",
    ):
        assert tcp_endpoint(maddr) is None


# Ports.


def test_a_port_is_free_unless_somebody_listens_on_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not port_is_free(f"/ip4/127.0.0.1/tcp/{port}")
        assert not port_is_free(f"/ip4/0.0.0.0/tcp/{port}")
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # so that this side of the connection lingers
        client.close()
    assert port_is_free(f"/ip4/127.0.0.1/tcp/{port}", 5.0)
    assert port_is_free("/ip4/127.0.0.1/tcp/0")
    assert port_is_free("/ip4/127.0.0.1/udp/5/quic")


def test_the_port_of_the_last_stay_is_used_where_the_system_would_choose() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listen_again(["/ip4/127.0.0.1/tcp/0"], port) == ["/ip4/127.0.0.1/tcp/0"]  # it is taken
    assert listen_again(["/ip4/127.0.0.1/tcp/0"], port) == [f"/ip4/127.0.0.1/tcp/{port}"]
    assert listen_again(["/ip4/127.0.0.1/tcp/0"], None) == ["/ip4/127.0.0.1/tcp/0"]
    assert listen_again(["/ip4/127.0.0.1/tcp/80"], port) == ["/ip4/127.0.0.1/tcp/80"]
    two = ["/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0"]
    assert listen_again(two, port) == two


@pytest.mark.parametrize("damage", ["", "x", "-1", "0", "70000", "9" * 5000, "\0", "é"])
def test_a_damaged_port_file_is_no_port(tmp_path: Path, damage: str) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.known_port() is None
    directory.remember_port(31337)
    assert directory.known_port() == 31337
    (tmp_path / "port").write_text(damage, encoding="utf-8")
    assert directory.known_port() is None


# Real daemons on this machine, without training.


class Host:
    """A daemon with the services around it."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.peer_id = daemon.peer_id
        self.faults: list[ProtocolError] = []
        self.rpc = Rpc(daemon.p2p, lambda peer_id, error: self.faults.append(error))
        self.reach = ReachService(daemon, self.rpc)
        self.received = 0

    async def start(self) -> None:
        await self.rpc.start()
        await self.reach.start()

    async def maddrs(self) -> list[str]:
        return [maddr for maddr in await self.daemon.maddrs() if "127.0.0.1" in maddr]

    async def connect(self, other: Host) -> None:
        await bootstrap(self.daemon, await other.maddrs(), 20.0)

    async def listen(self) -> None:
        """Counts what arrives on streams named `sink`, and says how much it was."""

        async def serve(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            size = int.from_bytes(await reader.readexactly(8), "big")
            while self.received < size:
                self.received += len(await reader.read(1 << 16))
            writer.write(b"done")
            writer.close()

        await self.daemon.p2p.add_binary_stream_handler("sink", serve)

    async def send(self, other: Host, size: int) -> str:
        """Sends so many bytes and waits until all have arrived; returns the address at the other end."""
        p2p: P2P = self.daemon.p2p
        info, reader, writer = await p2p.call_binary_stream_handler(PeerID.from_base58(other.peer_id), "sink")
        writer.write(size.to_bytes(8, "big"))
        for start in range(0, size, 1 << 16):
            writer.write(bytes(min(1 << 16, size - start)))
            await writer.drain()
        assert await asyncio.wait_for(reader.readexactly(4), 60) == b"done"
        writer.close()
        return str(info.addr)


@asynccontextmanager
async def hosts(count: int, clients: Collection[int] = ()) -> AsyncIterator[list[Host]]:
    """Daemons that know nothing of each other yet; those that are clients do not listen."""
    async with AsyncExitStack() as stack:
        started: list[Host] = []
        for number in range(count):
            maddrs = ["/ip4/127.0.0.1/tcp/0"]
            host = Host(await Daemon.start(identity(number).path, maddrs, client_mode=number in clients))
            stack.push_async_callback(host.daemon.stop)
            await host.start()
            started.append(host)
        yield started


def run(scenario: Callable[[], Any], timeout_s: float = 120.0) -> None:
    asyncio.run(asyncio.wait_for(scenario(), timeout_s))


def test_two_daemons_never_share_a_port() -> None:
    """p2pd itself would start and take half of the other's connections."""

    async def scenario() -> None:
        async with hosts(1) as (one,):
            endpoint = tcp_endpoint((await one.maddrs())[0])
            assert endpoint is not None
            with pytest.raises(AddressError, match="the port is in use"):
                await Daemon.start(identity(1).path, [f"/ip4/127.0.0.1/tcp/{endpoint[1]}"])

    run(scenario)


def test_a_peer_is_told_whether_its_port_takes_connections() -> None:
    async def scenario() -> None:
        async with hosts(2) as (asking, asked):
            maddrs = await asking.maddrs()
            endpoint = tcp_endpoint(maddrs[0])
            assert endpoint is not None
            assert await asking.reach.check([], maddrs) == UNKNOWN
            await asking.connect(asked)
            found = await asking.reach.check([asked.peer_id], maddrs)
            assert found == Reach(True, f"/ip4/127.0.0.1/tcp/{endpoint[1]}", (asked.peer_id,))
            # Once in a while is enough: a second question at once is not answered, and no fault either.
            assert await asking.reach.check([asked.peer_id], maddrs) == UNKNOWN
            await asyncio.sleep(2.1)
            with socket.create_server(("127.0.0.1", 0)) as other:  # somebody listens there, but it is not libp2p
                silent = f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}"
                assert not await greets("127.0.0.1", other.getsockname()[1], 0.5)
                found = await asking.reach.check([asked.peer_id], [silent])
                assert found == Reach(False, silent, (asked.peer_id,))
            assert not asking.faults
            assert not asked.faults

    run(scenario)


def test_nobody_is_made_to_knock_at_another_host() -> None:
    """Only the ports come from the question; its address is the one that the connection comes from."""

    async def scenario() -> None:
        async with hosts(2) as (asking, asked):
            await asking.connect(asked)
            call = asking.rpc.call
            given = await call(asked.peer_id, "reach", {"ports": [1], "host": "192.0.2.1"}, 10.0)
            assert given == {"host": "127.0.0.1", "open": []}
            for ports in ([], [0], [65536], [True], ["80"], list(range(1, 6)), "80", None, [1.0]):
                with pytest.raises(RemoteError):
                    await call(asked.peer_id, "reach", {"ports": ports}, 10.0)
            assert {fault.kind for fault in asked.faults} == {"malformed"}

    run(scenario)


def test_what_the_user_announces_is_not_judged_at_another_address() -> None:
    async def scenario() -> None:
        async with hosts(2) as (asking, asked):
            await asking.connect(asked)
            announced = ["/ip4/192.0.2.1/tcp/31337"]
            assert await asking.reach.check([asked.peer_id], announced, announced=True) == UNKNOWN

    run(scenario)


# Circuits.


def test_relay_messages_are_protobufs() -> None:
    message = encode([(1, 300), (2, encode([(1, b"peer")])), (5, Status.OK)])
    assert decode(message) == {1: 300, 2: b"\x0a\x04peer", 5: 100}
    assert decode(b"") == {}
    for damaged in (message[:-1], message[:5], b"\xff" * 20, b"\x0d\0\0\0\0", b"\x0a\x7f"):
        with pytest.raises(ProtocolError):
            decode(damaged)


def relay(host: Host, *members: Host, enabled: bool = True) -> Relay:
    made = Relay(host.daemon, enabled=enabled)
    known = {member.peer_id for member in members}
    made.admits = known.__contains__
    return made


async def circuit(source: Host, target: Host, through: Host) -> None:
    await source.daemon.connect_peer(target.peer_id, [f"/p2p/{through.peer_id}/p2p-circuit"], 20.0)


def test_a_circuit_carries_megabytes_and_only_the_ends_can_read_them() -> None:
    """p2pd's own relay ends a circuit after 128 KiB."""

    async def scenario() -> None:
        async with hosts(3, clients=(0, 1)) as (a, b, c):
            service = relay(c, a, b)
            await service.start()
            await a.listen()
            for end in (a, b):
                await end.connect(c)
            await circuit(b, a, c)
            at = await b.send(a, 8_000_000)
            assert at.endswith(f"/p2p/{c.peer_id}/p2p-circuit")
            assert a.received == 8_000_000
            assert 8_000_000 < service.bytes_relayed < 9_000_000
            assert all("p2p-circuit" in maddr for maddr in (await a.daemon.connections())[b.peer_id])
            # Calls pass in the other direction, too.
            assert (await a.rpc.call(b.peer_id, "reach", {"ports": [1]}, 20.0)) == {"busy": False}

    run(scenario)


@pytest.mark.parametrize("who", ["the source", "the target", "nobody", "switched off"])
def test_only_members_are_relayed(who: str) -> None:
    async def scenario() -> None:
        async with hosts(3, clients=(0, 1)) as (a, b, c):
            members = {"the source": [b], "the target": [a], "nobody": [], "switched off": [a, b]}[who]
            await relay(c, *members, enabled=who != "switched off").start()
            for end in (a, b):
                await end.connect(c)
            with pytest.raises(ConnectionError, match="PERMISSION_DENIED"):
                await circuit(b, a, c)
            assert a.peer_id not in await b.daemon.connections()

    run(scenario)


def test_rubbish_is_refused_and_the_relay_goes_on() -> None:
    async def ask(source: Host, through: Host, request: bytes) -> bytes:
        p2p: P2P = source.daemon.p2p
        _, reader, writer = await p2p.call_binary_stream_handler(PeerID.from_base58(through.peer_id), HOP)
        writer.write(request)
        try:
            return await asyncio.wait_for(reader.read(), 60)
        finally:
            writer.close()

    async def scenario() -> None:
        async with hosts(3, clients=(0, 1)) as (a, b, c):
            await relay(c, a, b).start()
            await a.listen()
            for end in (a, b):
                await end.connect(c)
            target = encode([(1, PeerID.from_base58(a.peer_id).to_bytes())])
            itself = encode([(1, PeerID.from_base58(b.peer_id).to_bytes())])
            for message, status in (
                (encode([(1, 0)]), Status.RESERVATION_REFUSED),
                (encode([(1, 2), (2, target)]), Status.RESERVATION_REFUSED),
                (encode([(1, 1)]), Status.MALFORMED_MESSAGE),
                (encode([(1, 1), (2, 7)]), Status.MALFORMED_MESSAGE),
                (encode([(1, 1), (2, b"\xff\xff")]), Status.MALFORMED_MESSAGE),
                (encode([(1, 1), (2, encode([(1, b"")]))]), Status.PERMISSION_DENIED),
                (encode([(1, 1), (2, itself)]), Status.PERMISSION_DENIED),
                (b"\xff" * 50, Status.MALFORMED_MESSAGE),
            ):
                answer = await ask(b, c, bytes([len(message)]) + message)
                assert decode(answer[1:]) == {1: 2, 5: status}, message
            assert decode((await ask(b, c, b"\xff\xff\x03"))[1:])[5] == Status.MALFORMED_MESSAGE  # its length
            await circuit(b, a, c)
            await b.send(a, 1000)

    run(scenario)


def test_a_relay_that_is_not_connected_to_the_target_says_so() -> None:
    async def scenario() -> None:
        async with hosts(3) as (a, b, c):
            await relay(c, a, b).start()
            await b.connect(c)
            with pytest.raises(ConnectionError, match="CONNECTION_FAILED"):
                await circuit(b, a, c)

    run(scenario)


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


# Whole swarms.


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def complete_rounds(peers: Sequence[LocalPeer], first: int, count: int, timeout_s: float = 240.0) -> None:
    """Waits for rounds with all these peers in them and nothing missing, `count` in a row, from `first` on."""
    for number in range(first, first + count):
        for peer in peers:
            event = peer.wait_for_round(number, timeout_s)
            assert event["round"] == number
            assert event["peers"] == len(peers)
            assert event["parts_missing"] == 0
        equal_digests(peers, number)


def first_complete_round(peers: Sequence[LocalPeer], after: int = 0, timeout_s: float = 240.0) -> int:
    return max(
        int(peer.wait_for("round", lambda e: e["round"] > after and e["peers"] == len(peers), timeout_s)["round"])
        for peer in peers
    )


def newest_versions(peer: LocalPeer) -> tuple[int, list[int]]:
    """The round of the newest checkpoint, and the versions of its blocks."""
    join = peer.events("join")[0]
    checkpoint, complaints = load_newest(
        peer.output_dir / "checkpoints", join["run_id"], join["peer_id"], tiny_layout()
    )
    assert checkpoint is not None
    assert not complaints
    return checkpoint.meta.round, list(checkpoint.meta.versions)


@pytest.mark.swarm
def test_client_mode_peers_train_their_experts_with_one_public_peer(tmp_path: Path) -> None:
    with swarm(tmp_path) as running:
        common = ("--wait-for-peers", 3, "--max-rounds", 8)
        public = running.found(*common, "--experts", "0,1")
        clients = [running.join(*common, "--client-mode", "--experts", experts) for experts in ("2,3,4", "5,6,7")]
        peers = [public, *clients]
        assert [peer.wait(240) for peer in peers] == [0, 0, 0]
        for number in range(1, 9):
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


@pytest.mark.swarm
def test_peers_on_one_machine_find_nothing_worth_saying(tmp_path: Path) -> None:
    with swarm(tmp_path) as running:
        running.found()
        other = running.join()
        event = other.wait_for("reach")
        assert event["reachable"] is True
        assert event["address"].startswith("/ip4/127.0.0.1/tcp/")
        assert len(event["via"]) == 1
        other.wait_for_round(1)
        assert "reachable" not in other.text()
        # Later the founder hears it, too: when it began there was nobody to ask.
        first = running.peers[0].wait_for("reach", lambda e: e["reachable"] is None)
        second = running.peers[0].wait_for("reach", lambda e: e["reachable"] is True)
        assert first["via"] == []
        assert second["via"] == [other.events("join")[0]["peer_id"]]


@pytest.mark.swarm
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
        assert self._ready.wait(30.0)
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


@pytest.mark.swarm
def test_others_use_the_address_that_a_peer_announces(tmp_path: Path) -> None:
    own = free_port()
    with Forwarder(("127.0.0.1", 0), ("127.0.0.1", own)) as forwarder, swarm(tmp_path) as running:
        announced = f"/ip4/127.0.0.1/tcp/{forwarder.port}"
        common = ("--wait-for-peers", 3)
        founder = running.found(*common, "--host-maddrs", f"/ip4/127.0.0.1/tcp/{own}", "--announce-maddrs", announced)
        assert founder.address().startswith(f"{announced}/p2p/")
        second = running.join(*common)
        second.wait_for("reach")
        assert forwarder.num_connections >= 1
        before = forwarder.num_connections
        # The third learns the founder's address from the second.
        third = running.join(*common, via=second)
        complete_rounds([founder, second, third], first_complete_round([founder, second, third]), 2)
        assert forwarder.num_connections > before
        (maddr,) = founder.events("join")[0]["maddrs"]
        assert maddr.startswith(f"{announced}/p2p/")


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
            ForkServer(self._network.namespace(host)),
        )
        self._swarm.peers.append(peer)
        return peer

    def found(self, host: int, *arguments: Any) -> LocalPeer:
        return self.start(host, "--config", self._swarm.config, *arguments)

    def address(self, founder: LocalPeer, host: int) -> str:
        return founder.address(host=self._network.address(host))


@needs_namespaces
@pytest.mark.swarm
def test_two_peers_that_only_reach_a_third_train_together(tmp_path: Path) -> None:
    """A and B cannot exchange a packet; what they send each other goes through C. Later they can, and stop asking C."""
    with LocalNetwork(3) as network, swarm(tmp_path) as running:
        on = Hosts(running, network)
        network.cut([0], [1])
        common = ("--wait-for-peers", 3, "--experts", 3)
        c = on.found(2, *common)
        a, b = (on.start(host, *common, "--initial-peers", on.address(c, 2)) for host in (0, 1))
        peers = [a, b, c]
        for peer in (a, b):
            assert peer.wait_for("link", timeout_s=240.0)["relayed"] is True
            assert peer.events("reach")[0]["reachable"] is True  # by C, that is
        first = first_complete_round(peers)
        complete_rounds(peers, first + 1, 6)
        # A and B reduce their share: more than they would send as clients.
        sent = {peer.output_dir.name: peer.rounds()[first + 3]["payload_bytes_sent"] for peer in peers}
        assert min(sent.values()) > 0.6 * max(sent.values()), sent
        network.heal()
        for peer in (a, b):
            peer.wait_for("link", lambda e: not e["relayed"], timeout_s=300.0)
        complete_rounds(peers, first_complete_round(peers, max(max(peer.rounds()) for peer in peers)) + 1, 2)


@needs_namespaces
@pytest.mark.swarm
def test_a_way_that_is_lost_during_the_run_is_replaced(tmp_path: Path) -> None:
    with LocalNetwork(3) as network, swarm(tmp_path) as running:
        on = Hosts(running, network)
        common = ("--wait-for-peers", 3, "--experts", 3)
        c = on.found(2, *common)
        peers = [on.start(host, *common, "--initial-peers", on.address(c, 2)) for host in (0, 1)] + [c]
        complete_rounds(peers, first_complete_round(peers) + 1, 2)
        network.cut([0], [1])
        for peer in peers[:2]:
            peer.wait_for("link", lambda e: e["relayed"], timeout_s=240.0)
        newest = max(max(peer.rounds()) for peer in peers)
        complete_rounds(peers, first_complete_round(peers, newest) + 1, 4)


@needs_namespaces
@pytest.mark.swarm
def test_peers_behind_home_routers_notice_it_and_train_as_clients(tmp_path: Path) -> None:
    with LocalNetwork(3, behind_nat=[0, 1]) as network, swarm(tmp_path) as running:
        on = Hosts(running, network)
        common = ("--wait-for-peers", 3, "--experts", 3)
        public = on.found(2, *common)
        homes = [on.start(host, *common, "--initial-peers", on.address(public, 2)) for host in (0, 1)]
        peers = [*homes, public]
        complete_rounds(peers, first_complete_round(peers) + 1, 4)
        for host, home in enumerate(homes):
            event = home.events("reach")[0]
            assert event["reachable"] is False
            assert event["address"].startswith(f"/ip4/{network.address(host)}/tcp/")
            assert event["via"] == [public.events("join")[0]["peer_id"]]
            assert f"not reachable from outside: {network.address(host)} takes no connections" in home.text()
            assert "others join with" not in home.text()
            # Nobody asked for it, but moments of experts may have to pass between the two.
            home.wait_for("link", lambda e: e["relayed"], timeout_s=240.0)
        number = max(public.rounds())
        assert homes[0].wait_for_round(number)["payload_bytes_sent"] < public.rounds()[number]["payload_bytes_sent"]


@needs_namespaces
@pytest.mark.swarm
def test_a_port_opened_in_the_router_makes_a_peer_reachable(tmp_path: Path) -> None:
    """Without --announce-maddrs: the address that others see turns out to take connections."""
    with LocalNetwork(2, behind_nat=[0]) as network, swarm(tmp_path) as running:
        network.open_router(0)
        on = Hosts(running, network)
        public = on.found(1, "--wait-for-peers", 2)
        outside = (network.address(0), 31337)
        with Forwarder(outside, (LAN_HOST, 31337), network.router(0)) as forwarder:
            home = on.start(
                0, "--wait-for-peers", 2, "--initial-peers", on.address(public, 1),
                "--host-maddrs", "/ip4/0.0.0.0/tcp/31337",
            )  # fmt: skip
            complete_rounds([public, home], first_complete_round([public, home]) + 1, 2)
            event = home.events("reach")[0]
            assert event["reachable"] is True
            assert event["address"] == f"/ip4/{network.address(0)}/tcp/31337"
            assert home.events("join")[0]["maddrs"][0].startswith(event["address"])
            assert f"--initial-peers {event['address']}/p2p/" in home.text()
            before = forwarder.num_connections
            third = on.start(1, "--initial-peers", on.address(home, 0), name="third")
            third.wait_for("join", timeout_s=240.0)
            assert forwarder.num_connections > before
