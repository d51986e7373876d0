"""The signed records that peers publish about themselves; network/link/dht_records.py keeps them in the DHT."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from spes_swarm.base.names import FAULT_KIND
from spes_swarm.protocol.admission.grants import MAX_ADMISSION_BYTES
from spes_swarm.protocol.bitmap import bitmap, members_of
from spes_swarm.protocol.members.round_metrics import (
    MetricName,
    Number,
    PeerMetrics,
    RoundFigures,
    read_telemetry,
    telemetry_of,
)
from spes_swarm.protocol.members.routing_report import MAX_DEAD, MAX_LOADS, MAX_PAIRS
from spes_swarm.protocol.members.signed import SignedModel

MAX_EXPERTS = 4096
MAX_FAULTS = 4
MAX_SOURCES = 16  # of a mixture
MAX_METRICS = 64
MAX_ROUNDS = 16  # in a report of rounds
MAX_PROVEN, MAX_DUTY_NOTES = 8, 3
MAX_PEER_ID_CHARS = 46  # exactly as many has the id of an RSA key
_MAX_FIGURES = 300  # of all rounds together; each takes 9 bytes of the 6144 that a record may have
_RECENT_S = 60.0

State = Literal["joining", "waiting", "syncing", "training", "leaving"]
_NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_PeerId = Annotated[str, Field(max_length=MAX_PEER_ID_CHARS)]
_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_Pairs = list[Annotated[int, Field(ge=0, lt=MAX_PAIRS)]]


def _pack_experts(experts: list[int]) -> bytes:
    return bitmap(experts, max(experts, default=-1) + 1)


def _unpack_experts(value: object) -> object:
    """Converts a bitmap to a list; returns a list, as passed by this program's own code, unchanged."""
    if not isinstance(value, bytes):
        return value
    if len(value) > MAX_EXPERTS // 8 or value[-1:] == b"\0":
        raise ValueError("not the shortest bitmap of at most 4096 experts")
    return members_of(value, 8 * len(value))


def _check_ascending(experts: list[int]) -> list[int]:
    if any(a >= b for a, b in pairwise(experts)):
        raise ValueError("not in ascending order")
    return experts


# In a record these are a bitmap, one bit per expert, so that the record of a peer with a thousand experts fits.
_Experts = Annotated[
    list[Annotated[int, Field(ge=0, lt=MAX_EXPERTS)]],
    Field(max_length=MAX_EXPERTS),
    BeforeValidator(_unpack_experts),
    AfterValidator(_check_ascending),
    PlainSerializer(_pack_experts, return_type=bytes),
]


class Record(SignedModel):
    """Base of all kinds of records."""

    expires: Annotated[float, Field(gt=0, allow_inf_nan=False)]  # swarm time; equals the DHT's expiration time


class FaultNote(SignedModel):
    """A recent fault at a peer; it does not name who caused it."""

    at: Annotated[float, Field(gt=0, allow_inf_nan=False)]  # swarm time
    kind: Annotated[str, Field(pattern=FAULT_KIND)]


class DutyNote(SignedModel):
    """A peer that has no duty, since most members of the writer's last group doubt it; see rounds/vouchers.py."""

    peer: _PeerId
    since: _Count  # round
    kinds: Annotated[list[Annotated[str, Field(pattern=FAULT_KIND)]], Field(max_length=2)]  # of the faults seen here


class Progress(Record):
    """A peer's state and progress. What it measures, and no decision rests on, is telemetry; see round_metrics.py."""

    name: Annotated[str, Field(max_length=40)]  # public nickname, may be empty
    state: State
    reachable: bool
    round: _Count  # last committed round
    digest: Annotated[bytes, Field(min_length=32, max_length=32)]  # of its whole reference
    tokens: _Count  # since the last commit
    tokens_per_step: _Count
    tokens_per_second: _NonNegative
    experts: _Experts
    swarm_tokens: _Count = 0  # of all peers, in the commits up to `round`; 0: unknown
    # Its position in each data set that the peers divide among themselves; newcomers begin beyond it. See
    # data/streaming/pieces.py.
    data: Annotated[list[_Count], Field(max_length=MAX_SOURCES)] = Field(default_factory=list)
    # Dead experts, as far as they fit; None: not judged yet. Peers raise the alarm by majority: see routing_report.py.
    dead: Annotated[_Pairs, Field(max_length=MAX_DEAD), AfterValidator(_check_ascending)] | None = None
    # To a private run; see protocol/admission/grants.py.
    admission: Annotated[bytes, Field(max_length=MAX_ADMISSION_BYTES)] = b""
    # The peers that it has proofs against, or the newest of them; see network/round/proofs.py.
    proven: Annotated[list[_PeerId], Field(max_length=MAX_PROVEN)] = Field(default_factory=list)
    proven_in: Annotated[list[_Count], Field(max_length=MAX_PROVEN)] = Field(default_factory=list)  # rounds
    # For monitoring, like the telemetry.
    without_duty: Annotated[list[DutyNote], Field(max_length=MAX_DUTY_NOTES)] = Field(default_factory=list)
    in_round: bool = False  # currently in a round
    expert_loads: Annotated[bytes, Field(max_length=MAX_LOADS)] = b""  # see routing_report.py; empty: unknown
    faults: Annotated[list[FaultNote], Field(max_length=MAX_FAULTS)] = Field(default_factory=list)
    telemetry: Annotated[dict[MetricName, Number], Field(max_length=MAX_METRICS)] = Field(default_factory=dict)

    @cached_property
    def metrics(self) -> PeerMetrics:
        """The known metrics of the telemetry."""
        return read_telemetry(PeerMetrics, self.telemetry)


class Lease(Record):
    """Which experts a peer holds."""

    experts: _Experts
    since_round: _Count


class Rounds(Record):
    """What a peer has measured of its last rounds, for monitors, which may look less often than rounds end."""

    rounds: Annotated[list[_Count], Field(min_length=1, max_length=MAX_ROUNDS), AfterValidator(_check_ascending)]
    # Telemetry, as declared by RoundFigures: one value per round. None: unknown in that round.
    figures: Annotated[dict[MetricName, list[Number | None]], Field(max_length=MAX_METRICS)]

    @classmethod
    def of(cls, expires: float, rounds: Sequence[RoundFigures]) -> Self:
        """The record of rounds in ascending order. Figures that are unknown in all of them are left out."""
        known = [telemetry_of(one) for one in rounds]
        figures = {name: [one.get(name) for one in known] for name in _FIGURES if any(name in one for one in known)}
        return cls(expires=expires, rounds=[one.round for one in rounds], figures=figures)

    def reports(self) -> list[RoundFigures]:
        """The figures of each round, in order."""
        return [
            read_telemetry(RoundFigures, {name: values[i] for name, values in self.figures.items()} | {"round": number})
            for i, number in enumerate(self.rounds)
        ]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if any(len(values) != len(self.rounds) for values in self.figures.values()):
            raise ValueError("figures must have one value for each round")
        return self


_FIGURES = tuple(field.name for field in fields(RoundFigures) if field.name != "round")
_NUM_REPORTED = min(MAX_ROUNDS, _MAX_FIGURES // len(_FIGURES))  # rounds at a time: fewer, if there are more metrics


class Volunteer(Record):
    """Announces that a peer is ready to publish the run's model to one target."""

    target: Annotated[bytes, Field(min_length=16, max_length=16)]  # see election.target_digest
    publishing: bool  # it is publishing now


SCHEMAS: dict[str, type[Record]] = {"progress": Progress, "leases": Lease, "publishers": Volunteer, "rounds": Rounds}


class RecentFaults:
    """The last few faults at this peer, for its progress record."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._notes: deque[FaultNote] = deque(maxlen=MAX_FAULTS)

    def note(self, kind: str) -> None:
        """Adds a fault; repeating the newest only updates its time, so that one kind does not displace all others."""
        kind = re.sub(r"[^a-z0-9_-]", "-", kind.lower())[:24] or "unknown"
        if self._notes and self._notes[-1].kind == kind:
            self._notes.pop()
        self._notes.append(FaultNote(at=self._now(), kind=kind))

    def notes(self) -> list[FaultNote]:
        """The recent faults, oldest first."""
        return list(self._notes)


class RecentRounds:
    """This peer's last rounds, for the record of its rounds: those of the last minute, and the last evaluated one."""

    def __init__(self) -> None:
        self._rounds: deque[RoundFigures] = deque(maxlen=_NUM_REPORTED - 1)
        self._evaluated: RoundFigures | None = None
        self._sent = (0, 0)  # a round, and the bytes sent in it, which can be known before and after its figures
        self.changed = False  # since the last record
        self.num_new = 0  # rounds since the last record

    def note(self, figures: RoundFigures) -> None:
        """Adds a round; one that is not newer than the last one replaces all before."""
        if self._rounds and figures.round <= self._rounds[-1].round:  # the peer went back to a checkpoint
            self._rounds.clear()
            self._evaluated = None
        self._rounds.append(figures)
        self.num_new += 1
        self.note_traffic(*self._sent)

    def note_traffic(self, number: int, sent: int) -> None:
        """Sets the bytes that this peer sent in a round."""
        self._sent = number, sent
        if self._rounds and self._rounds[-1].round == number:
            self._rounds[-1] = replace(self._rounds[-1], bytes_sent=sent)
        self.changed = True

    def record(self, expires: float) -> Rounds | None:
        """The record to publish; None before the first round."""
        self.changed, self.num_new = False, 0
        if not self._rounds:
            return None
        newest = self._rounds[-1]
        recent = [one for one in self._rounds if one.time > newest.time - _RECENT_S or one is newest]
        self._evaluated = next((one for one in reversed(recent) if one.eval_loss is not None), self._evaluated)
        old = [self._evaluated] if self._evaluated is not None and self._evaluated.round < recent[0].round else []
        return Rounds.of(expires, [*old, *recent])
