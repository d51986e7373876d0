"""State transfer over libp2p: any of many donors may die, lie, dawdle or commit, and the newcomer be cut off."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spes_swarm import donors as donors_module
from spes_swarm import download as download_module
from spes_swarm.chunk_stream import PIECE_BYTES, Answer, Arrivals, piece_frames, request_frame
from spes_swarm.daemon import Daemon
from spes_swarm.donors import choose_table
from spes_swarm.download import SyncProgress, TransferReport
from spes_swarm.errors import ProtocolError, RoundError
from spes_swarm.layout import Layout
from spes_swarm.rate_limit import BETWEEN_ROUNDS_SHARE, BURST_BYTES, MIN_BYTES_PER_S
from spes_swarm.reference import CHUNK_ELEMENTS, Reference, ReferenceTable, chunks_of
from spes_swarm.rpc import Rpc
from spes_swarm.transfer import Transfer, table_to_wire
from spes_swarm.wire import Channel, Frame, FrameKind, open_channel
from tests.rounds import RUN_ID, identity

# hivemind 1.1.12 does not close its connection to the daemon when a stream cannot be opened, as to a killed donor.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <StreamWriter:ResourceWarning")

CHUNK_BYTES = 4 * CHUNK_ELEMENTS
STALL_S = 15.0  # nobody who is honest takes so long, however busy the machine


# The vote.


def table(round_number: int, seed: int = 0) -> ReferenceTable:
    digests = tuple((bytes([seed, block]) * 16,) for block in range(4))
    return ReferenceTable(round_number, (round_number,) * 4, digests)


@pytest.mark.parametrize(
    ("tables", "expected", "sure"),
    [
        ([table(5)], table(5), True),
        ([table(5), table(5), table(6)], table(5), True),
        ([table(5), table(6), table(6)], table(6), True),
        ([table(5), table(6)], table(6), False),
        ([table(5), table(5), table(5, 1)], table(5), True),
        ([table(5), table(6), table(2**39, 1)], table(6), False),  # a lone claim of a far round
        ([table(5), table(5), table(6), table(6), table(2**39, 1)], table(6), False),
        ([table(4), table(5), table(6)], table(5), False),
    ],
)
def test_most_donors_decide(tables: list[ReferenceTable], expected: ReferenceTable, sure: bool) -> None:
    for order in (tables, tables[::-1]):
        assert choose_table(order) == (expected, sure)


# Over libp2p, with daemons of their own.

LAYOUT = Layout.build({"embed": (4 * CHUNK_ELEMENTS - 5,)}, {"up": (4, 2 * CHUNK_ELEMENTS + 11)})
TOTAL_BYTES = 4 * LAYOUT.num_elements
NUM_BLOCKS = len(LAYOUT.blocks)
NUM_CHUNKS = sum(1 for block in LAYOUT.blocks for _ in chunks_of(block))


@lru_cache(maxsize=8)
def weights(round_number: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What an honest peer holds after a round in which all blocks changed."""
    return np.random.default_rng(round_number).normal(0, 0.1, LAYOUT.num_elements).astype(np.float32)


class Node:
    """One peer with a daemon, a reference and the transfer service."""

    def __init__(
        self, daemon: Daemon, rpc: Rpc, run_id: str, values_N: np.ndarray[Any, np.dtype[np.float32]], **options: Any
    ) -> None:
        self.daemon = daemon
        self.run_id = run_id
        self.peer_id = daemon.peer_id
        self.faults: list[tuple[str, str]] = []
        self.saw_a_fault = asyncio.Event()
        self.rpc = rpc
        self.rpc.on_fault = self._on_fault
        self.reference = Reference(LAYOUT, values_N)
        self.transfer = Transfer(
            daemon.p2p,
            self.rpc,
            run_id,
            self.reference,
            on_fault=self._on_fault,
            **{"stall_timeout_s": STALL_S} | options,
        )
        self.others: list[str] = []
        self.progress: list[SyncProgress] = []
        self.on_progress: Callable[[SyncProgress], None] = lambda progress: None

    def _on_fault(self, peer_id: str, error: ProtocolError) -> None:
        self.faults.append((peer_id, error.kind))
        self.saw_a_fault.set()

    def commit(self, number: int, blocks: Sequence[int] = range(NUM_BLOCKS)) -> None:
        """What RoundState.commit does."""
        for index in blocks:
            block = LAYOUT.blocks[index]
            self.reference.values_N[block.start : block.stop] = weights(number)[block.start : block.stop]
        self.reference.finish(number, [(index, number) for index in blocks])

    async def download(self, partial: Path | None = None) -> TransferReport:
        def note(progress: SyncProgress) -> None:
            self.progress.append(progress)
            self.on_progress(progress)

        return await self.transfer.download(lambda: self.others, partial, note)

    def kinds(self, who: Node) -> set[str]:
        return {kind for peer_id, kind in self.faults if peer_id == who.peer_id}


class Net:
    """Daemons on 127.0.0.1 that serve one test after the other, each with services of its own."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._daemons: dict[int, Daemon] = {}
        self._rpcs: dict[int, Rpc] = {}
        self._run_ids = itertools.count()

    def run(self, test: Callable[[], Awaitable[None]], timeout_s: float = 120.0) -> None:
        """Runs a test in the loop of the daemons."""

        async def bounded() -> None:
            await asyncio.wait_for(test(), timeout_s)

        self._runner.run(bounded())

    def close(self) -> None:
        """Ends the daemons."""

        async def stop() -> None:
            await asyncio.gather(*(daemon.stop() for daemon in self._daemons.values()))

        self._runner.run(stop())
        self._runner.close()

    async def _host(self, number: int) -> tuple[Daemon, Rpc]:
        daemon = self._daemons.get(number)
        if daemon is not None and not daemon.is_alive:  # a test has killed it
            await daemon.stop()
            daemon = None
        if daemon is None:
            daemon = self._daemons[number] = await Daemon.start(identity(number).path, ["/ip4/127.0.0.1/tcp/0"])
            self._rpcs[number] = Rpc(daemon.p2p, lambda peer_id, error: None)
            await self._rpcs[number].start()
        return daemon, self._rpcs[number]

    @asynccontextmanager
    async def peers(self, num_donors: int, **options: Any) -> AsyncIterator[tuple[Node, list[Node]]]:
        """A newcomer with zeros, and donors that are at round 1."""
        nodes: list[Node] = []
        run_id = f"{RUN_ID}-{next(self._run_ids)}"
        for number in range(num_donors + 1):
            values_N = weights(1).copy() if number else np.zeros(LAYOUT.num_elements, np.float32)
            nodes.append(Node(*await self._host(number), run_id, values_N, **(options if number else {})))
            await nodes[-1].transfer.start()
            if number:
                nodes[-1].commit(1)
                nodes[-1].transfer.open()
        newcomer, *donors = nodes
        for donor in donors:
            await newcomer.daemon.connect(next(m for m in await donor.daemon.maddrs() if "127.0.0.1" in m), 10.0)
            newcomer.others.append(donor.peer_id)
        yield newcomer, donors


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    daemons = Net()
    yield daemons
    daemons.close()
    gc.collect()  # while the warning about unclosed connections is still ignored


def assert_same(newcomer: Node, donor: Node) -> None:
    assert newcomer.reference.digest == donor.reference.digest
    assert newcomer.reference.round == donor.reference.round
    np.testing.assert_array_equal(newcomer.reference.values_N, donor.reference.values_N)
    assert Reference(LAYOUT, newcomer.reference.values_N).digests == newcomer.reference.digests


def kept_bytes(report: TransferReport) -> int:
    return report.payload_bytes - report.refetched_bytes - report.superseded_bytes


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donors_module, "_UNSURE_S", 0.1)
    monkeypatch.setattr(download_module, "_PROGRESS_S", 0.05)


def test_a_newcomer_fetches_from_all_donors(net: Net) -> None:
    async def test() -> None:
        async with net.peers(3) as (newcomer, donors):
            report = await newcomer.download()
            assert_same(newcomer, donors[0])
            assert report.payload_bytes == TOTAL_BYTES + report.refetched_bytes
            assert report.refetched_bytes < 0.1 * TOTAL_BYTES
            assert kept_bytes(report) == TOTAL_BYTES
            assert report.chunks_by_donor.keys() == {donor.peer_id for donor in donors}
            assert (report.round, report.outdated_blocks, report.resumed_bytes) == (1, 0, 0)
            done = [progress.done_bytes for progress in newcomer.progress]
            assert done == sorted(done)
            assert done[0] == 0
            assert not newcomer.faults
            newcomer.transfer.open()
            again = await newcomer.download()  # there is nothing to fetch
            assert again.payload_bytes == 0

    net.run(test)


def test_a_peer_that_was_away_fetches_only_what_has_changed(net: Net) -> None:
    async def test() -> None:
        async with net.peers(2) as (newcomer, donors):
            newcomer.commit(1)
            for donor in donors:
                donor.commit(2, [0, 3])
            report = await newcomer.download()
            assert_same(newcomer, donors[0])
            assert newcomer.reference.versions == (2, 1, 1, 2, 1)
            assert kept_bytes(report) == 4 * (LAYOUT.blocks[0].size + LAYOUT.blocks[3].size)

    net.run(test)


def test_a_killed_donor_costs_only_its_unfinished_chunks(net: Net) -> None:
    async def test() -> None:
        async with net.peers(3) as (newcomer, donors):
            victim = donors[1]
            num_sent = 0

            def watch(donor: Node) -> None:
                """Half of the chunks pass. Then the victim dies in the middle of one, and the others wait for that."""
                send_whole = donor.transfer._send_chunk

                async def send_chunk(channel: Channel, number: int, payload: bytes | None) -> None:
                    nonlocal num_sent
                    assert payload is not None
                    num_sent += 1
                    if num_sent <= NUM_CHUNKS // 2:
                        await send_whole(channel, number, payload)
                    elif donor is victim:
                        await channel.send(next(iter(piece_frames(number, payload, 1))))
                        os.kill(victim.daemon.pid, signal.SIGKILL)
                    else:
                        await newcomer.saw_a_fault.wait()
                        await send_whole(channel, number, payload)

                donor.transfer._send_chunk = send_chunk  # type: ignore[method-assign]

            for donor in donors:
                watch(donor)
            report = await newcomer.download()
            assert not victim.daemon.is_alive
            assert_same(newcomer, donors[0])
            assert kept_bytes(report) == TOTAL_BYTES
            assert report.refetched_bytes < 3 * CHUNK_BYTES
            assert newcomer.kinds(victim) & {"donor", "truncated"}
            assert {peer_id for peer_id, _ in newcomer.faults} == {victim.peer_id}

    net.run(test)


def test_slow_donors_do_not_hold_up_the_end(net: Net) -> None:
    async def test() -> None:
        async with net.peers(3) as (newcomer, donors):
            for slow in donors[:2]:  # a minute for each chunk
                slow.transfer._limit.set_rate(MIN_BYTES_PER_S)
            started = time.monotonic()
            report = await newcomer.download()
            assert time.monotonic() - started < 40.0
            assert_same(newcomer, donors[2])
            assert kept_bytes(report) == TOTAL_BYTES
            assert report.refetched_bytes <= 4 * CHUNK_BYTES
            assert not newcomer.faults

    net.run(test)


def test_a_donor_that_waits_for_its_limit_is_not_taken_for_dead(net: Net) -> None:
    async def test() -> None:
        async with net.peers(1, stall_timeout_s=1.0) as (newcomer, (donor,)):
            newcomer.transfer._stall_timeout_s = 1.0
            donor.transfer._limit.set_rate(PIECE_BYTES / 1.5)  # a piece takes longer than that
            asyncio.get_running_loop().call_later(5.0, donor.transfer._limit.set_rate, None)
            await newcomer.download()
            assert_same(newcomer, donor)
            assert not newcomer.faults
            assert not donor.faults

    net.run(test)


def test_transfers_keep_to_what_is_declared(net: Net) -> None:
    async def test() -> None:
        async with net.peers(1, upload_mbps=40.0) as (newcomer, (donor,)):
            started = time.monotonic()
            report = await newcomer.download()
            seconds = time.monotonic() - started
            assert (report.payload_bytes - BURST_BYTES) / seconds <= 40e6 / 8 * BETWEEN_ROUNDS_SHARE
            assert_same(newcomer, donor)

    net.run(test)


def test_a_donor_without_a_complete_reference_gives_nothing(net: Net) -> None:
    async def test() -> None:
        async with net.peers(2) as (newcomer, donors):
            donors[0].transfer._serving = False
            await newcomer.download()
            assert_same(newcomer, donors[1])
            name = f"{newcomer.run_id}/fetch"
            async with open_channel(newcomer.daemon.p2p, donors[0].peer_id, name, STALL_S) as channel:
                await channel.send(request_frame({0: b"\0" * 32}))
                assert "unready" in (await channel.receive(PIECE_BYTES)).error_text()

    net.run(test)


# Donors that lie.


def lie_on_streams(node: Node, talk: Callable[[Channel, int, bytes], Awaitable[None]]) -> None:
    """From now on `talk(channel, chunk, honest payload)` answers requests."""

    async def send_chunk(channel: Channel, number: int, payload: bytes | None) -> None:
        assert payload is not None
        await talk(channel, number, payload)

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
    raise ConnectionError


async def say_nothing(channel: Channel, number: int, payload: bytes) -> None:
    await asyncio.sleep(60.0)


async def refuse(channel: Channel, number: int, payload: bytes) -> None:
    raise ProtocolError("refused", "\x1b[31mnot you")


async def say_that_it_moved_on(channel: Channel, number: int, payload: bytes) -> None:
    for frame in piece_frames(number, None, 2**40):
        await channel.send(frame)


LIES: dict[str, tuple[Callable[[Channel, int, bytes], Awaitable[None]], set[str]]] = {
    "wrong values": (flip_a_bit, {"digest"}),
    "another chunk": (send_another, {"part"}),
    "no numbers": (send_not_a_number, {"nonfinite"}),
    "crumbs": (send_crumbs, {"shape"}),
    "no end": (send_without_end, {"part"}),
    "keepalives without end": (keep_alive_without_end, {"stalled"}),
    "oversized pieces": (send_too_much, {"oversized"}),
    "half a header": (break_off, {"truncated"}),
    "silence": (say_nothing, {"donor"}),
    "refusal": (refuse, {"refused"}),
    "moved on": (say_that_it_moved_on, set()),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lone_liar_costs_a_few_chunks_and_is_named(net: Net, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    talk, kinds = LIES[name]
    monkeypatch.setattr(download_module, "_PATIENCE", 0.05)

    async def test() -> None:
        # Paced, so that the liar has its say before the honest donors are through.
        async with net.peers(3, upload_mbps=8.0 if name == "silence" else 32.0) as (newcomer, donors):
            liar = donors[0]
            lie_on_streams(liar, talk)
            if name == "silence":
                newcomer.transfer._stall_timeout_s = 3.0
            report = await newcomer.download()
            assert_same(newcomer, donors[1])
            assert newcomer.kinds(liar) == kinds
            assert {peer_id for peer_id, _ in newcomer.faults} <= {liar.peer_id}
            assert kept_bytes(report) == TOTAL_BYTES
            assert report.refetched_bytes <= 3 * CHUNK_BYTES
            assert report.chunks_by_donor[liar.peer_id] <= (name == "no end")  # its first one was right

    net.run(test)


@pytest.mark.parametrize("name", ["wrong values", "keepalives without end", "silence", "moved on"])
def test_a_liar_that_is_the_only_donor_is_given_up(net: Net, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_module, "_PATIENCE", 0.2)
    monkeypatch.setattr(download_module, "_MAX_FRUITLESS", 2)

    async def test() -> None:
        async with net.peers(1) as (newcomer, (liar,)):
            newcomer.transfer._stall_timeout_s = 1.0
            lie_on_streams(liar, LIES[name][0])
            with pytest.raises(RoundError, match="none that delivers"):
                await newcomer.download()
            assert newcomer.reference.round == 0

    net.run(test)


def test_a_donor_that_only_failed_is_tried_again(monkeypatch: pytest.MonkeyPatch, net: Net) -> None:
    monkeypatch.setattr(donors_module, "_REST_S", 0.5)
    monkeypatch.setattr(download_module, "_LOOK_S", 0.2)

    async def test() -> None:
        async with net.peers(2, upload_mbps=16.0) as (newcomer, (steady, clumsy)):
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
            assert newcomer.kinds(clumsy) == {"truncated"}
            assert report.chunks_by_donor[clumsy.peer_id] > 0

    net.run(test)


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


def lie_about_table(node: Node, table: ReferenceTable) -> None:
    async def serve(peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        return table_to_wire(table)

    node.rpc._handlers["table"] = serve


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


def test_a_malformed_table_is_named(net: Net) -> None:
    async def test() -> None:
        async with net.peers(2) as (newcomer, donors):
            lie_about_table(donors[0], dataclasses.replace(donors[0].reference.table, versions=(7,) * NUM_BLOCKS))
            await newcomer.download()
            assert_same(newcomer, donors[1])
            assert newcomer.kinds(donors[0]) == {"malformed"}

    net.run(test)


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


# The swarm commits.


@asynccontextmanager
async def committing(donors: Sequence[Node], every_s: float) -> AsyncIterator[dict[int, tuple[bytes, ...]]]:
    """Donors commit rounds, one shortly after the other; yields the digests of all blocks by round."""
    history = {1: donors[0].reference.digests}

    async def commit_forever() -> None:
        number = 1
        while True:
            await asyncio.sleep(every_s)
            number += 1
            with ExitStack() as stack:
                for donor in donors:
                    stack.enter_context(donor.transfer.round_under_way())
                await asyncio.sleep(0.2 * every_s)
                for donor in donors:
                    donor.commit(number)
                    history[number] = donor.reference.digests
                    await asyncio.sleep(0.02)

    task = asyncio.create_task(commit_forever())
    try:
        yield history
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("every_s", [0.7, 2.0])
def test_a_swarm_that_commits_faster_than_a_transfer_takes(net: Net, every_s: float) -> None:
    async def test() -> None:
        async with net.peers(3, upload_mbps=10.0) as (newcomer, donors):
            async with committing(donors, every_s) as history:
                report = await newcomer.download()
                last = max(history)
            assert last > 2, "the transfer was faster"
            reference = newcomer.reference
            assert Reference(LAYOUT, reference.values_N).digests == reference.digests
            for block, (version, digest) in enumerate(zip(reference.versions, reference.digests, strict=True)):
                assert history[version][block] == digest, "a block that the swarm never had"
            assert report.round == reference.round <= last
            assert kept_bytes(report) == TOTAL_BYTES
            # What it states in its first round is a statement of a member that is behind.
            assert max(reference.versions) <= reference.round
            assert report.outdated_blocks
            assert report.moved_on
            assert not newcomer.faults
            # They are dropped when the donors see the end of the streams, which is not told to anybody.
            while any(donor.transfer._copies._chunks for donor in donors):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    net.run(test)


def test_a_block_under_way_stays_as_it_was_over_several_commits(net: Net) -> None:
    async def test() -> None:
        async with net.peers(1) as (newcomer, (donor,)):
            chunks = [chunk for block in LAYOUT.blocks for chunk in chunks_of(block)]
            digests = [donor.reference.digest_of(chunk) for chunk in chunks]
            arrivals = Arrivals(chunks)
            name = f"{newcomer.run_id}/fetch"

            async def fetch(channel: Channel, number: int) -> Answer:
                await channel.send(arrivals.ask(number, digests[number]))
                while True:
                    answer = arrivals.take(await channel.receive(PIECE_BYTES))
                    if answer is not None:
                        return answer

            async with open_channel(newcomer.daemon.p2p, donor.peer_id, name, STALL_S) as channel:
                assert (await fetch(channel, 0)).values_N is not None
                for number in (2, 3, 4):
                    with donor.transfer.round_under_way():
                        await asyncio.gather(*donor.transfer._copying)
                    donor.commit(number)
                    assert (await fetch(channel, number - 1)).values_N is not None
                    assert donor.transfer._copies._num_bytes == 4 * LAYOUT.blocks[0].size  # not one for each round
                assert (await fetch(channel, 5)).values_N is None  # of another block, which nobody had begun

    net.run(test)


def test_what_little_has_changed_meanwhile_is_fetched_again(net: Net) -> None:
    async def test() -> None:
        async with net.peers(2, upload_mbps=20.0) as (newcomer, donors):

            def commit(progress: SyncProgress) -> None:
                if progress.done_bytes > 0.7 * progress.total_bytes:
                    for donor in donors:
                        if donor.reference.round == 1:
                            donor.commit(2, [2, 4])  # one that has been fetched, and one that has not

            newcomer.on_progress = commit
            report = await newcomer.download()
            assert_same(newcomer, donors[0])
            assert newcomer.reference.versions == (1, 1, 2, 1, 2)
            assert report.outdated_blocks == 0
            assert report.superseded_bytes >= 4 * LAYOUT.blocks[2].size
            assert kept_bytes(report) == TOTAL_BYTES

    net.run(test)


# The newcomer is killed.


async def cut_at_half(newcomer: Node, partial: Path) -> int:
    """A first attempt; returns the bytes that had come."""
    enough = asyncio.Event()

    def look(progress: SyncProgress) -> None:
        if 2 * progress.done_bytes > progress.total_bytes:
            enough.set()

    newcomer.on_progress = look
    task = asyncio.create_task(newcomer.download(partial))
    await enough.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    newcomer.on_progress = lambda progress: None
    done = newcomer.progress[-1].done_bytes
    # The next process begins with zeros.
    newcomer.reference = newcomer.transfer._reference = Reference(LAYOUT, np.zeros(LAYOUT.num_elements, np.float32))
    return done


def test_a_newcomer_that_comes_back_fetches_only_the_rest(net: Net, tmp_path: Path) -> None:
    async def test() -> None:
        async with net.peers(3, upload_mbps=16.0) as (newcomer, donors):
            partial = tmp_path / "partial"
            done = await cut_at_half(newcomer, partial)
            report = await newcomer.download(partial)
            assert_same(newcomer, donors[0])
            assert report.resumed_bytes + kept_bytes(report) == TOTAL_BYTES
            assert report.resumed_bytes >= done - 4 * CHUNK_BYTES  # what was on its way to the disk
            assert not partial.exists()
            assert not newcomer.faults

    net.run(test)


def test_a_damaged_or_outdated_partial_file_is_no_harm(net: Net, tmp_path: Path) -> None:
    async def test() -> None:
        async with net.peers(2, upload_mbps=32.0) as (newcomer, donors):
            partial = tmp_path / "partial"
            await cut_at_half(newcomer, partial)
            data = bytearray(partial.read_bytes())
            data[100] ^= 1  # in the first chunk, which has come
            partial.write_bytes(data[: len(data) - 3] + b"more than there should be" * 1000)
            for donor in donors:
                donor.commit(2, [1])
            report = await newcomer.download(partial)
            assert_same(newcomer, donors[0])
            assert 0 < report.resumed_bytes <= TOTAL_BYTES - CHUNK_BYTES - 4 * LAYOUT.blocks[1].size
            assert report.resumed_bytes + kept_bytes(report) == TOTAL_BYTES

    net.run(test)


def test_a_full_disk_does_not_fail_a_download(net: Net, tmp_path: Path) -> None:
    async def test() -> None:
        async with net.peers(1) as (newcomer, (donor,)):
            partial = tmp_path / "partial"
            partial.symlink_to("/dev/full")
            report = await newcomer.download(partial)
            assert_same(newcomer, donor)
            assert kept_bytes(report) == TOTAL_BYTES
            assert newcomer.kinds(newcomer) == {"disk"}
            assert not partial.is_symlink()

    net.run(test)
