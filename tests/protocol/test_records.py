"""The signed records of peers: the form of their experts, their faults, and the memory of those that were verified."""

from __future__ import annotations

import math
from dataclasses import fields
from functools import partial
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from spes_swarm.network.link.dht_records import MAX_RECORD_BYTES
from spes_swarm.protocol.members.record_cache import VerifiedRecords
from spes_swarm.protocol.members.records import MAX_EXPERTS, MAX_ROUNDS, RecentFaults, RecentRounds, Rounds
from spes_swarm.protocol.members.round_metrics import (
    PeerMetrics,
    RoundFigures,
    RoundMetrics,
    metrics_of,
    telemetry_of,
)
from spes_swarm.protocol.members.routing_report import MAX_DEAD, MAX_LOADS, packed_loads, unpacked_load
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


ROUTING: dict[str, Any] = {
    "expert_loads": b"\x20" * 64,
    "dead": [3, 40],
}


def test_a_record_with_the_routing_of_a_large_model_is_small() -> None:
    """64 experts in each of 28 layers, of which as many are dead as a record can name."""
    dead = list(range(28 * 64 - MAX_DEAD, 28 * 64))
    record = progress(1e9, experts=list(range(64)), **{**BUSY, **ROUTING, "dead": dead})
    assert type(record).model_validate(msgpack.unpackb(msgpack.packb(record.model_dump()))) == record
    assert len(seal(identity(0), "progress", RUN, record)) < 1600


@pytest.mark.parametrize(
    "claim",
    [
        {"expert_loads": b"\0" * 257},
        {"expert_loads": [1.0]},
        {"dead": list(range(33))},
        {"dead": [65_536]},
        {"dead": [-1]},
        {"dead": [4, 3]},
        {"dead": [3, 3]},
        {"dead": [True]},
    ],
)
def test_impossible_claims_about_routing_are_refused(claim: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        progress(1e9, **{**ROUTING, **claim})


def test_loads_travel_as_one_byte_each() -> None:
    load_E = [0.0, 0.01, 0.5, 1.0, 1.02, 7.9, 100.0]
    assert [unpacked_load(step) for step in packed_loads(load_E)] == [0.0, 0.0, 0.5, 1.0, 1.03125, 7.90625, 7.96875]
    assert packed_loads([1.0] * MAX_LOADS) == b"\x20" * 256
    assert packed_loads([1.0] * (MAX_LOADS + 1)) == b""


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


# Rounds.


def noted(*rounds: RoundFigures) -> RecentRounds:
    recent = RecentRounds()
    for one in rounds:
        recent.note(one)
    return recent


def published(recent: RecentRounds) -> list[RoundFigures]:
    record = recent.record(1e9)
    assert record is not None
    return Rounds.model_validate(msgpack.unpackb(msgpack.packb(record.model_dump()))).reports()


def test_the_last_rounds_travel_with_their_figures() -> None:
    first = RoundFigures(round=3, time=1e9, peers=4, train_loss=5.25, eval_loss=5.5, eval_loss_stderr=0.25)
    second = RoundFigures(round=4, time=1e9 + 1, peers=5, train_loss=None, dead_experts=2, tokens_per_second=80.5)
    assert published(noted(first, second)) == [first, second]
    assert RecentRounds().record(1e9) is None


def test_the_record_of_many_rounds_is_small_and_has_the_last_evaluation() -> None:
    full: dict[str, Any] = dict.fromkeys(metrics_of(RoundMetrics), 0.123456789) | {"dead_experts": 65_536}
    rounds = [
        RoundFigures(
            round=10**9 + n,
            time=1.7e9 + n,
            peers=1000,
            experts_covered=4096,
            swarm_tokens=10**15,
            tokens_per_second=123456.789,
            round_seconds=1.23456789,
            bytes_sent=10**12,
            **(full if n == 0 else {**full, "eval_loss": None}),
        )
        for n in range(40)
    ]
    recent = RecentRounds()
    for one in rounds:
        recent.note(one)
        record = recent.record(1e9)  # as often as a round ends
    assert record is not None
    assert len(seal(identity(0), "rounds", RUN, record)) < MAX_RECORD_BYTES
    assert len(record.rounds) == MAX_ROUNDS
    assert published(recent) == [rounds[0], *rounds[-(MAX_ROUNDS - 1) :]]


def test_rounds_of_more_than_a_minute_ago_are_left_out() -> None:
    long = [RoundFigures(round=n, time=1e9 + 50 * n) for n in range(1, 6)]
    assert [one.round for one in published(noted(*long))] == [4, 5]


def test_the_traffic_of_a_round_can_be_known_before_and_after_its_figures() -> None:
    recent = RecentRounds()
    recent.note_traffic(3, 700)
    recent.note(RoundFigures(round=3, time=1e9))
    recent.note(RoundFigures(round=4, time=1e9))
    assert [one.bytes_sent for one in published(recent)] == [700, 0]
    recent.note_traffic(4, 800)
    assert [one.bytes_sent for one in published(recent)] == [700, 800]


def test_a_peer_that_went_back_to_a_checkpoint_reports_no_earlier_rounds() -> None:
    rounds = [RoundFigures(round=n, time=1e9, eval_loss=2.0) for n in (7, 8, 6)]
    assert [one.round for one in published(noted(*rounds))] == [6]


def test_a_figure_that_is_not_finite_keeps_no_other_from_being_reported() -> None:
    """The lease is renewed after this record is written."""
    first = RoundFigures(round=3, train_loss=math.inf, least_load=math.nan, eval_loss=4.0)
    record = Rounds.of(1e9, [first, RoundFigures(round=4, train_loss=5.0, least_load=math.nan)])
    assert record.reports() == [RoundFigures(round=3, eval_loss=4.0), RoundFigures(round=4, train_loss=5.0)]


def test_figures_that_a_reader_does_not_know_are_skipped() -> None:
    record = Rounds.model_validate({"expires": 1e9, "rounds": [3], "figures": {"train_loss": [5.5], "newer": [1.0]}})
    assert record.reports() == [RoundFigures(round=3, train_loss=5.5)]


IMPOSSIBLE: list[dict[str, Any]] = [
    {"load_entropy": 1.1},
    {"router_entropy": -0.1},
    {"least_load": -1.0},
    {"dead_experts": -1},
    {"dead_experts": 1.5},
    {"dead_experts": 65_537},
    {"expert_similarity": 2.0},
    {"train_loss": -1.0},
    {"bytes_sent": 1 << 62},
    {"step": -1},
    {"step": 0.5},
    {"total_tokens": 1e300},
    {"round_seconds": -1e300},
]


@pytest.mark.parametrize("claim", IMPOSSIBLE, ids=str)
def test_an_impossible_claim_is_as_if_it_had_not_been_made(claim: dict[str, Any]) -> None:
    """In a record of a peer, or of its rounds, and whatever it claims besides."""
    record = progress(1e9, telemetry={**claim, "loss": 2.5, "a_newer_metric": -5})
    assert record.metrics == PeerMetrics(loss=2.5)
    rounds = {name: [0, value] for name, value in {**claim, "eval_loss": 2.5, "a_newer_metric": -5}.items()}
    newest = Rounds.model_validate({"expires": 1e9, "rounds": [3, 4], "figures": rounds}).reports()[-1]
    assert newest == RoundFigures(round=4, eval_loss=2.5)


@pytest.mark.parametrize(
    "telemetry",
    [
        {"train_loss": float("nan")},
        {"train_loss": float("inf")},
        {"train_loss": True},
        {"train_loss": "1"},
        {"train_loss": None},
        {"train_loss": [1.0]},
        {"x" * 41: 1.0},
        {"": 1.0},
        {"Loss": 1.0},
        {"loss<b>": 1.0},
        {f"metric_{n}": 1.0 for n in range(65)},
        [],
        None,
    ],
    ids=lambda telemetry: str(telemetry)[:40],
)
def test_what_is_no_telemetry_is_refused(telemetry: Any) -> None:
    with pytest.raises(ValidationError):
        progress(1e9, telemetry=telemetry)


def test_every_declared_metric_is_published() -> None:
    full: dict[str, Any] = {field.name: 1 for field in fields(PeerMetrics)}
    measured = PeerMetrics(**full)
    assert telemetry_of(measured) == full
    assert progress(1e9, telemetry=telemetry_of(measured)).metrics == measured
    assert telemetry_of(PeerMetrics(loss=float("nan"))).keys() == full.keys() - {"loss"}


numbers = st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False, allow_infinity=False)


@given(st.dictionaries(st.sampled_from([field.name for field in fields(PeerMetrics)]) | st.just("newer"), numbers))
def test_no_telemetry_keeps_a_record_from_being_read(telemetry: dict[str, Any]) -> None:
    """Whatever is wrong counts as absent, and what is right is there."""
    metrics = progress(1e9, telemetry=telemetry).metrics
    for name in telemetry.keys() - {"newer"}:
        assert getattr(metrics, name) in (telemetry[name], float(telemetry[name]), getattr(PeerMetrics(), name))
    if telemetry.get("loss", -1) >= 0:
        assert metrics.loss == float(telemetry["loss"])


@pytest.mark.parametrize(
    "changes",
    [
        {"rounds": []},
        {"rounds": [4, 3]},
        {"rounds": [3, 3]},
        {"rounds": [-1, 3]},
        {"rounds": list(range(MAX_ROUNDS + 1))},
        {"figures": {"train_loss": [1.0]}},
        {"figures": {"train_loss": [1.0, float("nan")]}},
        {"figures": {"train_loss": [1.0, "2"]}},
        {"figures": {f"figure_{n}": [0.0, 0.0] for n in range(65)}},
        {"figures": {"x" * 41: [0.0, 0.0]}},
        {"else": 1},
    ],
)
def test_a_record_of_rounds_that_is_wrong_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Rounds.model_validate({"expires": 1e9, "rounds": [3, 4], "figures": {"train_loss": [1.0, 2.0]}, **changes})
