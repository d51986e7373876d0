"""The file of track records: nothing is lost in it, and a damaged one costs no more than what it held."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from spes_swarm.protocol.rounds.track_record import Memory, TrackRecords
from spes_swarm.storage.track_record_file import TrackRecordFile, encode


@pytest.fixture
def memory() -> Memory:
    tracks = TrackRecords()
    conduct = tracks.conduct
    for number in range(1, 6):
        conduct.begin(["a", "b", "c"])
        conduct.note_fault("b", "missing")
        conduct.exchanged(number, {}, {"a": 1.0, "b": 9.0}, trusted=["a"], usual_s=0.0, slack_s=0.0, passed_s=9.0)
        tracks.committed(number, [("a", 3.0), ("b", 1.0)], ["a"], delivered=["a"], failed=["b"])
        tracks.note_agreement("a", 0.1)
        conduct.note_silence("b", number, bytes(range(240, 256)), {"a", "c"})
        conduct.note_commit(["a", "b"])
    conduct.note_return(6, b"group")
    return tracks.memory


def test_nothing_is_lost(memory: Memory, tmp_path: Path) -> None:
    file = TrackRecordFile(tmp_path / "records.json")
    file.write(encode("run", memory))
    found = file.read("run")
    assert found == memory
    lengths = {name: getattr(found.conduct["b"], name).maxlen for name in ("late", "failed", "silences")}
    assert lengths == {name: getattr(memory.conduct["b"], name).maxlen for name in lengths}
    assert None not in lengths.values()


def test_a_file_of_another_run_says_nothing(memory: Memory, tmp_path: Path) -> None:
    file = TrackRecordFile(tmp_path / "records.json")
    assert file.read("run") is None
    file.write(encode("another run", memory))
    assert file.read("run") is None


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\xff\x00", b"[" * 100_000, b'{"run_id":"run","memory":{"round":"x"}}']
)
def test_a_damaged_file_is_named_and_costs_no_more(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "records.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert TrackRecordFile(path).read("run") is None
    assert str(path) in caplog.text


def test_a_file_that_cannot_be_written_costs_nothing_else(
    memory: Memory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        TrackRecordFile(tmp_path / "missing" / "records.json").write(encode("run", memory))
    assert "a restart forgets" in caplog.text
