"""The file of track records: nothing is lost in it, and a damaged one costs no more than what it held."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest

from spes_swarm.protocol.rounds.conduct import Delivery
from spes_swarm.protocol.rounds.track_record import Memory, TrackRecords
from spes_swarm.storage.track_record_file import TrackRecordFile, encode


@pytest.fixture
def memory() -> Memory:
    tracks = TrackRecords()
    conduct = tracks.conduct
    for number in range(1, 6):
        conduct.begin(["a", "b", "c"])
        conduct.note_fault("b", "missing")
        conduct.exchanged(
            number,
            {"b": Delivery(1000, 1.0, 1000.0, 1.0)},
            {"a": 1.0, "b": 9.0},
            trusted=["a"],
            usual_s=0.0,
            slack_s=0.0,
            passed_s=9.0,
        )
        conduct.note_stall("b", number)
        conduct.note_opposition("b", number, [0.5] * 4)
        conduct.note_silence("b", number, bytes(range(240, 256)), {"a", "c"})
        tracks.committed(number, [("a", 3.0), ("b", 1.0)], ["a"], (0.1, 0.2), delivered=["a"], failed=["b"])
        tracks.note_agreement("a", 0.1)
        conduct.note_commit(["a", "b"])
    conduct.note_return(6, b"group", 5)
    return tracks.memory


def test_nothing_is_lost(memory: Memory, tmp_path: Path) -> None:
    record, conduct = memory.tracks["a"], memory.conduct["b"]
    for something in (
        conduct.late,
        conduct.rates,
        conduct.late_results,
        conduct.failed,
        conduct.stalled,
        conduct.opposition,
    ):
        assert something
    assert record.claimed
    assert conduct.silences
    file = TrackRecordFile(tmp_path / "records.json")
    file.write(encode("run", memory))
    assert file.read("run") == memory
    assert file.path.stat().st_mode & 0o077 == 0


def test_numbers_that_are_not_finite_cost_nothing(memory: Memory, tmp_path: Path) -> None:
    memory.conduct["b"].rates.append(math.inf)
    file = TrackRecordFile(tmp_path / "records.json")
    file.write(encode("run", memory))
    assert file.read("run") == memory


def test_fields_of_other_versions_are_ignored_and_default(memory: Memory, tmp_path: Path) -> None:
    file = TrackRecordFile(tmp_path / "records.json")
    content = json.loads(encode("run", memory))
    del content["memory"]["tracks"]["a"]["worked"]
    content["memory"]["tracks"]["a"]["newer"] = 1
    file.write(json.dumps(content).encode())
    found = file.read("run")
    assert found is not None
    assert (found.tracks["a"].commits, found.tracks["a"].worked) == (5, 0)


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
