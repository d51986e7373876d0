"""Circuits through a third peer, for pairs that cannot connect directly."""

from __future__ import annotations

import asyncio

import pytest
from hivemind.p2p import P2P, PeerID

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.relay import HOP, Relay, Status, decode, encode
from tests.helpers.hosts import Host, hosts, run

pytestmark = pytest.mark.slow


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
            size = await asyncio.wait_for(reader.readexactly(1), 60)
            answer: bytes = await asyncio.wait_for(reader.readexactly(size[0]), 60)
            with pytest.raises(TimeoutError):  # the relay leaves it to the source to close the stream
                await asyncio.wait_for(reader.read(1), 0.2)
            return answer
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
                assert decode(answer) == {1: 2, 5: status}, message
            assert decode(await ask(b, c, b"\xff\xff\x03"))[5] == Status.MALFORMED_MESSAGE  # its length
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
