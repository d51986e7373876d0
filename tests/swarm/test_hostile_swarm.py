"""Real peers under attack by a stranger with a key of its own.

tests/network/test_hostile_exchange.py has the attacks of a member that takes part in a round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hivemind.dht import DHTNode
from hivemind.p2p import P2P
from hivemind.utils.timed_storage import get_dht_time

from scripts.testing.local_peer import PATIENCE_S, LocalPeer
from spes_swarm.base.errors import ProtocolError
from spes_swarm.config.manifest import Manifest
from spes_swarm.network.link.dht_records import MAX_RECORD_BYTES, record_key
from spes_swarm.network.link.rpc import MAX_REQUEST_BYTES, Rpc
from spes_swarm.network.link.wire import MAX_STREAMS_PER_PEER, Channel, open_channel
from spes_swarm.network.transport.daemon import Daemon
from spes_swarm.network.transport.interface import STREAM_ERRORS
from spes_swarm.protocol.bitmap import num_bitmap_bytes
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.members.records import Lease
from spes_swarm.protocol.members.signed import seal
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.protocol.rounds.statement import Statement
from tests.helpers.hostile_peer import joined
from tests.helpers.rounds import identity, sign_statement
from tests.helpers.slow_join import launch_slow
from tests.helpers.swarm import equal_digests, swarm

pytestmark = pytest.mark.swarm

# Nobody dies here, so a peer that is late for an exchange must not be given up.
ROUND = {"window_s": 5.0, "stall_timeout_s": 8.0, "timeout_s": 10.0, "codec": "int4"}
NUM_EXPERTS = 8
ENDLESS_MAP = b"\xdf\xff\xff\xff\xff"  # announces 2^32 - 1 pairs


def accused(peers: list[LocalPeer]) -> list[dict[str, Any]]:
    """Faults in which one of these peers is named for a lie by another.

    That a connection was lost may happen to anybody, and a peer says itself that it came too late for a round.
    """
    honest = {event["peer_id"] for peer in peers for event in peer.events("join")}
    lost = {"truncated", "stalled", "lost", "missing", "late", "push", "pull"}
    faults = [event for peer in peers for event in peer.events("fault") if event["peer"] != event["peer_id"]]
    return [fault for fault in faults if fault["peer"] in honest and fault["kind"] not in lost]


class Stranger:
    """Somebody with a key and a daemon, but without a record: no member of anything."""

    def __init__(self, daemon: Daemon, rpc: Rpc, manifest: Manifest, target: LocalPeer, own: Identity) -> None:
        self.p2p: P2P = daemon.p2p
        self.transport = daemon.transport
        self.rpc = rpc
        self.run_id = manifest.run_id
        self.target = target
        self.target_id = str(target.events("join")[0]["peer_id"])
        self.own = own

    async def expect(self, kind: str, timeout_s: float = PATIENCE_S) -> None:
        """Waits until the target has named this stranger for a fault of that kind."""
        who = self.own.peer_id
        await asyncio.to_thread(
            self.target.wait_for, "fault", lambda e: e["peer"] == who and e["kind"] == kind, timeout_s
        )

    async def next_round(self) -> None:
        """A peer is named a limited number of times for each round: what follows is to be seen."""
        await asyncio.to_thread(self.target.wait_for_round, max(self.target.rounds()) + 1)

    async def on_stream(self, name: str, talk: Callable[[Channel], Any]) -> str:
        """Says something on a stream; returns the answer's error text, empty if the stream just ended."""
        try:
            async with open_channel(self.transport, self.target_id, f"{self.run_id}/{name}", 60.0) as channel:
                await talk(channel)
                while True:
                    frame = await channel.receive(1 << 20)
                    if frame.kind in (FrameKind.ERROR, FrameKind.END):
                        return frame.error_text()
        except (*STREAM_ERRORS, ProtocolError):
            return ""

    async def calls(self, method: str, **arguments: Any) -> str:
        """Calls a method that must be refused; returns the reason."""
        with pytest.raises(OSError, match=r".+") as caught:
            await self.rpc.call(self.target_id, method, arguments, 60.0)
        return str(caught.value)

    def statement(self, round_number: int, num_blocks: int = NUM_EXPERTS + 1) -> Statement:
        return Statement(
            round=round_number,
            held=[0],
            tokens=1,
            routed=[1],
            rms=[0.01, 0.01],
            usual_rms=[0.0, 0.0],
            vouched=b"",
            bandwidth_mbps=1.0,
            reachable=True,
            versions=[0] * num_blocks,
            digests=[b"\0" * 32] * num_blocks,
            commits=[],
            marks=b"",
            room=1,
            fixed=False,
            leaving=False,
            leased=bytes(num_bitmap_bytes(num_blocks - 1)),
            certificate=b"",
        )


async def attack_streams(stranger: Stranger) -> None:
    def raw(data: bytes, *, close: bool = False) -> Callable[[Channel], Any]:
        async def talk(channel: Channel) -> None:
            channel._writer.write(data)
            if close:
                channel._writer.close()

        return talk

    async def unknown_group(channel: Channel) -> None:
        await channel.send_hello(group=b"\0" * 32, parts=b"")
        await channel.send(Frame(FrameKind.DATA, payload=b"x" * 1000))

    for name in ("push", "pull"):
        assert "group" in await stranger.on_stream(name, unknown_group)
    await stranger.expect("group")
    for group in (None, 7, "text", b"short", [b"\0" * 32], {"a": 1}):
        assert "malformed" in await stranger.on_stream("push", lambda c, g=group: c.send_hello(group=g, parts=b""))  # type: ignore[misc]
    for name in ("push", "pull", "fetch"):
        await stranger.next_round()
        assert "malformed" in await stranger.on_stream(name, raw(b"\xff" * 100))
        assert "oversized" in await stranger.on_stream(name, raw(b"\x00" + b"\xff" * 19 + b"\xff" * 100))
        nested = msgpack.packb(b"", use_bin_type=True) + b"\x91" * 500
        assert "malformed" in await stranger.on_stream(
            name,
            lambda c, d=nested: c.send(Frame(FrameKind.HELLO, payload=d)),  # type: ignore[misc]
        )
        # A header that announces 900 bytes, and the end after three.
        announced = b"\0" * 16 + (900).to_bytes(4, "little")
        await stranger.on_stream(name, raw(announced + b"abc", close=True))
        await stranger.expect("truncated")
    await stranger.expect("malformed")
    await stranger.expect("oversized")
    chunks = np.array([2**32 - 1], dtype="<u4").tobytes()
    assert "part" in await stranger.on_stream("fetch", lambda c: c.send_hello(chunks=chunks))
    assert "malformed" in await stranger.on_stream("fetch", lambda c: c.send_hello(chunks=b"abc"))


async def hold_silent_streams(stranger: Stranger) -> None:
    """Opens many streams at once and says nothing on them, once such that `busy` and once such that `stalled` shows."""

    async def nothing(channel: Channel) -> None:
        del channel

    await stranger.next_round()
    await stranger.on_stream("push", nothing)
    await stranger.expect("stalled")
    await stranger.next_round()
    answers = await asyncio.gather(*(stranger.on_stream("push", nothing) for _ in range(5 * MAX_STREAMS_PER_PEER)))
    assert sum("busy" in answer for answer in answers) >= 3 * MAX_STREAMS_PER_PEER  # some answers may be lost
    await stranger.expect("busy")


async def attack_calls(stranger: Stranger, other: Identity) -> None:
    await stranger.next_round()
    run, next_round = stranger.run_id, max(stranger.target.rounds()) + 1
    for garbage in (
        b"",
        b"\xc1",
        b"\x93",
        b"\xff" * 1000,
        ENDLESS_MAP,
        b"\x91" * 100_000,
        msgpack.packb([1]),
        msgpack.packb({"version": [7, 0]}),
        msgpack.packb({"version": [2, -1], "method": "ping", "arguments": {}}),
    ):
        answer = await stranger.transport.call(stranger.target_id, "spes_swarm::Rpc.rpc_call", garbage, 60.0)
        kind = "oversized" if garbage == ENDLESS_MAP else "malformed"
        assert kind in msgpack.unpackb(answer)["error"]
    await stranger.next_round()
    assert "oversized" in await stranger.calls("gather", junk=b"x" * MAX_REQUEST_BYTES)
    assert "unknown method" in await stranger.calls("nonsense")
    assert "malformed" in await stranger.calls("have", group=7)
    assert "group" in await stranger.calls("have", group=b"\0" * 32)
    for absurd in (2**62, -5):
        assert "round" in await stranger.calls("call", run=run, round=absurd)
    for nonsense in (True, "1", None, 1.5, [1]):
        assert "run" in await stranger.calls("call", run=run, round=nonsense)
    assert "run" in await stranger.calls("call", run="other-run", round=next_round)
    assert "round" in await stranger.calls("gather", run=run, round=2**40, statement=b"")
    await stranger.expect("run")
    await stranger.expect("round")

    await stranger.next_round()

    async def gather(statement: Any) -> str:
        # The honest peers' rounds go on meanwhile: once more with the number of the day, if that one is over.
        while True:
            number = max(stranger.target.rounds()) + 1
            try:
                answer = await stranger.rpc.call(
                    stranger.target_id, "gather", {"run": run, "round": number, "statement": statement(number)}, 60.0
                )
            except OSError as exc:
                return str(exc)
            assert answer.keys() <= {"over", "group", "leader"}

    def tampered(number: int) -> bytes:
        version, payload, *rest = msgpack.unpackb(sign_statement(stranger.own, run, stranger.statement(number)))
        return bytes(msgpack.packb([version, payload + b"\0", *rest], use_bin_type=True))

    def borrowed_key(number: int) -> bytes:
        *rest, _, signature = msgpack.unpackb(sign_statement(stranger.own, run, stranger.statement(number)))
        return bytes(msgpack.packb([*rest, other.public_key_der, signature], use_bin_type=True))

    assert "sender" in await gather(lambda n: sign_statement(other, run, stranger.statement(n)))
    assert "signature" in await gather(tampered)
    assert "signature" in await gather(borrowed_key)
    assert "signature" in await gather(lambda n: sign_statement(stranger.own, "other-run", stranger.statement(n)))
    assert "shape" in await gather(lambda n: sign_statement(stranger.own, run, stranger.statement(n, 3)))
    assert "round" in await gather(lambda n: sign_statement(stranger.own, run, stranger.statement(n - 1)))
    assert "malformed" in await gather(lambda n: 7)
    for kind in ("sender", "signature", "shape"):
        await stranger.expect(kind)


async def attack_records(stranger: Stranger, initial: str, victim_id: str, other: Identity) -> None:
    """Every one of these is refused by the nodes of the run, so that none reports it as stored."""
    node = await DHTNode.create(p2p=stranger.p2p, initial_peers=[initial], client_mode=True)
    try:
        expires = get_dht_time() + 60.0
        lease = Lease(expires=expires, experts=[0], since_round=1)
        key, own, run = record_key(stranger.run_id, "leases"), stranger.own, stranger.run_id
        sealed = seal(own, "leases", run, lease)
        attempts: dict[str, tuple[str, Any, float, Any]] = {
            "in another's name": (key, sealed, expires, victim_id),
            "signed by another key": (key, seal(other, "leases", run, lease), expires, own.peer_id),
            "longer life than signed": (key, sealed, expires + 60.0, own.peer_id),
            "endless life": (key, sealed, expires + 1e9, own.peer_id),
            "another kind": (record_key(run, "progress"), sealed, expires, own.peer_id),
            "another run": (key, seal(own, "leases", "other-run", lease), expires, own.peer_id),
            "oversized": (key, sealed + b"\0" * MAX_RECORD_BYTES, expires, own.peer_id),
            "not signed": (key, b"garbage", expires, own.peer_id),
            "not bytes": (key, {"experts": [0]}, expires, own.peer_id),
            "plain value": (key, sealed, expires, None),
            "unknown key": (f"{run}.nonsense", sealed, expires, own.peer_id),
            "subkey that is no text": (key, sealed, expires, 7),
        }
        for name, (where, value, until, subkey) in attempts.items():
            target_keys = await node.store(where, value, until, subkey=subkey, exclude_self=True)
            assert not target_keys, name
        # A call may fail on a busy machine, and then nobody has refused anything.
        for _ in range(5):
            expires = get_dht_time() + 60.0
            sealed = seal(own, "leases", run, Lease(expires=expires, experts=[0], since_round=1))
            if await node.store(key, sealed, expires, subkey=own.peer_id, exclude_self=True):
                break
        else:
            raise AssertionError("a right one is taken")
    finally:
        await node.shutdown()


def test_rounds_go_on_under_the_attack_of_a_stranger(tmp_path: Path) -> None:
    own, other = identity(90), identity(91)
    with swarm(tmp_path, round=ROUND) as running:
        running.launch = launch_slow(0.25)
        peers = running.start_all(3, "--experts", 2)
        for peer in peers:
            peer.wait_for_round(1)
        target, maddr = peers[0], peers[0].address()
        begun = max(target.rounds())

        async def attack() -> None:
            async with joined(maddr, own) as (daemon, rpc, manifest):
                stranger = Stranger(daemon, rpc, manifest, target, own)
                await attack_streams(stranger)
                await attack_calls(stranger, other)
                await hold_silent_streams(stranger)
                await attack_records(stranger, maddr, str(peers[1].events("join")[0]["peer_id"]), other)

        asyncio.run(attack())
        last = max(target.rounds()) + 1
        for peer in peers:
            peer.wait_for_round(last)
        assert last >= begun + 4
        for number in range(1, last + 1):
            equal_digests(peers, number)
            for peer in peers:
                event = peer.rounds()[number]
                assert event["peers"] == 3
                assert event["parts_missing"] == 0
        assert not accused(peers)
