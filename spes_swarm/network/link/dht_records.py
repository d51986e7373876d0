"""The run's records in the DHT: what each peer trains, and how far it is.

Four keys, each a dictionary with one entry per peer, keyed by its peer id:

`RUN.progress`    short-lived, renewed every few seconds: what a monitor shows and what decides that a round is due
`RUN.leases`      long-lived: which experts a peer holds
`RUN.publishers`  short-lived: which peers are ready to publish the run's model
`RUN.rounds`      long-lived: what each peer has measured of its last rounds, for monitors

Every DHT node of the run checks every record. Only these keys exist. An entry must lie under its writer's own peer id,
be signed by it, have the right schema, and expire at the signed time (so no record can be replayed to live longer). A
plain value, which would replace the whole dictionary, is refused like any unknown key.

Identities and records cost nothing. So a node keeps records of only a few *strangers*, peers that it has never been in
contact with; a newcomer calls every peer that it finds, so its records are kept wherever it matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from spes_swarm.base.decoding import unpack
from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.transport.dht import DhtNode, RecordValidator, StoredRecord, is_plain, key_bytes
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.members.record_cache import VerifiedRecords
from spes_swarm.protocol.members.records import SCHEMAS, Record
from spes_swarm.protocol.members.signed import seal, unseal

MAX_RECORD_BYTES = 6144
# Records must not claim to be valid for longer than this, or a peer could fill other peers' memory permanently.
MAX_LIFETIME_S = 24 * 3600.0

# Enough for the records of 2,500 peers. By the estimate, one of rounds takes 14 KB, others 5 KB (all experts: 170 KB).
_MAX_REMEMBERED_BYTES = 64 << 20
# Strangers whose records are kept at a time, and the memory for their decoded ones: the three kinds of 256 peers.
MAX_STRANGERS = 256
_MAX_STRANGERS_BYTES = 4 << 20


def _num_bytes(record: Record) -> int:
    """A generous estimate of the memory that a decoded record takes."""
    sizes = {"experts": 40, "telemetry": 160, "figures": 600, "proven": 80, "without_duty": 850}
    return 4096 + sum(each * len(getattr(record, name, ())) for name, each in sizes.items())


_VERIFIED: VerifiedRecords[Record] = VerifiedRecords(_MAX_REMEMBERED_BYTES, _num_bytes)
_OF_STRANGERS: VerifiedRecords[Record] = VerifiedRecords(_MAX_STRANGERS_BYTES, _num_bytes)


def everybody(peer_id: str) -> bool:
    """Nobody is a stranger, as for a monitor."""
    del peer_id
    return True


def open_sealed(sealed: object, kind: str, run_id: str, *, is_stranger: bool) -> tuple[str, Record]:
    """Verifies a signed record, only once for the same bytes; returns (peer id of its writer, message).

    Raises:
        ProtocolError: (`malformed`, `oversized`, `version`, `signature`, `schema`) the record must not be used.
    """
    if not isinstance(sealed, bytes):
        raise ProtocolError("malformed", "a record is a signed message")
    cache = _OF_STRANGERS if is_stranger else _VERIFIED
    return cache.open(sealed, kind, run_id, lambda: unseal(sealed, kind, run_id, SCHEMAS[kind]))


def record_key(run_id: str, kind: str) -> str:
    """The DHT key of one kind of record."""
    return f"{run_id}.{kind}"


Vet = Callable[[str, Record], None]
"""Raises ProtocolError if the writer of a record may not take part in the run."""


def accept(writer: str, record: Record) -> None:
    """Accepts all writers, as in an open run."""
    del writer, record


class RunRecordValidator(RecordValidator):
    """Accepts the records of one run and nothing else; `now` returns the swarm's time in Unix seconds, `is_known` True
    for a peer that this one has been in contact with.
    """

    def __init__(
        self,
        run_id: str,
        now: Callable[[], float],
        is_known: Callable[[str], bool] = everybody,
        vet: Vet = accept,
    ) -> None:
        self._run_id = run_id
        self._now = now
        self._is_known = is_known
        self._vet = vet
        self._strangers: dict[str, float] = {}  # writers of records that may be stored, until when
        self._pruned_at = -math.inf  # swarm time
        self._kinds = {key_bytes(record_key(run_id, kind)): kind for kind in SCHEMAS}

    def validate(self, record: StoredRecord) -> bool:
        """Returns True if a record may be stored or used; called for every record from another node."""
        try:
            self.open(record)
        except ProtocolError:
            return False
        return True

    def open(self, record: StoredRecord) -> tuple[str, Record]:
        """Checks a record and returns (peer id of its writer, message).

        Raises:
            ProtocolError: (`key`, `subkey`, `oversized`, `lifetime`, `malformed`, `version`, `signature`, `schema`,
                `owner`, `expiration`, `strangers`, `stranger`, `terms`) the record must not be stored or used.
        """
        kind = self._kinds.get(record.key)
        if kind is None:
            raise ProtocolError("key", "not a key of this run")
        if is_plain(record):
            raise ProtocolError("subkey", "a plain value would replace the dictionary")
        if len(record.value) > MAX_RECORD_BYTES + 16 or len(record.subkey) > 128:
            raise ProtocolError("oversized", f"a record of {len(record.value)} bytes")
        if record.expiration_time > self._now() + MAX_LIFETIME_S:
            raise ProtocolError("lifetime", "the record's lifetime is too long")
        owner, sealed = unpack(record.subkey), unpack(record.value)
        if not isinstance(owner, str):
            raise ProtocolError("owner", "a record lies under the id of its writer")
        is_stranger = not self._is_known(owner)
        if is_stranger and not self._has_room(owner):  # asked first: a signature takes longer to verify
            raise ProtocolError("strangers", f"records of {MAX_STRANGERS} peers that never had contact with this one")
        writer, message = open_sealed(sealed, kind, self._run_id, is_stranger=is_stranger)
        if owner != writer:
            raise ProtocolError("owner", f"{writer} wrote a record in the name of {owner}")
        if message.expires != record.expiration_time:
            raise ProtocolError("expiration", "the record's expiration is not the signed one")
        self._vet(writer, message)
        if is_stranger:
            self._strangers[writer] = max(message.expires, self._strangers.get(writer, 0.0))
        return writer, message

    def _has_room(self, stranger: str) -> bool:
        now = self._now()
        if stranger not in self._strangers and len(self._strangers) >= MAX_STRANGERS and now > self._pruned_at + 1.0:
            self._pruned_at = now  # not for each of the thousands of records that one message may bring
            self._strangers = {
                peer: until for peer, until in self._strangers.items() if until > now and not self._is_known(peer)
            }
        return stranger in self._strangers or len(self._strangers) < MAX_STRANGERS


class RecordWriter:
    """Writes this peer's records of one run.

    Attributes:
        near: the ids of the other peers whose nodes have taken the last progress record.
        on_write: called with the kind of each record, its writer, its bytes and its expiration.
    """

    def __init__(self, node: DhtNode, identity: Identity, run_id: str) -> None:
        self._node = node
        self._identity = identity
        self._run_id = run_id
        self.near: AbstractSet[str] = frozenset()
        self.on_write: Callable[[str, str, bytes, float], object] = lambda *written: None

    async def publish(self, kind: str, record: Record) -> bool:
        """Stores this peer's record. Returns True if it is in the DHT afterwards."""
        sealed = seal(self._identity, kind, self._run_id, record)
        key, me = record_key(self._run_id, kind), self._identity.peer_id
        self.on_write(kind, me, sealed, record.expires)
        if taken := await self._node.store(key, sealed, record.expires, me):
            if kind == "progress":
                self.near = taken - {me}
            return True
        # Nodes also copy records to each other; one that has this very record already answers "not newer".
        stored = (await self._node.search(key)).get(me)
        return stored is not None and stored.expiration_time >= record.expires
