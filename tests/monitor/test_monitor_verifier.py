"""What strangers store or answer: refused, counted, and checked only once."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgpack
import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.monitor.state import RefusalKind
from spes_swarm.monitor.verifier import Verifier
from spes_swarm.network.link.dht_records import MAX_RECORD_BYTES, record_key
from spes_swarm.protocol.members.records import Record
from spes_swarm.protocol.members.signed import seal
from tests.helpers.monitoring import START, TTL_S, lease, progress
from tests.helpers.rounds import identity

RUN = "run-1"
PACK = DHTProtocol.serializer.dumps
LONGEST_S = {"progress": TTL_S + 3600, "leases": 120.0 + 3600}


def verifier() -> Verifier:
    return Verifier(RUN, lambda: START, LONGEST_S)


def stored(
    message: Record | None = None, *, kind: str = "progress", run: str = RUN, writer: int = 0, owner: Any = None
) -> DHTRecord:
    record = message or progress()
    who = identity(writer)
    return DHTRecord(
        DHTID.generate(source=record_key(RUN, kind)).to_bytes(),
        PACK(who.peer_id if owner is None else owner),
        PACK(seal(who, kind, run, record)),
        record.expires,
    )


GOOD = stored()


def changed(**fields: Any) -> DHTRecord:
    return dataclasses.replace(GOOD, **fields)


def resealed(payload: Any) -> DHTRecord:
    """Signed as it should be, whatever it is."""
    data = msgpack.packb(payload)
    signature = identity(0).sign(b"\0".join((b"spes_swarm", b"7.0", b"progress", RUN.encode(), data)))
    return changed(value=PACK(msgpack.packb([[7, 0], data, identity(0).public_key_der, signature])))


FIELDS = msgpack.unpackb(msgpack.packb(progress().model_dump()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (stored(owner=identity(1).peer_id), "forged"),
        (changed(value=GOOD.value[:-1] + bytes([GOOD.value[-1] ^ 1])), "forged"),
        (changed(subkey=DHTProtocol.IS_REGULAR_VALUE), "forged"),
        (stored(run="run-2"), "forged"),  # a true record of another run
        (changed(key=DHTID.generate(source=record_key(RUN, "leases")).to_bytes()), "forged"),  # of another kind
        (changed(expiration_time=GOOD.expiration_time + 1), "replayed"),
        (changed(expiration_time=math.nan), "replayed"),
        (changed(value=PACK(b"\0" * (MAX_RECORD_BYTES + 16))), "oversized"),
        (changed(subkey=PACK("Q" * 200)), "oversized"),
        (changed(value=b"rubbish"), "malformed"),
        (changed(value=PACK({"experts": [0]})), "malformed"),
        (changed(key=b"unknown"), "malformed"),
        (changed(value=PACK(msgpack.packb([[8, 0], b"whatever"]))), "other_version"),
        (changed(value=PACK(msgpack.packb([b"", b"", b""]))), "other_version"),
        (resealed({**FIELDS, "surprise": 1}), "malformed"),
        (resealed({**FIELDS, "round": -1}), "malformed"),
        (resealed({**FIELDS, "tokens": True}), "malformed"),
        (resealed({**FIELDS, "telemetry": {"loss": math.nan}}), "malformed"),
        (resealed({**FIELDS, "experts": b"\1\0"}), "malformed"),
        (resealed({**FIELDS, "experts": b"\1" * 513}), "malformed"),
        (resealed({**FIELDS, "faults": [{"at": 1.0, "kind": "round"}] * 5}), "malformed"),
        (resealed({**FIELDS, "faults": [{"at": 1.0, "kind": "<b>"}]}), "malformed"),
        (resealed({**FIELDS, "name": "x" * 41}), "malformed"),
        (resealed([]), "malformed"),
        (stored(progress(expires=START + 10 * 3600)), "far_future"),
        (stored(lease(START + 10 * 3600, [0]), kind="leases"), "far_future"),
        (changed(expiration_time=math.inf), "far_future"),
    ],
)
def test_it_is_refused_and_counted(record: DHTRecord, kind: RefusalKind) -> None:
    checker = verifier()
    assert checker.validate(GOOD)
    assert not checker.validate(record)
    assert checker.refused == {kind: 1}
    checker.forget()
    assert not checker.validate(record) or math.isnan(record.expiration_time)
    assert checker.refused[kind] >= 1


def test_the_same_bytes_are_checked_once_while_they_keep_coming() -> None:
    checker = verifier()
    bad = changed(value=b"rubbish")
    for _ in range(5):
        for _ in range(3):
            assert checker.validate(GOOD)
            assert not checker.validate(bad)
        checker.forget()
    assert (checker.num_verified, checker.refused) == (2, {"malformed": 1})
    checker.forget()
    checker.forget()
    assert checker._verdicts == checker._before == {}


def test_whether_a_record_lives_too_long_is_asked_of_the_clock_each_time() -> None:
    """The verdict on its bytes is remembered, that on its expiration is not: the clock is corrected both ways."""
    time = [START]
    checker = Verifier(RUN, lambda: time[0], LONGEST_S)
    for now, is_good in ((START, True), (START - 7200, False), (START, True), (START - 7200, False), (START, True)):
        time[0] = now
        assert checker.validate(GOOD) == is_good
    assert (checker.num_verified, checker.refused) == (1, {"far_future": 1})
    for _ in range(3):
        checker.forget()
    assert checker._verdicts == checker._before == {}


def test_what_hivemind_hands_out_is_opened_without_another_check() -> None:
    checker = verifier()
    assert checker.validate(GOOD)
    sealed = DHTProtocol.serializer.loads(GOOD.value)
    assert checker.open("progress", identity(0).peer_id, sealed, GOOD.expiration_time) == progress()
    assert checker.num_verified == 1
    assert checker.open("progress", identity(1).peer_id, sealed, GOOD.expiration_time) is None
    assert checker.open("leases", identity(0).peer_id, sealed, GOOD.expiration_time) is None
    assert checker.open("progress", identity(0).peer_id, {"no": "bytes"}, GOOD.expiration_time) is None


def test_a_flood_of_distinct_rubbish_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spes_swarm.monitor.verifier._MAX_REMEMBERED", 50)
    checker = verifier()
    for number in range(200):
        assert not checker.validate(changed(value=b"rubbish" * number))
    assert len(checker._verdicts) == 50


@given(st.binary(max_size=60), st.binary(max_size=300), st.floats())
def test_rubbish_never_raises(subkey: bytes, value: bytes, expires: float) -> None:
    checker = verifier()
    assert not checker.validate(changed(subkey=subkey, value=value, expiration_time=expires))
    assert not checker.validate(changed(value=value))
    assert not checker.validate(changed(subkey=subkey))
