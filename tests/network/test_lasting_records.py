"""When track records are read and written; tests/protocol/test_track_record.py is about what they hold."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from spes_swarm.network.round import lasting_records
from spes_swarm.network.round.lasting_records import LastingRecords
from spes_swarm.protocol.rounds.track_record import RECENT_ROUNDS, TrackRecords
from spes_swarm.storage.track_record_file import TrackRecordFile

RUN = "run"


class Session:
    """One session of a peer."""

    def __init__(self, path: Path | None) -> None:
        self.tracks = TrackRecords()
        self.lasting = LastingRecords(RUN, self.tracks, path)

    def commit(self, number: int) -> None:
        self.tracks.committed(number, [("a", 1.0)], (), delivered=["a"])
        self.lasting.committed()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "track_records.json"


def commits_in(path: Path) -> int:
    memory = TrackRecordFile(path).read(RUN)
    return 0 if memory is None else memory.tracks["a"].commits


async def session(path: Path, first: int, count: int) -> TrackRecords:
    """Commits of a session that ends in order."""
    peer = Session(path)
    await peer.lasting.recall(first)
    for number in range(first, first + count):
        peer.commit(number)
    await peer.lasting.close()
    return peer.tracks


def test_a_session_goes_on_where_the_last_one_ended(path: Path) -> None:
    async def test() -> None:
        await session(path, 1, 3)
        tracks = await session(path, 4, 7)
        assert tracks.memory.tracks["a"].commits == commits_in(path) == 10

    asyncio.run(test())


def test_a_session_without_a_commit_changes_nothing(path: Path) -> None:
    async def test() -> None:
        await session(path, 1, 3)
        before = path.read_bytes()
        await session(path, 2, 0)
        assert path.read_bytes() == before
        path.write_bytes(b"of a version to come")
        await session(path, 4, 0)
        assert path.read_bytes() == b"of a version to come"

    asyncio.run(test())


@pytest.mark.parametrize(
    ("most", "limit", "expected"),
    [("_MAX_AGE_COMMITS", 4, [1, 1, 1, 1, 5, 5, 5, 5, 9, 9]), ("_MAX_AGE_S", 0.0, list(range(1, 11)))],
)
def test_after_the_first_commit_and_some_later_ones_the_file_is_new_without_an_orderly_end(
    most: str, limit: float, expected: list[int], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        monkeypatch.setattr(lasting_records, "_MAX_AGE_COMMITS", 100)
        monkeypatch.setattr(lasting_records, most, limit)
        peer = Session(path)
        await peer.lasting.recall(1)
        written = []
        for number in range(1, 11):
            peer.commit(number)
            if peer.lasting._writing is not None:
                await peer.lasting._writing
            written.append(commits_in(path))
        assert written == expected

    asyncio.run(test())


def test_a_recall_that_is_cancelled_comes_again(path: Path) -> None:
    async def test() -> None:
        await session(path, 1, 3)
        peer = Session(path)
        task = asyncio.create_task(peer.lasting.recall(4))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await peer.lasting.recall(4)
        peer.commit(4)
        await peer.lasting.recall(5)
        assert peer.tracks.memory.tracks["a"].commits == 4

    asyncio.run(test())


def test_without_a_file_nothing_is_kept() -> None:
    async def test() -> None:
        peer = Session(None)
        await peer.lasting.recall(1)
        peer.commit(1)
        await peer.lasting.close()
        assert peer.tracks.memory.tracks["a"].commits == 1

    asyncio.run(test())


def test_one_write_at_a_time_and_the_last_one_has_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        may_end, begun = threading.Event(), 0
        write = TrackRecordFile.write

        def slow(self: TrackRecordFile, content: bytes) -> bool:
            nonlocal begun
            begun += 1
            assert may_end.wait(60)
            return write(self, content)

        monkeypatch.setattr(TrackRecordFile, "write", slow)
        peer = Session(path)
        await peer.lasting.recall(1)
        for number in range(1, 3 * RECENT_ROUNDS):
            peer.commit(number)
            await asyncio.sleep(0)
        assert begun <= 1
        closing = asyncio.create_task(peer.lasting.close())
        await asyncio.sleep(0)
        may_end.set()
        await closing
        assert begun == 2
        assert commits_in(path) == 3 * RECENT_ROUNDS - 1

    asyncio.run(test())


def test_what_could_not_be_written_is_written_at_the_end(path: Path) -> None:
    async def test() -> None:
        path.mkdir()  # in its place
        peer = Session(path)
        await peer.lasting.recall(1)
        peer.commit(1)
        assert peer.lasting._writing is not None
        await peer.lasting._writing
        path.rmdir()
        await peer.lasting.close()
        assert commits_in(path) == 1

    asyncio.run(test())
