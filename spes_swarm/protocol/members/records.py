"""What peers tell the swarm about themselves; records.py keeps these records in the DHT."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from spes_swarm.base.bitmap import bitmap, members_of
from spes_swarm.protocol.members.signed import SignedModel

MAX_EXPERTS = 4096
MAX_FAULTS = 4
FAULT_KIND = r"^[a-z0-9_-]{1,24}$"

State = Literal["joining", "waiting", "syncing", "training", "leaving"]
_NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, lt=1 << 62)]


def _pack_experts(experts: list[int]) -> bytes:
    return bitmap(experts, max(experts, default=-1) + 1)


def _unpack_experts(value: object) -> object:
    """A bitmap becomes a list; a list, as this program's own code gives it, stays one."""
    if not isinstance(value, bytes):
        return value
    if len(value) > MAX_EXPERTS // 8 or value[-1:] == b"\0":
        raise ValueError("not the shortest bitmap of at most 4096 experts")
    return members_of(value, 8 * len(value))


def _check_experts(experts: list[int]) -> list[int]:
    if any(a >= b for a, b in pairwise(experts)):
        raise ValueError("experts are not in ascending order")
    return experts


# In a record a bitmap, one bit for each expert, so that a peer with a thousand of them fits.
_Experts = Annotated[
    list[Annotated[int, Field(ge=0, lt=MAX_EXPERTS)]],
    Field(max_length=MAX_EXPERTS),
    BeforeValidator(_unpack_experts),
    AfterValidator(_check_experts),
    PlainSerializer(_pack_experts, return_type=bytes),
]


class Record(SignedModel):
    """What all kinds have in common."""

    expires: Annotated[float, Field(gt=0, allow_inf_nan=False)]  # swarm time; equals the DHT's expiration time


class FaultNote(SignedModel):
    """Something that went wrong at a peer; nothing of whose fault it was."""

    at: Annotated[float, Field(gt=0, allow_inf_nan=False)]  # swarm time
    kind: Annotated[str, Field(pattern=FAULT_KIND)]


class Progress(Record):
    """How far a peer is."""

    name: Annotated[str, Field(max_length=40)]  # public nickname, may be empty
    state: State
    reachable: bool
    round: _Count  # last committed round
    digest: Annotated[bytes, Field(min_length=32, max_length=32)]  # of its whole reference
    step: _Count  # local steps so far
    tokens: _Count  # since the last commit
    tokens_per_step: _Count
    tokens_per_second: _NonNegative
    loss: _NonNegative | None  # of the last local step
    experts: _Experts
    round_seconds: _NonNegative  # of the last round
    bytes_sent: _Count  # payload of the last round whose traffic has ended
    bytes_received: _Count
    # For those who watch; nothing that peers decide depends on them.
    in_round: bool = False  # holds a round at this moment
    total_tokens: _Count = 0  # trained on in this run
    swarm_tokens: _Count = 0  # of all peers, that have gone into commits until `round`; 0: it does not know
    train_loss: _NonNegative | None = None  # mean over the steps that went into `round`; None: not known yet
    eval_loss: _NonNegative | None = None  # on held-out text after `round`; None: not evaluated, or not yet
    eval_loss_stderr: _NonNegative | None = None  # its standard error; None: not known
    faults: Annotated[list[FaultNote], Field(max_length=MAX_FAULTS)] = Field(default_factory=list)


class Lease(Record):
    """Which experts a peer holds."""

    experts: _Experts
    since_round: _Count


class Volunteer(Record):
    """That a peer is ready to publish the run's model in one place."""

    target: Annotated[bytes, Field(min_length=16, max_length=16)]  # digest of where: see election.target_digest
    publishing: bool  # it is at it now


SCHEMAS: dict[str, type[Record]] = {"progress": Progress, "leases": Lease, "publishers": Volunteer}


class RecentFaults:
    """The last few things that went wrong at this peer, as they are told in its progress record."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._notes: deque[FaultNote] = deque(maxlen=MAX_FAULTS)

    def note(self, kind: str) -> None:
        """Adds one; a repetition only moves the time of the newest, so that one kind does not displace all others."""
        kind = re.sub(r"[^a-z0-9_-]", "-", kind.lower())[:24] or "unknown"
        if self._notes and self._notes[-1].kind == kind:
            self._notes.pop()
        self._notes.append(FaultNote(at=self._now(), kind=kind))

    def notes(self) -> list[FaultNote]:
        """Oldest first."""
        return list(self._notes)
