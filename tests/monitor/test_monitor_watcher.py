"""The monitor in a real DHT, beside nodes that answer with whatever they like."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hivemind.dht import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils.timed_storage import ValueWithExpiration

from spes_swarm.base.errors import BootstrapError, ManifestError, ProtocolError, VersionError
from spes_swarm.monitor import watcher as watcher_module
from spes_swarm.monitor.__main__ import _watch
from spes_swarm.monitor.collector import Collector
from spes_swarm.monitor.history import History
from spes_swarm.monitor.history_file import read_meta
from spes_swarm.monitor.options import parse_options
from spes_swarm.monitor.watcher import NetworkOptions, Watcher, open_watcher
from spes_swarm.network.link.clock import Timekeeper
from spes_swarm.network.link.dht_records import RecordWriter, RunRecordValidator, record_key
from spes_swarm.network.link.proof_query import stream_name
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.link.wire import Channel, Guests, serve_channel
from spes_swarm.network.round.proofs import Proofs
from spes_swarm.network.transport.daemon import Daemon, bootstrap
from spes_swarm.network.transport.dht import DhtNode
from spes_swarm.network.transport.interface import STREAM_ERRORS
from spes_swarm.protocol.admission.exclusion import Exclusions
from spes_swarm.protocol.averaging.commitments import Exchange
from spes_swarm.protocol.averaging.proof import open_proof
from spes_swarm.protocol.members.signed import seal
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from tests.helpers.histories import manifest
from tests.helpers.monitoring import figures, lease, progress, report
from tests.helpers.rounds import identity
from tests.helpers.signed_exchange import hold_exchange

pytestmark = pytest.mark.slow

_LOOPBACK = "/ip4/127.0.0.1/tcp/0"
PACK = DHTProtocol.serializer.dumps


def ignore(peer_id: str, error: ProtocolError) -> None:
    del peer_id, error


class Node:
    """A peer's part of the network without a trainer."""

    def __init__(self, number: int, daemon: Daemon, node: DHTNode, maddr: str) -> None:
        self.identity = identity(number)
        self.daemon = daemon
        self.node = node
        self.maddr = maddr
        self.records = RecordWriter(DhtNode(node), self.identity, manifest().run_id)

    async def publish(self, **changes: Any) -> None:
        """Tells that it is there."""
        assert await self.records.publish("progress", progress(time.time(), **changes))
        assert await self.records.publish("leases", lease(time.time() + 60, changes.get("experts", [0])))
        number = changes.get("round", 3)
        rounds = (figures(number - 1, peers=1), figures(number, peers=1, train_loss=4.5))
        assert await self.records.publish("rounds", report(time.time(), *rounds))

    def lie(self, kind: str, owner: object, value: bytes, expires: float) -> None:
        """Has in its own storage what no honest node would take."""
        key = DHTID.generate(source=record_key(manifest().run_id, kind))
        self.node.protocol.storage.store(key, value, expires, subkey=owner)


@asynccontextmanager
async def node(number: int, known: tuple[str, ...] = (), *, port: int = 0) -> AsyncIterator[Node]:
    daemon = await Daemon.start(identity(number).path, [f"/ip4/127.0.0.1/tcp/{port}"])
    try:
        rpc = Rpc(daemon.transport, ignore)
        await rpc.start()
        if known:
            await bootstrap(daemon, known, 60.0)
        run_id = manifest().run_id
        await Timekeeper(rpc, run_id, daemon.peer_id, ignore).serve()

        async def serve_manifest(peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
            del peer_id, request
            return dict(manifest().to_wire())

        (maddr,) = [maddr for maddr in await daemon.maddrs() if "/127.0.0.1/" in maddr]

        async def serve_ping(peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
            del peer_id, request
            return {"maddrs": [maddr]}

        await rpc.serve("manifest", serve_manifest)
        await rpc.serve("ping", serve_ping)
        dht = await DHTNode.create(
            p2p=daemon.p2p,
            initial_peers=list(known) or None,
            record_validator=RunRecordValidator(run_id, time.time),
            cache_refresh_before_expiry=0,
            wait_timeout=30,
        )
        try:
            yield Node(number, daemon, dht, maddr)
        finally:
            await dht.shutdown()
    finally:
        await daemon.stop()


def options(*maddrs: str, **changes: Any) -> NetworkOptions:
    fields: dict[str, Any] = {
        "initial_peers": maddrs,
        "identity_path": identity(9).path,
        "host_maddrs": (),
        "announce_maddrs": (),
        "is_entry": False,
        "run_id": None,
        "timeout_s": 60.0,
    }
    return NetworkOptions(**{**fields, **changes})


@asynccontextmanager
async def watching(options: NetworkOptions, **known: Any) -> AsyncIterator[Watcher]:
    watcher = await open_watcher(options, known.get("remembered"), known.get("addresses", ()))
    try:
        yield watcher
    finally:
        await watcher.stop()


@pytest.fixture(autouse=True)
def short_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 120))


async def hostile_answers() -> None:
    async with AsyncExitStack() as stack:
        honest = await stack.enter_async_context(node(0))
        liar = await stack.enter_async_context(node(1, (honest.maddr,)))
        blank = await stack.enter_async_context(node(2, (honest.maddr,)))
        await honest.publish(name="\x1b[2J<b>", experts=[0, 3])
        for hostile in (liar, blank):
            hostile.node.protocol.record_validator = None
        run_id, expires = manifest().run_id, time.time() + 20
        forged = PACK(seal(liar.identity, "progress", run_id, progress(time.time(), name="forged")))
        liar.lie("progress", honest.identity.peer_id, forged, expires + 50)
        late = PACK(seal(liar.identity, "leases", run_id, lease(time.time() + 20 * 3600, [1])))
        liar.lie("leases", liar.identity.peer_id, late, time.time() + 20 * 3600)
        # A whole dictionary that is empty and never expires: for hivemind, nothing could be newer.
        nothing = ValueWithExpiration(DictionaryDHTValue(), math.inf)
        blank.node.protocol.storage.get = lambda key: nothing
        watcher = await stack.enter_async_context(watching(options(honest.maddr, liar.maddr, blank.maddr)))
        collector = Collector(watcher, None, 0.2)
        for _ in range(3):
            await collector.refresh()
        state = collector.source.state()
        assert [peer.name for peer in state.peers] == ["(2J‹b›"]
        assert state.experts_covered == 2
        assert [(point.round, point.train_loss) for point in collector.source.history()] == [(2, 5.5), (3, 4.5)]
        assert [expert.reserved for expert in state.experts] == [()] * len(state.experts)
        assert state.refused == {"far_future": 1, "forged": 1}


def test_hostile_answers_are_refused_counted_and_hide_nobody() -> None:
    run(hostile_answers())


async def coming_back(directory: Path) -> None:
    history = History(directory / "run.sqlite")
    async with node(0) as peer:
        maddr = peer.maddr
        await peer.publish()
        async with watching(options(maddr)) as watcher:
            collector = Collector(watcher, history, 0.2)
            await collector.refresh()
            await watcher.keep_in_touch()
            await collector.refresh()
            assert collector.source.state().status == "live"
            assert watcher.addresses() == [maddr]
    history.close()
    # Nobody is there, and the next monitor is given no address at all.
    history = History(directory / "run.sqlite")
    async with watching(options(), remembered=history.manifest(), addresses=history.addresses()) as watcher:
        collector = Collector(watcher, history, 0.2)
        await collector.refresh()
        before = collector.source.state()
        assert (before.peers, before.tokens_total, before.round) == ((), 5120, 3)
        async with node(0, port=int(maddr.split("/")[4])) as peer:
            await peer.publish(round=4)
            working = asyncio.create_task(collector.run())
            while collector.source.state().round != 4:
                await asyncio.wait_for(collector.source.wait_for_change(10), 120)
            working.cancel()
    history.close()


def test_a_monitor_that_is_started_while_nobody_is_there_finds_who_comes_back(tmp_path: Path) -> None:
    run(coming_back(tmp_path))


async def coming_back_to_an_upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Exception] = [BootstrapError("not yet"), ManifestError("another run"), VersionError("upgrade it")]

    async def refuse(*call: Any) -> None:
        raise answers.pop(0)

    monkeypatch.setattr(watcher_module, "ask_for_manifest", refuse)
    async with node(0) as peer:
        for _ in range(2):  # neither means that the manifest has become useless
            async with watching(options(peer.maddr), remembered=manifest()):
                pass
        with pytest.raises(VersionError, match="upgrade it"):
            async with watching(options(peer.maddr), remembered=manifest()):
                pass
    assert answers == []


def test_a_monitor_with_a_history_notices_that_the_swarm_has_upgraded(monkeypatch: pytest.MonkeyPatch) -> None:
    run(coming_back_to_an_upgrade(monkeypatch))


async def second_greeting(monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncExitStack() as stack:
        founder = await stack.enter_async_context(node(0))
        other = await stack.enter_async_context(node(1, (founder.maddr,)))
        watcher = await stack.enter_async_context(watching(options(founder.maddr)))
        await founder.publish()
        await other.publish()
        await Collector(watcher, None, 0.2).refresh()
        greeted: list[str] = []
        call = watcher._rpc.call

        async def fail_once(peer_id: str, method: str, *arguments: Any) -> dict[str, Any]:
            if method == "ping":  # the clock makes calls, too
                greeted.append(peer_id)
                if len(greeted) == 1:
                    raise ConnectionError("routing: not found")
            return await call(peer_id, method, *arguments)

        monkeypatch.setattr(watcher._rpc, "call", fail_once)
        while other.maddr not in watcher.addresses():
            await watcher.keep_in_touch()
            await asyncio.sleep(0.05)
        assert greeted[:2] == [other.identity.peer_id] * 2  # more on a machine so busy that an answer comes too late


def test_a_peer_that_could_not_be_reached_at_first_is_greeted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher_module, "_GREET_AGAIN_S", 0.5)
    run(second_greeting(monkeypatch))


async def entry_point() -> None:
    async with AsyncExitStack() as stack:
        founder = await stack.enter_async_context(node(0))
        as_entry = options(founder.maddr, is_entry=True, host_maddrs=(_LOOPBACK,))
        watcher = await stack.enter_async_context(watching(as_entry))
        collector = Collector(watcher, None, 0.2)
        await founder.publish()
        await collector.refresh()
        command = collector.source.state().join_command
        assert command is not None
        assert f" --run-id {manifest().run_id} " in command
        entry = command.split("--initial-peers ")[1].split()[0]
        assert entry.startswith("/ip4/127.0.0.1/tcp/")
        assert entry.endswith(identity(9).peer_id)
        # A newcomer that knows nobody else finds the run, the time and everybody's records.
        newcomer = await stack.enter_async_context(node(1, (entry,)))
        await newcomer.publish()
        await founder.publish()  # again: its record lives for as long as an announcement, and starting took a while
        await collector.refresh()
        await collector.refresh()
        assert {peer.peer_id for peer in collector.source.state().peers} == {
            identity(0).peer_id,
            identity(1).peer_id,
        }
        own = options(entry, identity_path=identity(8).path)
        async with watching(own) as second:
            for peer in (founder, newcomer):
                await peer.publish()
            assert second.manifest.run_id == manifest().run_id
            assert set((await second.read_records()).progress) == {identity(0).peer_id, identity(1).peer_id}


async def proven_liar(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exchange = Exchange(manifest().run_id, 7, bytes(32))
    data = hold_exchange(np.random.default_rng(0), exchange=exchange, lie=lambda mean_N: -mean_N)[0].wrong_result()
    culprit = identity(0).peer_id
    async with node(1) as accuser:
        run_state: Any = SimpleNamespace(
            run_id=manifest().run_id,
            run=SimpleNamespace(round=SimpleNamespace(stall_timeout_s=30.0)),
            settings=SimpleNamespace(proofs=None),
            tracks=SimpleNamespace(conduct=SimpleNamespace(exclusions=Exclusions())),
            reference=SimpleNamespace(round=7),
            identity=SimpleNamespace(peer_id=accuser.daemon.peer_id),
            group=frozenset(),
        )
        strangers = Guests(admits=lambda peer_id: True, is_member=lambda peer_id: False)
        proofs = Proofs(accuser.daemon.transport, run_state, ignore, strangers)
        await proofs.start()
        await accuser.publish(name="ada", proven=[culprit])
        arguments = ["--initial-peers", accuser.maddr, "--faults"]
        await _watch(parse_options(arguments))  # it has no such proof
        shown = capsys.readouterr().out
        assert " unproven " in shown
        assert f"{culprit}: not verified: this monitor has got no proof" in shown
        await proofs.add(data)
        await accuser.publish(name="ada", proven=[culprit])
        await _watch(parse_options([*arguments, "--proofs", str(folder), "--json"]))
        (one,) = json.loads(capsys.readouterr().out)["excluded"]
    assert (one["peer_id"], one["verified"], one["by"], one["of"], one["round"]) == (culprit, True, 1, 1, 7)
    assert one["why"] == open_proof(data).what
    assert Path(one["proof"]).parent == folder
    assert Path(one["proof"]).read_bytes() == data


def test_a_stranger_gets_the_proof_verifies_and_saves_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(proven_liar(tmp_path / "proofs", capsys))


async def refused_proof() -> None:
    faults: list[str] = []
    async with node(1) as member:
        door = Guests(admits=lambda peer_id: False, is_member=lambda peer_id: False)

        async def serve(channel: Channel) -> None:
            faults.append(f"served {channel.peer_id}")

        def note(peer_id: str, error: ProtocolError) -> None:
            faults.append(f"{error.kind} {peer_id}")

        await serve_channel(member.daemon.transport, stream_name(manifest().run_id), serve, 30.0, note, door)
        async with watching(options(member.maddr)) as watcher:
            with suppress(*STREAM_ERRORS), pytest.raises(ProtocolError, match="refuses to send its proofs"):
                await watcher.fetch_proof(member.identity.peer_id, identity(0).peer_id)  # the answer may be lost
            assert faults == [f"stranger {identity(9).peer_id}"]


def test_a_private_run_refuses_its_proofs_to_a_stranger() -> None:
    run(refused_proof())


def test_a_peer_that_sends_for_ever_is_cut_off() -> None:
    async def test() -> None:
        async with node(1) as member:
            endless = b""

            async def serve(channel: Channel) -> None:
                while True:
                    await channel.send(Frame(FrameKind.DATA, payload=endless))

            everybody = Guests(admits=lambda peer_id: True, is_member=lambda peer_id: False)
            await serve_channel(member.daemon.transport, stream_name(manifest().run_id), serve, 30.0, ignore, everybody)
            async with watching(options(member.maddr)) as watcher:
                for size in (0, 1 << 20):
                    endless = bytes(size)
                    with pytest.raises(ProtocolError, match="at most 16777216 bytes"):
                        await watcher.fetch_proof(member.identity.peer_id, identity(0).peer_id)

    run(test())


async def invited(path: Path) -> None:
    async with AsyncExitStack() as stack:
        founder = await stack.enter_async_context(node(0))
        as_guest = options(founder.maddr, admission=b"admission", to_pass_on="spes1.word")
        watcher = await stack.enter_async_context(watching(as_guest))
        assert watcher._rpc.admission == b"admission"
        history = History(path)
        collector = Collector(watcher, history, 0.2)
        await founder.publish()
        await collector.refresh()
        history.close()
        command = collector.source.state().join_command
        assert command is not None
        assert command.endswith(" --invitation spes1.word")
        with closing(sqlite3.connect(path)) as db:
            stored = read_meta(db, "state")
        assert stored["peers"]
        assert stored["join_command"] is None


def test_an_invitation_is_shown_to_viewers_but_not_kept_in_the_history(tmp_path: Path) -> None:
    run(invited(tmp_path / "run.sqlite"))


def test_an_entry_point_brings_newcomers_in() -> None:
    run(entry_point())


async def wrong_addresses() -> None:
    nobody = f"/ip4/127.0.0.1/tcp/9/p2p/{identity(0).peer_id}"
    with pytest.raises(BootstrapError, match="the initial peer did not answer within 0 s"):
        await open_watcher(options(nobody, timeout_s=0.5), None)
    async with node(0) as peer:
        with pytest.raises(ManifestError, match="not other-run"):
            await open_watcher(options(peer.maddr, run_id="other-run"), None)


def test_without_a_run_it_says_why() -> None:
    run(wrong_addresses())
