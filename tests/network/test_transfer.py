"""State transfer: donors may die, stall or commit, and the newcomer may be cut off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from spes_swarm.base.rate_limit import BETWEEN_ROUNDS_SHARE, BURST_BYTES, MIN_BYTES_PER_S
from spes_swarm.metrics.events import SyncProgress
from spes_swarm.network.link.wire import Channel, Guests, open_channel
from spes_swarm.network.transfer import transfer as transfer_module
from spes_swarm.network.transfer.chunk_stream import PIECE_BYTES, Answer, ChunkAssembler, piece_frames, request_frame
from spes_swarm.protocol.consensus.reference import Reference, chunks_of
from tests.helpers.transfer_net import (
    CHUNK_BYTES,
    LAYOUT,
    NUM_CHUNKS,
    STALL_S,
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


IN_BOTH = pytest.mark.parametrize("net", [False, True], ids=["in memory", "through daemons"], indirect=True)


@pytest.mark.slow
@IN_BOTH
def test_a_newcomer_fetches_from_all_donors(net: Net) -> None:
    async def test() -> None:
        async with net.peers(3) as (newcomer, donors):
            report = await newcomer.download()
            assert_same(newcomer, donors[0])
            assert report.payload_bytes == TOTAL_BYTES + report.refetched_bytes
            assert report.refetched_bytes <= 3 * CHUNK_BYTES  # an idle donor sends what another is slow to send
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


@pytest.mark.slow
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


@pytest.mark.slow
@IN_BOTH
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
                        net.kill(victim)
                    else:
                        await newcomer.saw_a_fault.wait()
                        await send_whole(channel, number, payload)

                donor.transfer._send_chunk = send_chunk  # type: ignore[method-assign]

            for donor in donors:
                watch(donor)
            report = await newcomer.download()
            assert not net.is_alive(victim)
            assert_same(newcomer, donors[0])
            assert kept_bytes(report) == TOTAL_BYTES
            assert report.refetched_bytes < 3 * CHUNK_BYTES
            assert newcomer.kinds(victim) & {"donor", "truncated"}
            assert {peer_id for peer_id, _ in newcomer.faults} == {victim.peer_id}

    net.run(test)


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_donor_that_waits_for_its_limit_is_not_taken_for_dead(net: Net) -> None:
    async def test() -> None:
        async with net.peers(1, stall_timeout_s=3.0) as (newcomer, (donor,)):
            newcomer.transfer.stall_timeout_s = 3.0
            donor.transfer._limit.set_rate(PIECE_BYTES / 4.5)  # a piece takes longer than that
            asyncio.get_running_loop().call_later(12.0, donor.transfer._limit.set_rate, None)
            await newcomer.download()
            assert_same(newcomer, donor)
            assert not newcomer.faults
            assert not donor.faults

    net.run(test)


@pytest.mark.slow
def test_transfers_keep_to_what_is_declared(net: Net) -> None:
    async def test() -> None:
        async with net.peers(1, upload_mbps=40.0) as (newcomer, (donor,)):
            started = time.monotonic()
            report = await newcomer.download()
            seconds = time.monotonic() - started
            assert (report.payload_bytes - BURST_BYTES) / seconds <= 40e6 / 8 * BETWEEN_ROUNDS_SHARE
            assert_same(newcomer, donor)

    net.run(test)


@pytest.mark.slow
def test_a_donor_without_a_complete_reference_gives_nothing(net: Net) -> None:
    async def test() -> None:
        async with net.peers(2) as (newcomer, donors):
            donors[0].transfer._serving = False
            await newcomer.download()
            assert_same(newcomer, donors[1])
            name = f"{newcomer.run_id}/fetch"
            async with open_channel(newcomer.transport, donors[0].peer_id, name, STALL_S) as channel:
                await channel.send(request_frame({0: b"\0" * 32}))
                assert "unready" in (await channel.receive(PIECE_BYTES)).error_text()

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


@pytest.mark.slow
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
            # One donor may have kept copies of all that the others have changed meanwhile.
            assert report.outdated_blocks or reference.digests in history.values()
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
            arrivals = ChunkAssembler(chunks)
            name = f"{newcomer.run_id}/fetch"

            async def fetch(channel: Channel, number: int) -> Answer:
                await channel.send(arrivals.ask(number, digests[number]))
                while True:
                    answer = arrivals.take(await channel.receive(PIECE_BYTES))
                    if answer is not None:
                        return answer

            async with open_channel(newcomer.transport, donor.peer_id, name, STALL_S) as channel:
                assert (await fetch(channel, 0)).values_N is not None
                for number in (2, 3, 4):
                    with donor.transfer.round_under_way():
                        await asyncio.gather(*donor.transfer._copying)
                    donor.commit(number)
                    assert (await fetch(channel, number - 1)).values_N is not None
                    assert donor.transfer._copies._num_bytes == 4 * LAYOUT.blocks[0].size  # not one for each round
                assert (await fetch(channel, 5)).values_N is None  # of another block, which nobody had begun

    net.run(test)


@pytest.mark.slow
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
    newcomer.reference = newcomer.transfer.reference = Reference(LAYOUT, np.zeros(LAYOUT.num_elements, np.float32))
    return done


@pytest.mark.slow
@IN_BOTH
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_stranger_and_its_address_may_fetch_the_reference_a_few_times(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_module, "_PER_STRANGER", 2)
    monkeypatch.setattr(transfer_module, "_PER_HOST", 3)
    monkeypatch.setattr(transfer_module, "_LEAST_BYTES", 0)
    members: set[str] = set()
    guests = Guests(admits=lambda peer_id: True, is_member=members.__contains__)

    async def test() -> None:
        async with net.peers(2, guests=guests) as (newcomer, (donor, other)):

            async def fetch_from(*donors: Node) -> dict[str, int]:
                newcomer.transfer.reference = newcomer.reference = Reference(
                    LAYOUT, np.zeros(LAYOUT.num_elements, np.float32)
                )
                newcomer.others = [node.peer_id for node in donors]
                report = await newcomer.download()
                assert_same(newcomer, other)
                return dict(report.chunks_by_donor)

            for _ in range(2):
                assert await fetch_from(donor) == {donor.peer_id: NUM_CHUNKS}
            assert not donor.faults
            assert await fetch_from(donor, other) == {other.peer_id: NUM_CHUNKS}
            assert donor.kinds(newcomer) == {"budget"}
            assert newcomer.kinds(donor) == {"refused"}

            # The address has one more for another identity.
            await net.connect(other, donor)
            digests = donor.reference.table.chunk_digests
            wanted = [digest for block in digests for digest in block]
            async with open_channel(other.transport, donor.peer_id, f"{donor.run_id}/fetch", STALL_S) as channel:
                arrivals = ChunkAssembler([chunk for block in LAYOUT.blocks for chunk in chunks_of(block)])
                for number in range(NUM_CHUNKS):
                    await channel.send(arrivals.ask(number, wanted[number]))
                    while arrivals.take(await channel.receive(PIECE_BYTES)) is None:
                        pass
                await channel.send(request_frame({0: wanted[0]}))
                answer = await channel.receive(1000)
                assert answer.error_text().startswith("budget: ")

            members.add(newcomer.peer_id)
            assert await fetch_from(donor) == {donor.peer_id: NUM_CHUNKS}

    net.run(test)
