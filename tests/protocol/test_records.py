"""The signed records of peers: the form of their experts, their faults, and the memory of those that were verified."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgpack
import pytest
from pydantic import ValidationError

from spes_swarm.protocol.members.record_cache import VerifiedRecords
from spes_swarm.protocol.members.records import MAX_EXPERTS, RecentFaults
from spes_swarm.protocol.members.signed import seal
from tests.helpers.records import lease, progress
from tests.helpers.rounds import identity

RUN = "run-1"
# The other fields of a record, of typical length.
BUSY: dict[str, Any] = {
    "name": "laptop",
    "step": 40,
    "tokens": 1280,
    "tokens_per_second": 900.5,
    "loss": 5.25,
    "round_seconds": 1.5,
    "bytes_sent": 1,
    "bytes_received": 2,
}


@pytest.mark.parametrize("experts", [[], [0], [1023], list(range(1024)), list(range(0, MAX_EXPERTS, 7))])
def test_experts_travel_as_one_bit_each(experts: list[int]) -> None:
    for record in (lease(1e9, experts=experts), progress(1e9, experts=experts, **BUSY)):
        packed = msgpack.packb(record.model_dump())
        assert type(record).model_validate(msgpack.unpackb(packed)) == record
        assert len(packed) < 600 + (max(experts, default=0) + 1) / 8
    assert len(seal(identity(0), "progress", RUN, progress(1e9, experts=list(range(1024)), **BUSY))) < 1200


@pytest.mark.parametrize(
    "experts", [b"\0", b"\1\0", b"\1" * 513, [3, 1], [1, 1], [MAX_EXPERTS], [-1], [True], "x", None]
)
def test_other_forms_of_experts_are_refused(experts: object) -> None:
    with pytest.raises(ValidationError):
        lease(1e9, experts=experts)


def test_peers_that_do_not_know_of_divided_data_understand_runs_without_it() -> None:
    assert "data" not in progress(1e9).model_dump()
    record = progress(1e9, data=[0, 5])
    assert type(record).model_validate(msgpack.unpackb(msgpack.packb(record.model_dump()))) == record


def test_recent_faults_are_few_and_hold_only_kinds() -> None:
    now = 1000.0
    faults = RecentFaults(lambda: now)
    for kind in ("round", "stall", "Bad Kind/with path", "dht", "dht", ""):
        faults.note(kind)
        now += 1
    assert [(note.at, note.kind) for note in faults.notes()] == [
        (1001.0, "stall"),
        (1002.0, "bad-kind-with-path"),
        (1004.0, "dht"),
        (1005.0, "unknown"),
    ]
    assert progress(1e9, faults=faults.notes()).faults == faults.notes()


def test_the_memory_for_verified_records_is_bounded() -> None:
    known: VerifiedRecords[int] = VerifiedRecords(100, lambda size: size)
    asked: list[bytes] = []

    def checked(sealed: bytes) -> tuple[str, int]:
        asked.append(sealed)
        return "peer", int(sealed)

    def open_all(*records: bytes) -> list[bytes]:
        """Which of them had to be verified."""
        asked.clear()
        for sealed in records:
            assert known.open(sealed, "leases", RUN, partial(checked, sealed)) == ("peer", int(sealed))
        return list(asked)

    assert open_all(b"40", b"41", b"40") == [b"40", b"41"]
    assert open_all(b"42", b"40") == [b"42"]  # 41 was the one that nobody had asked for
    assert open_all(b"41") == [b"41"]
    assert open_all(b"40", b"41") == []
    assert open_all(b"101", b"40", b"41") == [b"101", b"40", b"41"]  # too large to stay, it pushes out the others
    assert open_all(b"101") == [b"101"]
