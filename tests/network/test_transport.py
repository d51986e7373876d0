"""What every transport does, through real daemons and in memory; and what the network in memory does besides."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto.averaging_pb2 import DownloadData

from spes_swarm.network.transport.interface import STREAM_ERRORS, CallError, NotServedError, Transport
from tests.helpers.hosts import connected, hosts, run
from tests.helpers.memory_network import MemoryNetwork
from tests.helpers.rounds import identity
from tests.helpers.virtual_time import run_at_once

LONG_S = 60.0  # for what succeeds
SHORT_S = 0.3  # for what is expected to run into its deadline
LARGE_BYTES = 4 << 20  # more than all buffers on the way take

in_both = pytest.mark.parametrize("real", [False, True], ids=["in memory", "through daemons"])


@asynccontextmanager
async def pair(*, real: bool) -> AsyncIterator[tuple[Transport, Transport]]:
    """A peer, and one that serves it."""
    async with connected(2, real=real) as (client, server):
        yield client.transport, server.transport


async def serve_streams(
    server: Transport, talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> list[tuple[str, str]]:
    """Serves streams named "test"; returns a list of those who open one, with their addresses."""
    openers: list[tuple[str, str]] = []

    async def handle(peer_id: str, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        openers.append((peer_id, address))
        try:
            await talk(reader, writer)
        finally:
            writer.close()

    await server.serve_streams("test", handle)
    return openers


@in_both
def test_calls_are_answered_and_fail_in_ways_that_can_be_told_apart(real: bool) -> None:
    async def test() -> None:
        async with pair(real=real) as (client, server):
            ended = asyncio.Event()

            async def answer(peer_id: str, payload: bytes) -> bytes:
                if payload == b"fail":
                    raise ValueError("planted")
                if payload == b"wait":
                    try:
                        await asyncio.Event().wait()
                    finally:
                        ended.set()
                return peer_id.encode() + payload

            await server.serve_calls("test", answer)
            payload = bytes(range(256)) * 4096
            assert await client.call(server.peer_id, "test", payload, LONG_S) == client.peer_id.encode() + payload
            with pytest.raises(CallError, match=r"ValueError\('planted'\)") as failed:
                await client.call(server.peer_id, "test", b"fail", LONG_S)
            assert not isinstance(failed.value, NotServedError)
            with pytest.raises(NotServedError, match="protocols not supported"):
                await client.call(server.peer_id, "other", b"", LONG_S)
            with pytest.raises(TimeoutError):
                await client.call(server.peer_id, "test", b"wait", SHORT_S)
            await asyncio.wait_for(ended.wait(), LONG_S)  # nobody waits for the answer
            with pytest.raises(ConnectionError):
                await client.call(identity(7).peer_id, "test", b"", LONG_S)

    run(test)


@in_both
def test_streams_carry_bytes_both_ways(real: bool) -> None:
    async def test() -> None:
        async with pair(real=real) as (client, server):

            async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(bytes(reversed(await reader.readexactly(4))))
                assert await reader.read() == b""  # the other side closes: a daemon could drop the answer otherwise
                ended.set()

            ended = asyncio.Event()
            openers = await serve_streams(server, talk)
            reader, writer = await client.open_stream(server.peer_id, "test", LONG_S)
            writer.write(b"1234")
            assert await reader.readexactly(4) == b"4321"
            writer.close()
            await asyncio.wait_for(ended.wait(), LONG_S)
            ((opener, address),) = openers
            assert opener == client.peer_id
            assert address.startswith("/ip4/127.0.0.1/tcp/")

    run(test)


def test_a_stream_that_nobody_waits_for_any_more_is_closed() -> None:
    async def test() -> None:
        async with pair(real=True) as (client, server):

            async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                assert await reader.read() == b""
                ended.put_nowait(None)

            ended = asyncio.Queue[None]()
            await serve_streams(server, talk)
            opening = asyncio.create_task(client.open_stream(server.peer_id, "test", LONG_S))
            gc.disable()  # the collector would close it, at some time
            try:
                await asyncio.sleep(0)
                opening.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await opening
                await asyncio.wait_for(ended.get(), LONG_S)
                with pytest.raises(TimeoutError):
                    await client.open_stream(server.peer_id, "test", 0.0)
                await asyncio.wait_for(ended.get(), LONG_S)
            finally:
                gc.enable()

    run(test)


@in_both
def test_a_writer_waits_for_a_reader_that_does_not_keep_up(real: bool) -> None:
    async def test() -> None:
        async with pair(real=real) as (client, server):
            may_read, received = asyncio.Event(), asyncio.Queue[int]()

            async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await may_read.wait()
                received.put_nowait(len(await reader.readexactly(LARGE_BYTES)))

            await serve_streams(server, talk)
            _, writer = await client.open_stream(server.peer_id, "test", LONG_S)
            writer.write(bytes(LARGE_BYTES))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(writer.drain(), SHORT_S)
            assert writer.transport.get_write_buffer_size() > 0
            may_read.set()
            await writer.drain()
            assert await received.get() == LARGE_BYTES
            writer.close()

    run(test)


@in_both
def test_what_was_written_before_a_stream_is_closed_arrives(real: bool) -> None:
    async def test() -> None:
        async with pair(real=real) as (client, server):
            received = asyncio.Queue[int]()

            async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                received.put_nowait(len(await reader.read()))

            await serve_streams(server, talk)
            _, writer = await client.open_stream(server.peer_id, "test", LONG_S)
            writer.write(bytes(LARGE_BYTES))
            writer.close()
            assert await asyncio.wait_for(received.get(), LONG_S) == LARGE_BYTES

    run(test)


@in_both
def test_whoever_writes_to_an_end_that_is_closed_learns_it(real: bool) -> None:
    async def test() -> None:
        async with pair(real=real) as (client, server):

            async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(b"half")

            await serve_streams(server, talk)
            reader, writer = await client.open_stream(server.peer_id, "test", LONG_S)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readexactly(8)

            async def write_on() -> None:
                while True:
                    writer.write(bytes(1 << 16))
                    await writer.drain()

            with pytest.raises(ConnectionError):
                await asyncio.wait_for(write_on(), LONG_S)
            writer.close()

    run(test)


@in_both
def test_streams_to_nobody_or_that_nobody_serves_do_not_open(real: bool) -> None:
    async def test() -> None:
        async with pair(real=real) as (client, server):
            for peer_id in (server.peer_id, identity(7).peer_id):
                with pytest.raises(STREAM_ERRORS):
                    await client.open_stream(peer_id, "nothing", LONG_S)
            gc.collect()  # hivemind leaves its connections to the collector, which must find them before the loop ends

    run(test)


# The bytes between daemons.


class Rpc(ServicerBase):  # type: ignore[misc]  # hivemind ships no types
    """hivemind's own way to make and answer calls."""

    async def rpc_call(self, request: DownloadData, context: P2PContext) -> DownloadData:
        return DownloadData(metadata=b"to " + str(context.remote_id).encode() + request.metadata)


def test_calls_are_those_of_hiveminds_servicers() -> None:
    name = "spes_swarm::Rpc.rpc_call"

    async def test() -> None:
        async with hosts(2) as (mine, other):
            await mine.connect(other)
            p2p: P2P = other.daemon.p2p
            for namespace in ("spes_swarm", "spes_swarm/1"):
                stub = Rpc.get_stub(p2p, PeerID.from_base58(mine.peer_id), namespace=namespace)
                theirs = await stub.rpc_call(DownloadData(metadata=b"\x93"), timeout=LONG_S)
                assert b"malformed" in theirs.metadata
            await Rpc().add_p2p_handlers(p2p, namespace="test")
            answer = await mine.transport.call(other.peer_id, name.replace("spes_swarm", "test"), b"!", LONG_S)
            assert answer == b"to " + mine.peer_id.encode() + b"!"

    run(test)


# The network in memory.


def test_a_peer_that_is_cut_off_resets_its_streams_and_cannot_be_reached() -> None:
    async def test() -> None:
        network = MemoryNetwork()
        one, other = network.join("one"), network.join("other")
        began = asyncio.Event()

        async def hold(peer_id: str, payload: bytes) -> bytes:
            began.set()
            await asyncio.Event().wait()
            return payload

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"half")
            with pytest.raises(ConnectionError):
                await reader.read()
            ended.set()

        ended = asyncio.Event()
        await other.serve_calls("hold", hold)
        await serve_streams(other, talk)
        calling = asyncio.create_task(one.call("other", "hold", b"", LONG_S))
        await began.wait()
        reader, writer = await one.open_stream("other", "test", LONG_S)
        network.cut("other")
        with pytest.raises(CallError):
            await calling
        with pytest.raises(ConnectionError):
            await reader.readexactly(8)
        await ended.wait()
        for source, target in ((one, "other"), (other, "one")):
            with pytest.raises(CallError):
                await source.call(target, "hold", b"", LONG_S)
            with pytest.raises(ConnectionError):
                await source.open_stream(target, "test", LONG_S)
        assert "other" not in network
        writer.close()

    run_at_once(test(), 1.0)


def test_what_is_sent_by_or_to_a_frozen_peer_arrives_once_it_is_thawed() -> None:
    async def test() -> None:
        network = MemoryNetwork()
        one, other = network.join("one"), network.join("other")

        async def echo(peer_id: str, payload: bytes) -> bytes:
            return payload

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readexactly(4))
            await reader.read()

        await other.serve_calls("echo", echo)
        await serve_streams(other, talk)
        reader, writer = await one.open_stream("other", "test", LONG_S)
        network.freeze("other")
        writer.write(b"late")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(4), LONG_S)
        with pytest.raises(TimeoutError):
            await one.call("other", "echo", b"", LONG_S)
        with pytest.raises(TimeoutError):
            await one.open_stream("other", "test", LONG_S)
        calling = asyncio.create_task(one.call("other", "echo", b"answer", LONG_S))
        await asyncio.sleep(1.0)
        network.thaw("other")
        assert await calling == b"answer"
        assert await reader.readexactly(4) == b"late"
        writer.close()

    run_at_once(test(), 5 * LONG_S)


def test_an_aborted_stream_is_reset_at_once() -> None:
    async def test() -> None:
        network = MemoryNetwork()
        one, other = network.join("one"), network.join("other")
        failed = asyncio.Event()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with pytest.raises(ConnectionResetError):
                await reader.readexactly(2 * LARGE_BYTES)
            failed.set()

        await serve_streams(other, talk)
        _, writer = await one.open_stream("other", "test", LONG_S)
        writer.write(bytes(LARGE_BYTES))
        assert writer.transport.get_write_buffer_size() == LARGE_BYTES
        writer.transport.abort()
        assert writer.transport.is_closing()
        await failed.wait()
        with pytest.raises(ConnectionError):
            await writer.drain()

    run_at_once(test(), 1.0)
