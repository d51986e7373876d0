"""Checks every record that the DHT brings to the monitor, once, and counts those it refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.run_records import MAX_LIFETIME_S, RunRecordValidator, record_key
from spes_swarm.protocol.members.records import Record

# What a person is told about a refused record, by the reason that the validator gives.
_REFUSALS: Final = {
    "signature": "forged",
    "owner": "forged",
    "subkey": "forged",  # a plain value, which would replace everybody's records
    "expiration": "replayed",  # made to live longer than its writer has signed
    "lifetime": "far_future",
    "oversized": "oversized",
    "malformed": "malformed",
    "schema": "malformed",
    "key": "malformed",
}
# A hostile node may send as many distinct records as it likes; an honest swarm has two for each peer.
_MAX_REMEMBERED = 20_000

_Verdict = tuple[str, Record] | str  # (writer, message), or why it was refused


class Verifier(RecordValidatorBase):  # type: ignore[misc]  # hivemind ships no types
    """The validator of the monitor's DHT node, which remembers its verdicts.

    Every refresh brings all records again, and from several nodes; a signature takes far longer to verify than to look
    up. Verdicts are kept while the same bytes keep coming: see `forget`. How far ahead a record expires is not part of
    them: the clock moves.

    Args:
        run_id: the run.
        now: the swarm's time in Unix seconds.
        longest_s: by kind, how far ahead of now a record may expire; honest ones of that kind do not.
    """

    def __init__(self, run_id: str, now: Callable[[], float], longest_s: Mapping[str, float]) -> None:
        self._run_id = run_id
        self._now = now
        self._longest_s = {
            DHTID.generate(source=record_key(run_id, kind)).to_bytes(): seconds for kind, seconds in longest_s.items()
        }
        self._validator = RunRecordValidator(run_id, now)
        self._verdicts: dict[DHTRecord, _Verdict] = {}
        self._before: dict[DHTRecord, _Verdict] = {}
        self._too_long: set[DHTRecord] = set()  # refused for their lifetime since the last call of `forget`
        self._too_long_before: set[DHTRecord] = set()
        self._refused: Counter[str] = Counter()
        self.num_verified = 0  # signatures checked so far

    @property
    def refused(self) -> dict[str, int]:
        """How many records were refused, by kind, sorted; the same bytes count once while they keep coming."""
        return dict(sorted(self._refused.items()))

    def validate(self, record: DHTRecord) -> bool:
        """Returns True if a record may be used; called by hivemind for everything that comes from other nodes."""
        return not isinstance(self._verdict(record), str)

    def open(self, kind: str, owner: object, sealed: object, expires: float) -> Record | None:
        """The message of a record as hivemind hands it out; None when it was refused."""
        pack = DHTProtocol.serializer.dumps
        key = DHTID.generate(source=record_key(self._run_id, kind)).to_bytes()
        verdict = self._verdict(DHTRecord(key, pack(owner), pack(sealed), expires))
        return None if isinstance(verdict, str) else verdict[1]

    def forget(self) -> None:
        """Drops the verdicts on records that have not come since the last call; to be called after each refresh."""
        self._before, self._verdicts = self._verdicts, {}
        self._too_long_before, self._too_long = self._too_long, set()

    def _verdict(self, record: DHTRecord) -> _Verdict:
        if record.expiration_time > self._now() + self._longest_s.get(record.key, MAX_LIFETIME_S):
            return self._refuse_lifetime(record)
        verdict = self._verdicts.get(record) or self._before.get(record) or self._judge(record)
        if len(self._verdicts) < _MAX_REMEMBERED:
            self._verdicts[record] = verdict
        return verdict

    def _refuse_lifetime(self, record: DHTRecord) -> str:
        kind = _REFUSALS["lifetime"]
        if record not in self._too_long and record not in self._too_long_before:
            self._refused[kind] += 1
        if len(self._too_long) < _MAX_REMEMBERED:
            self._too_long.add(record)
        return kind

    def _judge(self, record: DHTRecord) -> _Verdict:
        try:
            self.num_verified += 1
            return self._validator.open(record)
        except ProtocolError as exc:
            kind = _REFUSALS.get(exc.kind, "malformed")
        except Exception:  # whatever a stranger's bytes bring about must not end the monitor
            kind = "malformed"
        self._refused[kind] += 1
        return kind

    def merge_with(self, other: RecordValidatorBase) -> bool:
        """Never merges: each run has its own validator."""
        return False
