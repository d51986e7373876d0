"""Can others reach this peer: what those asked say, what it is told, and the ports it listens on."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from spes_swarm.base.address import tcp_endpoint
from spes_swarm.base.errors import AddressError
from spes_swarm.metrics.events import UNKNOWN_REACH, Reach
from spes_swarm.network.link.reach import _Answer, greets, judge
from spes_swarm.network.link.rpc import RemoteError
from spes_swarm.network.transport.daemon import Daemon, listen_again, port_is_free
from spes_swarm.storage.run_directory import RunDirectory
from tests.helpers.hosts import hosts, run
from tests.helpers.rounds import identity

# What others say about a peer.


def answer(host: str, *open_ports: int, who: str = "A") -> _Answer:
    return _Answer(who, host, open_ports)


def test_the_majority_of_those_asked_decides_whether_a_peer_is_reachable() -> None:
    yes, no = answer("8.8.8.8", 7), answer("8.8.8.8")
    assert judge([yes, no, no], [7]) == Reach(reachable=False, address="/ip4/8.8.8.8/tcp/7", via=("A", "A", "A"))
    assert judge([no, yes, yes], [7]).reachable
    assert judge([no, yes], [7]).reachable  # somebody did get through
    assert judge([no], [7]).reachable is False
    assert judge([], [7]) == UNKNOWN_REACH


def test_peers_of_the_same_local_network_have_no_say_when_others_were_asked() -> None:
    local, remote = answer("192.168.0.9", 7, who="L"), answer("8.8.8.8", who="R")
    assert judge([local, local, remote], [7]) == Reach(reachable=False, address="/ip4/8.8.8.8/tcp/7", via=("R",))
    assert judge([local], [7]) == Reach(reachable=True, address="/ip4/192.168.0.9/tcp/7", via=("L",))
    assert judge([answer("2001:4860::1", 9)], [7, 9]).address == "/ip6/2001:4860::1/tcp/9"


def test_only_what_matters_is_told_to_the_user() -> None:
    assert UNKNOWN_REACH.describe() == []
    assert Reach(reachable=True, address="/ip4/127.0.0.1/tcp/7", via=("A",)).describe() == []
    assert Reach(reachable=False, address=None, via=()).describe() == []
    (line,) = Reach(reachable=True, address="/ip4/8.8.8.8/tcp/7", via=("A", "B")).describe()
    assert line == "reachable at /ip4/8.8.8.8/tcp/7 (tried by 2 peers)"
    found, advice = Reach(reachable=False, address="/ip4/8.8.8.8/tcp/7", via=("A",)).describe()
    assert "not reachable from outside: 8.8.8.8 accepts no connections on TCP port 7" in found
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
    assert port_is_free("/ip4/127.0.0.1/udp/5/quic-v1")


@pytest.mark.slow
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


# Real daemons.


@pytest.mark.slow
def test_two_daemons_never_share_a_port() -> None:
    """p2pd itself would start and take half of the other's connections."""

    async def scenario() -> None:
        async with hosts(1) as (one,):
            endpoint = tcp_endpoint((await one.maddrs())[0])
            assert endpoint is not None
            with pytest.raises(AddressError, match="the port is in use"):
                await Daemon.start(identity(1).path, [f"/ip4/127.0.0.1/tcp/{endpoint[1]}"])

    run(scenario)


@pytest.mark.slow
def test_a_peer_is_told_whether_its_port_takes_connections() -> None:
    async def scenario() -> None:
        async with hosts(2) as (asking, asked):
            maddrs = await asking.maddrs()
            endpoint = tcp_endpoint(maddrs[0])
            assert endpoint is not None
            assert await asking.reach.check([], maddrs) == UNKNOWN_REACH
            await asking.connect(asked)
            found = await asking.reach.check([asked.peer_id], maddrs)
            assert found == Reach(reachable=True, address=f"/ip4/127.0.0.1/tcp/{endpoint[1]}", via=(asked.peer_id,))
            # Once in a while is enough: a second question at once is not answered, and no fault either.
            assert await asking.reach.check([asked.peer_id], maddrs) == UNKNOWN_REACH
            await asyncio.sleep(2.1)
            with socket.create_server(("127.0.0.1", 0)) as other:  # somebody listens there, but it is not libp2p
                silent = f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}"
                assert not await greets("127.0.0.1", other.getsockname()[1], 0.5)
                found = await asking.reach.check([asked.peer_id], [silent])
                assert found == Reach(reachable=False, address=silent, via=(asked.peer_id,))
            assert not asking.faults
            assert not asked.faults

    run(scenario)


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_the_user_announces_is_not_judged_at_another_address() -> None:
    async def scenario() -> None:
        async with hosts(2) as (asking, asked):
            await asking.connect(asked)
            announced = ["/ip4/192.0.2.1/tcp/31337"]
            assert await asking.reach.check([asked.peer_id], announced, announced=True) == UNKNOWN_REACH

    run(scenario)
