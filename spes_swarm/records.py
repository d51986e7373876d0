"""The run's records in the DHT: who trains what, and how far everybody is.

Two keys, each a dictionary with one entry for each peer, keyed by its peer id:

`RUN.progress`  short-lived, renewed every few seconds: what a monitor shows and what decides that a round is due
`RUN.leases`    long-lived: which experts a peer holds
`RUN.publishers` short-lived: who is ready to publish the run's model

Every DHT node of the run checks every record: only these keys exist, entries only under the writer's own peer id,
signed by it, of the right schema, and with the expiration time that was signed (so nothing can be replayed to live
longer). A plain value, which would wipe the whole dictionary, is refused like any unknown key.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from hivemind.dht import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from spes_swarm.bitmap import bitmap, members_of
from spes_swarm.decoding import unpack
from spes_swarm.errors import ProtocolError
from spes_swarm.identity import Identity
from spes_swarm.signed import Model, SignedModel, seal, unseal
from spes_swarm.verified_records import VerifiedRecords

MAX_RECORD_BYTES = 4096
# Records may not claim to be valid for longer than this, or a peer could fill others' memory for good.
MAX_LIFETIME_S = 24 * 3600.0

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


_SCHEMAS: dict[str, type[Record]] = {"progress": Progress, "leases": Lease, "publishers": Volunteer}


# Enough for the records of 10,000 peers; a message of this program's own has 4 KB, one with all experts 150 KB.
_MAX_REMEMBERED_BYTES = 64 << 20


def _num_bytes(record: Record) -> int:
    """A generous estimate of the memory that a decoded record takes."""
    return 4096 + 40 * len(getattr(record, "experts", ()))


_VERIFIED: VerifiedRecords[Record] = VerifiedRecords(_MAX_REMEMBERED_BYTES, _num_bytes)


def open_sealed(sealed: object, kind: str, run_id: str) -> tuple[str, Record]:
    """Verifies a signed record, once for the same bytes; returns (peer id of its writer, message).

    Raises:
        ProtocolError: (`malformed`, `oversized`, `signature`, `schema`) it must not be used.
    """
    if not isinstance(sealed, bytes):
        raise ProtocolError("malformed", "a record is a signed message")
    return _VERIFIED.open(sealed, kind, run_id, lambda: unseal(sealed, kind, run_id, _SCHEMAS[kind]))


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


def record_key(run_id: str, kind: str) -> str:
    """The DHT key of one kind of record."""
    return f"{run_id}.{kind}"


class RunRecordValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind ships no types
    """Accepts the records of one run and nothing else.

    Args:
        run_id: the run.
        now: the swarm's time in Unix seconds.
    """

    def __init__(self, run_id: str, now: Callable[[], float]) -> None:
        self._run_id = run_id
        self._now = now
        self._kinds = {DHTID.generate(source=record_key(run_id, kind)).to_bytes(): kind for kind in _SCHEMAS}

    def validate(self, record: DHTRecord) -> bool:
        """Whether a record may be stored or used; called for everything that comes from other nodes."""
        try:
            self.open(record)
        except ProtocolError:
            return False
        return True

    def open(self, record: DHTRecord) -> tuple[str, Record]:
        """Checks a record and returns (peer id of its writer, message).

        Raises:
            ProtocolError: (`key`, `subkey`, `oversized`, `lifetime`, `malformed`, `signature`, `schema`, `owner`,
                `expiration`) it must not be stored or used.
        """
        kind = self._kinds.get(record.key)
        if kind is None:
            raise ProtocolError("key", "not a key of this run")
        if record.subkey in DHTProtocol.RESERVED_SUBKEYS:
            raise ProtocolError("subkey", "a plain value would replace the dictionary")
        if len(record.value) > MAX_RECORD_BYTES + 16 or len(record.subkey) > 128:
            raise ProtocolError("oversized", f"a record of {len(record.value)} bytes")
        if record.expiration_time > self._now() + MAX_LIFETIME_S:
            raise ProtocolError("lifetime", "the record claims to live too long")
        owner, sealed = unpack(record.subkey), unpack(record.value)
        writer, message = open_sealed(sealed, kind, self._run_id)
        if owner != writer:
            raise ProtocolError("owner", f"{writer} wrote a record in the name of {owner}")
        if message.expires != record.expiration_time:
            raise ProtocolError("expiration", "the record's expiration is not the signed one")
        return writer, message

    def merge_with(self, other: RecordValidatorBase) -> bool:
        """Never merges: each run has its own validator."""
        return False


async def search(node: DHTNode, key: str) -> Mapping[Any, Any]:
    """The entries under a key by subkey, with their `value` and `expiration_time`, merged from all nodes that answer.

    By hivemind's own "latest" (infinity), a single node that answers with an empty dictionary that never expires would
    end the search, and everybody would be gone. Nothing compares with NaN, so that every node near the key is heard.
    The node must not share searches (`reuse_get_requests=False`): one that ends early would end this one.
    """
    found = (await node.get_many([key], sufficient_expiration_time=math.nan)).get(key)
    return found.value if found is not None and isinstance(found.value, dict) else {}


class Records:
    """Reads and writes the records of one run; `now` is the swarm's time in Unix seconds."""

    def __init__(self, node: DHTNode, identity: Identity, run_id: str, now: Callable[[], float]) -> None:
        self._node = node
        self._identity = identity
        self._run_id = run_id
        self._now = now

    async def publish(self, kind: str, record: Record) -> bool:
        """Stores this peer's record; returns whether it is in the DHT afterwards."""
        sealed = seal(self._identity, kind, self._run_id, record)
        key, me = record_key(self._run_id, kind), self._identity.peer_id
        if await self._node.store(key, sealed, record.expires, subkey=me):
            return True
        # Nodes also hand records on among themselves; one that has this very record already answers "not newer".
        stored = (await search(self._node, key)).get(me)
        return stored is not None and stored.expiration_time >= record.expires

    async def read(self, kind: str, schema: type[Model]) -> dict[str, Model]:
        """All valid, unexpired records of a kind by peer id."""
        records: dict[str, Model] = {}
        for owner, entry in (await search(self._node, record_key(self._run_id, kind))).items():
            try:
                writer, message = open_sealed(entry.value, kind, self._run_id)
            except ProtocolError:
                continue  # the validator has refused it already; a hostile node may still return it to us
            if writer == owner and isinstance(message, schema) and entry.expiration_time > self._now():
                records[writer] = message
        return records
