"""Donors that lie, break off or hold the newcomer up are named, and cost a few chunks at most."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from spes_swarm.base.errors import ProtocolError, TransferError
from spes_swarm.network.link.wire import Channel
from spes_swarm.network.transfer import donors as donors_module
from spes_swarm.network.transfer import download as download_module
from spes_swarm.network.transfer.chunk_stream import piece_frames
from spes_swarm.network.transfer.donors import table_to_wire
from spes_swarm.protocol.consensus.reference import ReferenceTable
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from tests.helpers.transfer_net import (
    CHUNK_BYTES,
    NUM_BLOCKS,
    TOTAL_BYTES,
    Net,
    Node,
    assert_same,
    kept_bytes,
    running_net,
)


@pytest.fixture(scope="module")
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    with running_net(real=getattr(request, "param", False)) as found:
        yield found


# In the middle of a transfer.


def lie_on_streams(node: Node, talk: Callable[[Channel, int, bytes], Awaitable[None]]) -> None:
    """From now on `talk(channel, chunk, honest payload)` answers requests."""

    async def send_chunk(channel: Channel, number: int, payload: bytes | None) -> None:
        assert payload is not None
        await talk(channel, number, payload)

    node.transfer._send_chunk = send_chunk  # type: ignore[method-assign]


def wait_for(event: asyncio.Event, node: Node) -> None:
    """From now on this donor sends nothing before the event."""
    send_whole = node.transfer._send_chunk

    async def send_chunk(channel: Channel, number: int, payload: bytes | None) -> None:
        await event.wait()
        await send_whole(channel, number, payload)

    node.transfer._send_chunk = send_chunk  # type: ignore[method-assign]


async def flip_a_bit(channel: Channel, number: int, payload: bytes) -> None:
    for frame in piece_frames(number, bytes([payload[0] ^ 1]) + payload[1:], 1):
        await channel.send(frame)


async def send_another(channel: Channel, number: int, payload: bytes) -> None:
    for frame in piece_frames(number + 1, payload, 1):
        await channel.send(frame)


async def send_not_a_number(channel: Channel, number: int, payload: bytes) -> None:
    for frame in piece_frames(number, b"\xff" * len(payload), 1):
        await channel.send(frame)


async def send_crumbs(channel: Channel, number: int, payload: bytes) -> None:
    for i in range(len(payload)):
        await channel.send(Frame(FrameKind.DATA, part=number, payload=payload[i : i + 1]))


async def send_without_end(channel: Channel, number: int, payload: bytes) -> None:
    while True:
        for frame in piece_frames(number, payload, 1):
            await channel.send(frame)


async def keep_alive_without_end(channel: Channel, number: int, payload: bytes) -> None:
    while True:
        await channel.send(Frame(FrameKind.KEEPALIVE))
        await asyncio.sleep(0.05)


async def send_too_much(channel: Channel, number: int, payload: bytes) -> None:
    await channel.send(Frame(FrameKind.DATA, part=number, payload=payload))


async def break_off(channel: Channel, number: int, payload: bytes) -> None:
    first, *_ = piece_frames(number, payload, 1)
    await channel.send(first)
    channel._writer.write(b"\x01\x00")
    await channel._writer.drain()
    raise ConnectionError


async def say_nothing(channel: Channel, number: int, payload: bytes) -> None:
    await asyncio.sleep(60.0)


async def refuse(channel: Channel, number: int, payload: bytes) -> None:
    raise ProtocolError("refused", "\x1b[31mnot you")


async def say_that_it_moved_on(channel: Channel, number: int, payload: bytes) -> None:
    for frame in piece_frames(number, None, 2**40):
        await channel.send(frame)


# libp2p may drop what was under way when the stream ended: half a frame, or nothing of it.
BROKEN_OFF = {"truncated", "donor"}
# With the kinds of faults of which one or more must be noted.
LIES: dict[str, tuple[Callable[[Channel, int, bytes], Awaitable[None]], set[str]]] = {
    "wrong values": (flip_a_bit, {"digest"}),
    "another chunk": (send_another, {"part"}),
    "no numbers": (send_not_a_number, {"nonfinite"}),
    "crumbs": (send_crumbs, {"shape"}),
    "no end": (send_without_end, {"part"}),
    "keepalives without end": (keep_alive_without_end, {"stalled"}),
    "oversized pieces": (send_too_much, {"oversized"}),
    "half a header": (break_off, BROKEN_OFF),
    "silence": (say_nothing, {"donor"}),
    "refusal": (refuse, {"refused"}),
    "moved on": (say_that_it_moved_on, set()),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "net"),
    [*((name, False) for name in LIES), ("wrong values", True), ("half a header", True)],
    ids=[*LIES, "wrong values through daemons", "half a header through daemons"],
    indirect=["net"],
)
def test_a_lone_liar_costs_a_few_chunks_and_is_named(net: Net, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    talk, kinds = LIES[name]
    monkeypatch.setattr(download_module, "_PIECE_STALLS", 0.05)

    async def test() -> None:
        # Paced, so that the liar has its say before the honest donors are through.
        async with net.peers(3, upload_mbps=8.0 if name == "silence" else 32.0) as (newcomer, donors):
            liar, spoke = donors[0], asyncio.Event()

            async def talk_first(channel: Channel, number: int, payload: bytes) -> None:
                spoke.set()
                await talk(channel, number, payload)

            lie_on_streams(liar, talk_first)
            for honest in donors[1:]:
                wait_for(spoke, honest)
            if name == "silence":
                newcomer.transfer.stall_timeout_s = 3.0
            report = await newcomer.download()
            assert_same(newcomer, donors[1])
            assert newcomer.kinds(liar) <= kinds
            assert bool(newcomer.kinds(liar)) == bool(kinds)
            assert {peer_id for peer_id, _ in newcomer.faults} <= {liar.peer_id}
            assert kept_bytes(report) == TOTAL_BYTES
            assert report.refetched_bytes <= 3 * CHUNK_BYTES
            assert report.chunks_by_donor[liar.peer_id] <= (name == "no end")  # its first one was right

    net.run(test)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wrong values", "keepalives without end", "silence", "moved on"])
def test_a_liar_that_is_the_only_donor_is_given_up(net: Net, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_module, "_PIECE_STALLS", 0.2)
    monkeypatch.setattr(download_module, "_MAX_FRUITLESS", 2)

    async def test() -> None:
        async with net.peers(1) as (newcomer, (liar,)):
            newcomer.transfer.stall_timeout_s = 1.0
            lie_on_streams(liar, LIES[name][0])
            with pytest.raises(TransferError, match="no donor answered, or none delivered"):
                await newcomer.download()
            assert newcomer.reference.round == 0

    net.run(test)


@pytest.mark.slow
def test_a_donor_that_only_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch, net: Net) -> None:
    monkeypatch.setattr(donors_module, "_REST_S", 0.5)
    monkeypatch.setattr(download_module, "_LOOK_S", 0.2)

    async def test() -> None:
        async with net.peers(2, upload_mbps=8.0) as (newcomer, (steady, clumsy)):  # long enough for both attempts
            honest, failures = clumsy.transfer._send_chunk, 0

            async def fail_once(channel: Channel, number: int, payload: bytes | None) -> None:
                nonlocal failures
                failures += 1
                if failures == 1:
                    await break_off(channel, number, b"\0" * CHUNK_BYTES)
                await honest(channel, number, payload)

            clumsy.transfer._send_chunk = fail_once  # type: ignore[method-assign]
            report = await newcomer.download()
            assert_same(newcomer, steady)
            assert newcomer.kinds(clumsy)
            assert newcomer.kinds(clumsy) <= BROKEN_OFF
            assert report.chunks_by_donor[clumsy.peer_id] > 0

    net.run(test)


@pytest.mark.slow
def test_donors_that_take_their_time_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch, net: Net) -> None:
    monkeypatch.setattr(download_module, "_NUM_DONORS", 1)
    monkeypatch.setattr(download_module, "_LOOK_S", 0.2)

    async def test() -> None:
        async with net.peers(3) as (newcomer, donors):
            for dawdler in donors[:2]:
                lie_on_streams(dawdler, keep_alive_without_end)
            await newcomer.download()
            assert_same(newcomer, donors[2])

    net.run(test)


# About what they have.


def lie_about_table(node: Node, table: ReferenceTable) -> None:
    async def serve(peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        return table_to_wire(table)

    node.rpc._handlers["table"] = serve


@pytest.mark.slow
@pytest.mark.parametrize("round_number", [0, 1, 2, 2**39])
def test_a_false_table_is_outvoted(net: Net, round_number: int) -> None:
    async def test() -> None:
        async with net.peers(3) as (newcomer, donors):
            liar = donors[2]
            liar.commit(2)
            false = dataclasses.replace(liar.reference.table, round=round_number, versions=(0,) * NUM_BLOCKS)
            lie_about_table(liar, false)
            await newcomer.download()
            assert_same(newcomer, donors[0])
            assert newcomer.kinds(liar) == ({"table"} if round_number == 1 else set())
            assert not newcomer.kinds(donors[0])

    net.run(test)


@pytest.mark.slow
def test_a_malformed_table_is_named(net: Net) -> None:
    async def test() -> None:
        async with net.peers(2) as (newcomer, donors):
            lie_about_table(donors[0], dataclasses.replace(donors[0].reference.table, versions=(7,) * NUM_BLOCKS))
            await newcomer.download()
            assert_same(newcomer, donors[1])
            assert newcomer.kinds(donors[0]) == {"malformed"}

    net.run(test)


@pytest.mark.slow
def test_donors_that_are_about_to_commit_are_asked_again(net: Net) -> None:
    """Half of them have committed when the newcomer asks, and a liar uses the moment."""

    async def test() -> None:
        async with net.peers(3) as (newcomer, donors):
            liar, late, early = donors
            lie_about_table(liar, dataclasses.replace(liar.reference.table, round=2**39))
            early.commit(2)
            asyncio.get_running_loop().call_later(0.15, late.commit, 2)
            await newcomer.download()
            assert_same(newcomer, early)

    net.run(test)
