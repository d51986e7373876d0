"""The run's records in the DHT: who trains what, and how far everybody is.

Two keys, each a dictionary with one entry for each peer, keyed by its peer id:

`RUN.progress`  short-lived, renewed every few seconds: what a monitor shows and what decides that a round is due
`RUN.leases`    long-lived: which experts a peer holds

Every DHT node of the run checks every record: only these two keys exist, entries only under the writer's own peer id,
signed by it, of the right schema, and with the expiration time that was signed (so nothing can be replayed to live
longer). A plain value, which would wipe the whole dictionary, is refused like any unknown key.
"""

from __future__ import annotations

import time
from typing import Annotated, Literal

import msgpack
from hivemind.dht import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from pydantic import Field

from spes_swarm.errors import ProtocolError
from spes_swarm.identity import Identity
from spes_swarm.signed import Model, SignedModel, seal, unseal

MAX_RECORD_BYTES = 4096
# Records may not claim to be valid for longer than this, or a peer could fill others' memory for good.
MAX_LIFETIME_S = 24 * 3600.0

State = Literal["joining", "waiting", "syncing", "training", "leaving"]
_NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, lt=1 << 62)]


class Record(SignedModel):
    """What both kinds have in common."""

    expires: Annotated[float, Field(gt=0, allow_inf_nan=False)]  # Unix time; equals the DHT's expiration time


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
    loss: _NonNegative | None
    experts: Annotated[list[_Count], Field(max_length=1024)]
    round_seconds: _NonNegative  # of the last round
    bytes_sent: _Count  # payload of the last round
    bytes_received: _Count


class Lease(Record):
    """Which experts a peer holds."""

    experts: Annotated[list[_Count], Field(max_length=1024)]
    since_round: _Count


_SCHEMAS: dict[str, type[Record]] = {"progress": Progress, "leases": Lease}


def record_key(run_id: str, kind: str) -> str:
    """The DHT key of one kind of record."""
    return f"{run_id}.{kind}"


class RunRecordValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind ships no types
    """Accepts the records of one run and nothing else."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._kinds = {DHTID.generate(source=record_key(run_id, kind)).to_bytes(): kind for kind in _SCHEMAS}

    def validate(self, record: DHTRecord) -> bool:
        """Whether a record may be stored or used; called for everything that comes from other nodes."""
        try:
            self._check(record)
        except ProtocolError:
            return False
        return True

    def _check(self, record: DHTRecord) -> None:
        kind = self._kinds.get(record.key)
        if kind is None:
            raise ProtocolError("key", "not a key of this run")
        if record.subkey in DHTProtocol.RESERVED_SUBKEYS:
            raise ProtocolError("subkey", "a plain value would replace the dictionary")
        if len(record.value) > MAX_RECORD_BYTES + 16 or len(record.subkey) > 128:
            raise ProtocolError("oversized", f"a record of {len(record.value)} bytes")
        if record.expiration_time > time.time() + MAX_LIFETIME_S:
            raise ProtocolError("expiration", "the record claims to live too long")
        try:
            owner = msgpack.unpackb(record.subkey)
            sealed = msgpack.unpackb(record.value)
        except (ValueError, msgpack.exceptions.UnpackException) as exc:
            raise ProtocolError("malformed", "not msgpack") from exc
        if not isinstance(sealed, bytes):
            raise ProtocolError("malformed", "a record is a signed message")
        writer, message = unseal(sealed, kind, self._run_id, _SCHEMAS[kind])
        if owner != writer:
            raise ProtocolError("owner", f"{writer} wrote a record in the name of {owner}")
        if message.expires != record.expiration_time:
            raise ProtocolError("expiration", "the record's expiration is not the signed one")

    def merge_with(self, other: RecordValidatorBase) -> bool:
        """Never merges: each run has its own validator."""
        return False


class Records:
    """Reads and writes the records of one run."""

    def __init__(self, node: DHTNode, identity: Identity, run_id: str) -> None:
        self._node = node
        self._identity = identity
        self._run_id = run_id

    async def publish(self, kind: str, record: Record) -> bool:
        """Stores this peer's record; returns whether it is in the DHT afterwards."""
        sealed = seal(self._identity, kind, self._run_id, record)
        key, me = record_key(self._run_id, kind), self._identity.peer_id
        if await self._node.store(key, sealed, record.expires, subkey=me):
            return True
        # Nodes also hand records on among themselves; one that has this very record already answers "not newer".
        found = await self._node.get(key, latest=True)
        stored = found.value.get(me) if found is not None and isinstance(found.value, dict) else None
        return stored is not None and stored.expiration_time >= record.expires

    async def read(self, kind: str, schema: type[Model]) -> dict[str, Model]:
        """All valid, unexpired records of a kind by peer id."""
        found = await self._node.get(record_key(self._run_id, kind), latest=True)
        records: dict[str, Model] = {}
        if found is None or not isinstance(found.value, dict):
            return records
        for owner, entry in found.value.items():
            try:
                writer, message = unseal(entry.value, kind, self._run_id, schema)
            except (ProtocolError, TypeError):
                continue  # the validator has refused it already; a hostile node may still return it to us
            if writer == owner and entry.expiration_time > time.time():
                records[writer] = message
        return records
