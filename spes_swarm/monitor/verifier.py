"""Verifies each record that the DHT delivers to the monitor once, and counts the refused ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from spes_swarm.base.errors import ProtocolError
from spes_swarm.monitor.state import RefusalKind
from spes_swarm.network.link.dht_records import MAX_LIFETIME_S, RunRecordValidator, Vet, accept, record_key
from spes_swarm.network.transport.dht import RecordValidator, StoredRecord, key_bytes, stored_record
from spes_swarm.protocol.members.records import Record

# The displayed kind of a refused record, by the validator's reason.
_REFUSALS: Final[dict[str, RefusalKind]] = {
    "signature": "forged",
    "owner": "forged",
    "subkey": "forged",  # a plain value, which would replace the records of all peers
    "expiration": "replayed",  # expires later than its writer has signed
    "lifetime": "far_future",
    "version": "other_version",
    "oversized": "oversized",
    "malformed": "malformed",
    "schema": "malformed",
    "key": "malformed",
}
# A hostile node can send any number of distinct records; an honest swarm has two for each peer.
_MAX_REMEMBERED = 20_000

_Verdict = tuple[str, Record] | RefusalKind  # (writer, message), or why it was refused


class Verifier(RecordValidator):
    """The record validator of the monitor's DHT node, with a cache of its verdicts.

    Each refresh delivers all records again, from several nodes, and verifying a signature takes far longer than a
    lookup. A verdict is kept while the same bytes keep arriving; see `forget`.
    `longest_s` tells how far ahead records of each kind may expire; honest ones stay below it.
    """

    def __init__(
        self, run_id: str, now: Callable[[], float], longest_s: Mapping[str, float], vet: Vet = accept
    ) -> None:
        self._run_id = run_id
        self._now = now
        self._vet = vet
        self._longest_s = {key_bytes(record_key(run_id, kind)): seconds for kind, seconds in longest_s.items()}
        self._validator = RunRecordValidator(run_id, now)
        # By record, and whether it expires too far ahead, which depends on the time.
        self._verdicts: dict[tuple[StoredRecord, bool], _Verdict] = {}
        self._before: dict[tuple[StoredRecord, bool], _Verdict] = {}  # from before the last `forget`
        self.refused: Counter[RefusalKind] = Counter()  # the same bytes count once while they keep arriving
        self.num_verified = 0  # signatures checked so far

    def validate(self, record: StoredRecord) -> bool:
        """Returns True if a record is valid; hivemind calls it for every record from other nodes."""
        return self._admitted(record) is not None

    def open(self, kind: str, owner: object, sealed: object, expires: float) -> Record | None:
        """The message of a record as hivemind returns it; None if the record is refused."""
        return self._admitted(stored_record(record_key(self._run_id, kind), owner, sealed, expires))

    def _admitted(self, record: StoredRecord) -> Record | None:
        verdict = self._verdict(record)
        if isinstance(verdict, str):
            return None
        try:  # each time, since a writer may be admitted later, or revoked
            self._vet(*verdict)
        except ProtocolError:
            return None
        return verdict[1]

    def forget(self) -> None:
        """Drops the verdicts on records that have not arrived since the last call; to be called after each refresh."""
        self._before, self._verdicts = self._verdicts, {}

    def _verdict(self, record: StoredRecord) -> _Verdict:
        too_long = record.expiration_time > self._now() + self._longest_s.get(record.key, MAX_LIFETIME_S)
        key = record, too_long
        verdict = self._verdicts.get(key) or self._before.get(key) or self._judge(record, too_long)
        if len(self._verdicts) < _MAX_REMEMBERED:
            self._verdicts[key] = verdict
        return verdict

    def _judge(self, record: StoredRecord, too_long: bool) -> _Verdict:
        try:
            if too_long:
                raise ProtocolError("lifetime", "the record's lifetime is too long")
            self.num_verified += 1
            return self._validator.open(record)
        except ProtocolError as exc:
            kind = _REFUSALS.get(exc.kind, "malformed")
        except Exception:  # no input from other nodes may end the monitor
            kind = "malformed"
        self.refused[kind] += 1
        return kind
