"""What strangers may hold of streams and calls: a small part, so that members are served. No training."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link import rpc as rpc_module
from spes_swarm.network.link import wire
from spes_swarm.network.link.rpc import RemoteError
from spes_swarm.network.link.wire import Channel, Guests, open_channel, serve_channel
from spes_swarm.network.transport.interface import STREAM_ERRORS
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from tests.helpers.hosts import Endpoint, connected, run

LONG_S = 60.0  # for what succeeds


async def echo(channel: Channel) -> None:
    """Answers each frame, until the other side closes the stream."""
    while True:
        await channel.send(await channel.receive(100))


class Door:
    """A server of a stream whose members are known to it; everybody is admitted except `unwanted`."""

    def __init__(self, server: Endpoint, members: set[str], unwanted: str = "") -> None:
        self.server = server
        self.members = members
        self.unwanted = unwanted
        self.faults: list[tuple[str, str]] = []

    async def open(self) -> None:
        guests = Guests(lambda peer_id: peer_id != self.unwanted, lambda peer_id: peer_id in self.members)
        await serve_channel(self.server.transport, "stream", echo, LONG_S, self.note, guests)

    def note(self, peer_id: str, error: ProtocolError) -> None:
        self.faults.append((peer_id, error.kind))

    async def answer(self, client: Endpoint, stack: list[Any]) -> str:
        """Opens a stream that stays open; returns the kind of the error, empty if it is served."""
        opened = open_channel(client.transport, self.server.peer_id, "stream", LONG_S)
        channel = await opened.__aenter__()
        stack.append(opened)
        try:
            await channel.send(Frame(FrameKind.DATA, payload=b"hello"))
            frame = await channel.receive(1000)
        except STREAM_ERRORS:  # nobody waits until the answer to a refused peer has arrived
            return next(kind for peer_id, kind in reversed(self.faults) if peer_id == client.peer_id)
        return frame.error_text().partition(":")[0] if frame.kind is FrameKind.ERROR else ""


async def close(stack: list[Any]) -> None:
    while stack:
        await stack.pop().__aexit__(None, None, None)


@pytest.mark.parametrize("real", [False, True], ids=["in memory", "through daemons"])
def test_who_is_not_admitted_is_told_so_and_the_stream_ends(real: bool) -> None:
    async def test() -> None:
        async with connected(2, real=real) as (server, client):
            door = Door(server, members={client.peer_id}, unwanted=client.peer_id)
            await door.open()
            async with open_channel(client.transport, server.peer_id, "stream", LONG_S) as channel:
                with suppress(*STREAM_ERRORS):  # the answer may be lost
                    answer = await channel.receive(1000)  # without a frame of its own
                    assert answer.error_text().startswith("stranger: ")
                with pytest.raises(STREAM_ERRORS):
                    await channel.receive(1000)
            assert door.faults == [(client.peer_id, "stranger")]

    run(test)


def test_strangers_share_a_few_slots_and_members_are_served_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_STREAMS_OF_STRANGERS", 3)
    monkeypatch.setattr(wire, "MAX_STREAMS_PER_STRANGER", 2)

    async def test() -> None:
        async with connected(4) as (server, one, other, member):
            door = Door(server, members={member.peer_id})
            await door.open()
            held: list[Any] = []
            assert [await door.answer(one, held) for _ in range(2)] == ["", ""]
            assert await door.answer(one, held) == "busy"  # its own limit
            assert await door.answer(other, held) == ""
            assert await door.answer(other, held) == "busy"  # that of all strangers
            assert [await door.answer(member, held) for _ in range(4)] == [""] * 4
            door.members.add(other.peer_id)  # a stream that is open still counts as a stranger's
            assert await door.answer(other, held) == ""
            assert await door.answer(one, held) == "busy"
            await close(held)

    run(test)


def test_a_silent_stranger_loses_its_slot_after_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "STRANGER_HELLO_S", 0.2)
    monkeypatch.setattr(wire, "MAX_STREAMS_OF_STRANGERS", 1)

    async def test() -> None:
        async with connected(3) as (server, stranger, member):
            door = Door(server, members={member.peer_id})
            await door.open()
            held: list[Any] = []
            async with (
                open_channel(stranger.transport, server.peer_id, "stream", LONG_S) as silent,
                open_channel(member.transport, server.peer_id, "stream", LONG_S) as patient,
            ):
                with pytest.raises(EOFError):
                    await silent.receive(1000)
                assert door.faults == [(stranger.peer_id, "stalled")]
                assert await door.answer(stranger, held) == ""
                frame = Frame(FrameKind.DATA, payload=b"late")
                await patient.send(frame)
                assert await patient.receive(1000) == frame
            await close(held)

    run(test)


@pytest.mark.parametrize("real", [False, True], ids=["in memory", "through daemons"])
def test_strangers_calls_do_not_keep_out_those_of_members(monkeypatch: pytest.MonkeyPatch, real: bool) -> None:
    monkeypatch.setattr(rpc_module, "MAX_CALLS_OF_STRANGERS", 3)
    monkeypatch.setattr(rpc_module, "MAX_CALLS_PER_STRANGER", 2)

    async def test() -> None:
        async with connected(4, real=real) as (server, one, other, member):
            server.rpc.is_member = lambda peer_id: peer_id == member.peer_id
            arrived: asyncio.Queue[str] = asyncio.Queue()
            over = asyncio.Event()

            async def hold(peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
                arrived.put_nowait(peer_id)
                if request["waits"]:
                    await over.wait()
                return {}

            await server.rpc.serve("hold", hold)

            async def call(client: Endpoint, *, waits: bool = False) -> dict[str, Any]:
                return await client.rpc.call(server.peer_id, "hold", {"waits": waits}, LONG_S)

            held = []
            for client in (one, one, other):
                held.append(asyncio.create_task(call(client, waits=True)))
                assert await arrived.get() == client.peer_id
            for client in (one, other):
                with pytest.raises(RemoteError, match="busy"):
                    await call(client)
            assert await call(member) == {}
            over.set()
            assert await asyncio.gather(*held) == [{}] * 3
            assert await call(other) == {}

    run(test)
