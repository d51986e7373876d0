"""Calls and streams between peers of several versions of the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest

from spes_swarm.base.errors import BootstrapError, ProtocolError, VersionError
from spes_swarm.config.manifest import Manifest, found_run
from spes_swarm.network.link.manifest_query import ask_for_manifest
from spes_swarm.network.link.rpc import RemoteError, Rpc
from spes_swarm.network.link.wire import Channel, open_channel, serve_channel
from spes_swarm.network.transport.daemon import Daemon, bootstrap
from spes_swarm.network.transport.interface import Transport
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from tests.helpers.hosts import MEMBERS
from tests.helpers.lone_trainer import run_config
from tests.helpers.memory_network import MemoryNetwork
from tests.helpers.rounds import identity

REASONABLE_S = 60.0
NOW, BEFORE = "spes_swarm::Rpc.rpc_call", "spes_swarm/1::Rpc.rpc_call"  # the names under which calls are served


class Another:
    """A peer that answers with the same bytes, whatever it is asked."""

    def __init__(self, answer: Any) -> None:
        self._answer = msgpack.packb(answer)
        self.asked: list[Any] = []

    async def answer(self, peer_id: str, request: bytes) -> bytes:
        del peer_id
        self.asked.append(msgpack.unpackb(request))
        return bytes(self._answer)


@dataclass
class Pair:
    """A peer of this version, and another peer that is connected to it."""

    mine: Transport
    other: Transport
    rpc: Rpc
    faults: list[ProtocolError] = field(default_factory=list)

    async def serve(self, answer: Any, name: str = NOW) -> Another:
        """Makes the other peer one that answers this."""
        another = Another(answer)
        await self.other.serve_calls(name, another.answer)
        return another

    async def say(self, message: Any, name: str = NOW) -> dict[str, Any]:
        """The answer of this peer to the other's message."""
        answer = await self.other.call(self.mine.peer_id, name, msgpack.packb(message), REASONABLE_S)
        return dict(msgpack.unpackb(answer))


@asynccontextmanager
async def transports(*, real: bool) -> AsyncIterator[tuple[Transport, Transport]]:
    if not real:
        network = MemoryNetwork()
        yield network.join(identity(0).peer_id), network.join(identity(1).peer_id)
        return
    mine = await Daemon.start(identity(0).path, ["/ip4/127.0.0.1/tcp/0"])
    other = await Daemon.start(identity(1).path, ["/ip4/127.0.0.1/tcp/0"])
    try:
        await bootstrap(other, await mine.maddrs(), REASONABLE_S)
        yield mine.transport, other.transport
    finally:
        await other.stop()
        await mine.stop()


async def echo(peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
    return {"echo": request}


def in_pair(check: Callable[[Pair], Awaitable[None]], *, real: bool = False) -> None:
    async def run() -> None:
        async with transports(real=real) as (mine, other):
            pair = Pair(mine, other, Rpc(mine, lambda peer_id, error: pair.faults.append(error)))
            await pair.rpc.start()
            await pair.rpc.serve("ping", echo)
            await check(pair)

    asyncio.run(run())


in_both = pytest.mark.parametrize("real", [False, True], ids=["in memory", "through daemons"])
PING = {"method": "ping", "arguments": {"a": 1}}
MINE = {"version": [7, 0]}


@in_both
def test_a_caller_learns_the_version_and_why_it_is_refused(real: bool) -> None:
    async def check(pair: Pair) -> None:
        for version in ([7, 0], [7, 7]):
            answer = await pair.say({"version": version, **PING, "something": "newer"})
            assert answer == {**MINE, "echo": {"a": 1}}
        assert pair.faults == []
        for version, words in (
            ([8, 1], "the caller speaks protocol 8.1, this side 7.0: upgrade this side"),
            ([1, 0], "the caller speaks protocol 1.0, this side 7.0: upgrade the caller"),
        ):
            # Only the version of another major version is read.
            for message in ({"version": version, **PING}, {"version": version}):
                assert await pair.say(message) == {**MINE, "error": f"version: {words}"}
                assert [str(fault) for fault in pair.faults] == [f"version: {words}"]
                pair.faults.clear()
        # As peers of version 1 call, which look for "error" in the answer.
        answer = await pair.say(PING, BEFORE)
        assert answer["error"] == "version: the caller speaks protocol 1.0, this side 7.0: upgrade the caller"
        pair.faults.clear()
        for nonsense in (2, "2.0", [2], [2, 0, 0], [2, -1], [1 << 40, 0], [True, 0], {"2": 0}, b"\2\0"):
            assert (await pair.say({"version": nonsense, **PING}))["error"].startswith("malformed: the version of")
        assert {fault.kind for fault in pair.faults} == {"malformed"}

    in_pair(check, real=real)


def test_the_answer_of_another_major_version_is_an_error_that_names_both() -> None:
    async def check(pair: Pair) -> None:
        me = pair.other.peer_id

        async def ask() -> dict[str, Any]:
            return await pair.rpc.call(me, "ping", {}, REASONABLE_S)

        another = await pair.serve({"version": [7, 3], "something": "newer"})
        assert await ask() == {"something": "newer"}
        assert another.asked == [{**MINE, "method": "ping", "arguments": {}}]
        for answer, words in (
            ({"version": [8, 0]}, f"peer {me} speaks protocol 8.0, this side 7.0: upgrade this side"),
            ({"version": [8, 0], "error": "you are old"}, "upgrade this side"),
            ({"version": [1, 9]}, f"peer {me} speaks protocol 1.9, this side 7.0: upgrade peer {me}"),
        ):
            another._answer = msgpack.packb(answer)
            with pytest.raises(ProtocolError, match=words) as error:
                await ask()
            assert error.value.kind == "version"
        for nonsense in ({"version": "7.0"}, {"version": [7]}, {"version": [-1, 0]}, [8, 0], 7):
            another._answer = msgpack.packb(nonsense)
            with pytest.raises(ProtocolError) as error:
                await ask()
            assert error.value.kind == "malformed"

    in_pair(check)


@in_both
def test_a_peer_of_version_1_is_recognised(real: bool) -> None:
    async def check(pair: Pair) -> None:
        with pytest.raises(ConnectionError, match="not supported"):  # it does not answer calls yet
            await pair.rpc.call(pair.other.peer_id, "ping", {}, REASONABLE_S)
        await pair.serve({"echo": {}}, BEFORE)
        with pytest.raises(ProtocolError, match=r"speaks protocol 1\.0, this side 7\.0: upgrade peer Qm"):
            await pair.rpc.call(pair.other.peer_id, "ping", {}, REASONABLE_S)

    in_pair(check, real=real)


def test_the_search_for_a_manifest_ends_at_once_at_another_major_version() -> None:
    async def check(pair: Pair) -> None:
        another = await pair.serve({"version": [8, 0], "manifest": 5})
        with pytest.raises(VersionError) as error:
            await ask_for_manifest(pair.rpc, [pair.other.peer_id], None, 1e6)
        assert len(another.asked) == 1
        assert str(error.value) == f"peer {pair.other.peer_id} speaks protocol 8.0, this side 7.0: upgrade this side"
        another._answer = msgpack.packb({**MINE, "error": "not yet"})
        with pytest.raises(BootstrapError, match="not yet"):
            await ask_for_manifest(pair.rpc, [pair.other.peer_id], None, 0.0)

    in_pair(check)


def test_one_initial_peer_of_another_version_does_not_hide_the_others() -> None:
    manifest = found_run(run_config(), "layout", identity(0))

    class Peers:
        async def call(self, peer_id: str, method: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
            if peer_id == "newer":
                raise ProtocolError("version", "it speaks another")
            if peer_id == "silent":
                raise RemoteError("not yet")
            return dict(manifest.to_wire())

    async def ask(*peers: str) -> Manifest:
        rpc: Any = Peers()
        return await ask_for_manifest(rpc, peers, None, 1e6)

    assert asyncio.run(ask("newer", "silent", "good")) == manifest
    with pytest.raises(VersionError, match=r"^it speaks another$"):
        asyncio.run(ask("newer", "silent"))


def test_streams_of_another_major_version_are_refused() -> None:
    async def check(pair: Pair) -> None:
        said: list[dict[str, Any]] = []

        async def handle(channel: Channel) -> None:
            said.append(await channel.receive_hello(1000))

        def note(peer_id: str, error: ProtocolError) -> None:
            pair.faults.append(error)

        await serve_channel(pair.mine, "test", handle, REASONABLE_S, note, MEMBERS)

        async def open_with(fields: dict[str, Any]) -> str:
            async with open_channel(pair.other, pair.mine.peer_id, "test", REASONABLE_S) as channel:
                await channel.send(Frame(FrameKind.HELLO, payload=msgpack.packb(fields)))
                return (await channel.receive(1000)).error_text()

        words = "version: the peer that opened the stream speaks protocol"
        assert await open_with({"version": [8, 0]}) == f"{words} 8.0, this side 7.0: upgrade this side"
        upgrade = "upgrade the peer that opened the stream"
        assert await open_with({"group": b""}) == f"{words} 1.0, this side 7.0: {upgrade}"
        assert "malformed" in await open_with({"version": "2.0"})
        assert [fault.kind for fault in pair.faults] == ["version", "version", "malformed"]
        assert said == []

    in_pair(check)
