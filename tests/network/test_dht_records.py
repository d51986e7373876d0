"""Who may store what in the DHT: everything goes through hivemind's own serializer, as on the wire."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hivemind.dht import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils import ValueWithExpiration, get_dht_time
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.network.link.dht_records import (
    MAX_LIFETIME_S,
    MAX_RECORD_BYTES,
    RecordWriter,
    RunRecordValidator,
    _num_bytes,
    record_key,
)
from spes_swarm.network.transport.daemon import Daemon, bootstrap
from spes_swarm.network.transport.dht import DhtNode
from spes_swarm.network.transport.hivemind_changes import bound_storage
from spes_swarm.protocol.admission.grants import MAX_ADMISSION_BYTES
from spes_swarm.protocol.members.identity import Identity, verify
from spes_swarm.protocol.members.record_cache import VerifiedRecords
from spes_swarm.protocol.members.records import (
    MAX_DUTY_NOTES,
    MAX_EXPERTS,
    MAX_FAULTS,
    MAX_PEER_ID_CHARS,
    MAX_PROVEN,
    MAX_SOURCES,
    DutyNote,
    FaultNote,
    Lease,
    Progress,
    Record,
    Rounds,
)
from spes_swarm.protocol.members.round_metrics import PeerMetrics
from spes_swarm.protocol.members.routing_report import MAX_DEAD, MAX_LOADS, MAX_PAIRS
from spes_swarm.protocol.members.signed import SignedModel, seal
from tests.helpers.record_reader import read_records
from tests.helpers.records import lease, progress
from tests.helpers.rounds import identity

RUN = "run-1"
VALIDATOR = RunRecordValidator(RUN, time.time)
pack = DHTProtocol.serializer.dumps


def soon(seconds: float = 30.0) -> float:
    return time.time() + seconds


def dht_record(
    message: SignedModel,
    expires: float,
    *,
    key: str = record_key(RUN, "leases"),
    kind: str = "leases",
    run: str = RUN,
    writer: Identity | None = None,
    owner: Any = None,
) -> DHTRecord:
    """What arrives at a node when `writer` stores a message under `owner`'s name."""
    who = writer or identity(0)
    return DHTRecord(
        DHTID.generate(source=key).to_bytes(),
        pack(owner if owner is not None else who.peer_id),
        pack(seal(who, kind, run, message)),
        expires,
    )


@pytest.mark.parametrize("kind", ["leases", "progress"])
def test_a_peers_own_record_is_accepted(kind: str) -> None:
    expires = soon()
    message: Record = lease(expires) if kind == "leases" else progress(expires)
    assert VALIDATOR.validate(dht_record(message, expires, key=record_key(RUN, kind), kind=kind))


def test_the_largest_record_that_the_schemas_allow_is_accepted() -> None:
    expires = soon()
    most = (1 << 62) - 1
    message = progress(
        expires,
        name="\N{ROCKET}" * 40,
        experts=list(range(MAX_EXPERTS)),
        round=most,
        tokens=most,
        tokens_per_step=most,
        tokens_per_second=sys.float_info.max,
        in_round=True,
        swarm_tokens=most,
        data=[most] * MAX_SOURCES,
        dead=list(range(MAX_PAIRS - MAX_DEAD, MAX_PAIRS)),
        expert_loads=bytes(MAX_LOADS),
        faults=[FaultNote(at=1e300, kind="x" * 24)] * MAX_FAULTS,
        telemetry=crowded_telemetry(),
        admission=bytes(MAX_ADMISSION_BYTES),
        proven=["Q" * MAX_PEER_ID_CHARS] * MAX_PROVEN,
        proven_in=[most] * MAX_PROVEN,
        without_duty=[DutyNote(peer="Q" * MAX_PEER_ID_CHARS, since=most, kinds=["x" * 24] * 2)] * MAX_DUTY_NOTES,
    )
    assert VALIDATOR.validate(dht_record(message, expires, key=record_key(RUN, "progress"), kind="progress"))
    # With the largest key that is allowed, which is longer by 256 bytes, as is its signature.
    assert len(seal(identity(0), "progress", RUN, message)) + 512 <= MAX_RECORD_BYTES


def crowded_telemetry() -> dict[str, float]:
    """All metrics that there are, and a few that there may be."""
    there = [field.name for field in fields(PeerMetrics)]
    return dict.fromkeys([*there, *(f"metric_{n:02}" + "x" * 31 for n in range(8))], sys.float_info.max)


def crowded_rounds(number: int) -> Rounds:
    """As many figures as fit, in memory of their own."""
    figures = {f"metric_{number}_{n}": [float(100 * number + 16 * n + m) for m in range(16)] for n in range(38)}
    record = {"expires": 1e9, "rounds": list(range(16)), "figures": figures}
    packed = msgpack.packb(record)
    assert MAX_RECORD_BYTES - 512 < len(packed) < MAX_RECORD_BYTES
    return Rounds.model_validate(msgpack.unpackb(packed))


def accusing_progress(number: int) -> Progress:
    """With as many accusations as fit, in memory of their own."""
    peers = [f"{number:04}{n:042}" for n in range(MAX_PROVEN)]
    notes = [{"peer": p[::-1], "since": 1 << 60, "kinds": [f"{p[:4]}-{n}" for n in range(2)]} for p in peers]
    record = progress(soon()).model_dump() | {
        "proven": peers,
        "proven_in": [1 << 60] * MAX_PROVEN,
        "without_duty": notes[:MAX_DUTY_NOTES],
    }
    return Progress.model_validate(msgpack.unpackb(msgpack.packb(record)))


@pytest.mark.parametrize("crowded", [crowded_rounds, accusing_progress])
def test_no_record_takes_more_memory_than_the_cache_counts(crowded: Callable[[int], Record]) -> None:
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    records = [crowded(number) for number in range(10)]
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert used <= sum(map(_num_bytes, records))


def test_nobody_writes_in_the_name_of_another() -> None:
    expires = soon()
    for owner in (identity(1).peer_id, "", 5, None, identity(0).peer_id.encode(), [identity(0).peer_id]):
        forged = dht_record(lease(expires), expires)
        forged = DHTRecord(forged.key, pack(owner), forged.value, expires)
        assert not VALIDATOR.validate(forged), owner


def test_a_record_counts_for_its_own_kind_and_run_only() -> None:
    expires = soon()
    assert not VALIDATOR.validate(dht_record(lease(expires), expires, kind="progress"))
    assert not VALIDATOR.validate(dht_record(lease(expires), expires, key=record_key(RUN, "progress")))
    assert not VALIDATOR.validate(dht_record(progress(expires), expires))
    assert not VALIDATOR.validate(dht_record(lease(expires), expires, run="run-2"))
    assert not VALIDATOR.validate(dht_record(lease(expires), expires, run="run-2", key=record_key("run-2", "leases")))
    for key in ("anything", RUN, f"{RUN}.lease", f"{RUN}.leases.more", ""):
        assert not VALIDATOR.validate(dht_record(lease(expires), expires, key=key)), key


def test_a_plain_value_or_a_whole_dictionary_cannot_replace_the_entries() -> None:
    expires = soon()
    good = dht_record(lease(expires), expires)
    for subkey in DHTProtocol.RESERVED_SUBKEYS:
        assert not VALIDATOR.validate(DHTRecord(good.key, subkey, good.value, expires))


def test_a_record_cannot_be_made_to_live_longer_or_shorter() -> None:
    signed = soon()
    for expires in (signed + 0.001, signed + 60, signed - 1, math.inf, math.nan, -math.inf):
        assert not VALIDATOR.validate(dht_record(lease(signed), expires)), expires


def test_a_record_that_would_stay_for_days_is_refused() -> None:
    for lifetime, accepted in ((MAX_LIFETIME_S - 60, True), (MAX_LIFETIME_S + 60, False), (1e12, False)):
        expires = soon(lifetime)
        assert VALIDATOR.validate(dht_record(lease(expires), expires)) is accepted, lifetime


class Bloated(Lease):
    """A lease with room for rubbish."""

    rubbish: bytes


def test_a_large_record_is_refused() -> None:
    expires = soon()
    good = dht_record(lease(expires), expires)
    for value in (b"\0" * (MAX_RECORD_BYTES + 17), pack(b"\0" * MAX_RECORD_BYTES)):
        assert not VALIDATOR.validate(DHTRecord(good.key, good.subkey, value, expires))
    assert not VALIDATOR.validate(DHTRecord(good.key, pack("Q" * 200), good.value, expires))
    for size in (0, MAX_RECORD_BYTES):
        bloated = Bloated(expires=expires, experts=[], since_round=0, rubbish=b"\0" * size)
        assert not VALIDATOR.validate(dht_record(bloated, expires))


def test_a_damaged_record_is_refused() -> None:
    expires = soon()
    good = dht_record(lease(expires), expires)
    for position in range(0, len(good.value), 7):
        value = bytearray(good.value)
        value[position] ^= 1
        assert not VALIDATOR.validate(DHTRecord(good.key, good.subkey, bytes(value), expires)), position
    assert not VALIDATOR.validate(DHTRecord(good.key, good.subkey, good.value + b"\0", expires))
    assert not VALIDATOR.validate(DHTRecord(good.key, good.subkey, good.value[:-1], expires))


@pytest.mark.slow
@given(st.binary(max_size=200), st.binary(max_size=200), st.floats())
def test_rubbish_is_refused_and_never_raises(value: bytes, subkey: bytes, expires: float) -> None:
    good = dht_record(lease(1e9), 1e9)
    assert not VALIDATOR.validate(DHTRecord(good.key, good.subkey, value, expires))
    assert not VALIDATOR.validate(DHTRecord(good.key, subkey, good.value, 1e9))
    assert not VALIDATOR.validate(DHTRecord(subkey, good.subkey, good.value, 1e9))


def test_hiveminds_dictionaries_pass_when_every_entry_does() -> None:
    """The form in which nodes hand a whole key on to a new neighbour."""
    expires = soon()
    entries = {i: dht_record(lease(expires), expires, writer=identity(i)) for i in range(2)}
    dictionary = DictionaryDHTValue()
    for i, entry in entries.items():
        dictionary.store(identity(i).peer_id, entry.value, expires)
    restored = DHTProtocol.serializer.loads(pack(dictionary))
    assert isinstance(restored, DictionaryDHTValue)
    for subkey, item in restored.items():
        assert VALIDATOR.validate(DHTRecord(entries[0].key, pack(subkey), item.value, item.expiration_time))


# The same bytes again.


@pytest.fixture
def num_verified(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many signatures have been checked, under "signatures"; nothing is remembered from before."""
    counter: Counter[str] = Counter()

    def counted(*arguments: Any) -> str:
        counter["signatures"] += 1
        return verify(*arguments)

    monkeypatch.setattr("spes_swarm.protocol.members.signed.verify", counted)
    monkeypatch.setattr("spes_swarm.network.link.dht_records._VERIFIED", VerifiedRecords(1 << 20, lambda message: 1024))
    return counter


def test_the_same_bytes_are_verified_once(num_verified: Counter[str]) -> None:
    expires = soon()
    record = dht_record(lease(expires), expires)
    for _ in range(5):
        assert VALIDATOR.validate(record)
        assert RunRecordValidator(RUN, time.time).open(record) == (identity(0).peer_id, lease(expires))
    assert num_verified["signatures"] == 1


def test_a_record_that_was_refused_is_refused_again(num_verified: Counter[str]) -> None:
    expires = soon()
    good = dht_record(lease(expires), expires)
    *rest, signature = msgpack.unpackb(msgpack.unpackb(good.value))
    forged = replace(good, value=pack(msgpack.packb([*rest, signature[:-1] + bytes([signature[-1] ^ 1])])))
    for _ in range(2):
        assert VALIDATOR.validate(good)
        assert not VALIDATOR.validate(forged)
        assert VALIDATOR.validate(good)
    assert num_verified["signatures"] == 3


def test_what_is_remembered_counts_only_where_it_was_verified(num_verified: Counter[str]) -> None:
    """Under another key, owner, expiration, kind or run the same bytes are refused as if they were new."""
    expires = soon()
    good = dht_record(lease(expires), expires)
    assert VALIDATOR.validate(good)
    progress_key = DHTID.generate(source=record_key(RUN, "progress")).to_bytes()
    for changes in (
        {"key": progress_key},
        {"subkey": pack(identity(1).peer_id)},
        {"expiration_time": expires + 1},
        {"expiration_time": math.nan},
    ):
        assert not VALIDATOR.validate(replace(good, **changes))
    other = RunRecordValidator("run-2", time.time)
    other_key = DHTID.generate(source=record_key("run-2", "leases")).to_bytes()
    assert not other.validate(replace(good, key=other_key))


def test_the_clock_is_asked_each_time(num_verified: Counter[str]) -> None:
    """A record of 23 hours is good; when this peer's clock turns out to be two hours fast, it is not."""
    now = [1e9]
    validator = RunRecordValidator(RUN, lambda: now[0])
    expires = 1e9 + 23 * 3600
    record = dht_record(lease(expires), expires)
    for moment, is_good in ((1e9, True), (1e9 - 7200, False), (1e9, True)):
        now[0] = moment
        assert validator.validate(record) == is_good
    assert num_verified["signatures"] == 1


# Strangers.


def accepted(validator: RunRecordValidator, *writers: int, expires: float = 0.0) -> list[bool]:
    expires = expires or soon()
    return [validator.validate(dht_record(lease(expires), expires, writer=identity(i))) for i in writers]


@pytest.fixture
def contacts(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The peers that are no strangers; of these, records of two at a time are kept."""
    monkeypatch.setattr("spes_swarm.network.link.dht_records.MAX_STRANGERS", 2)
    return set()


def test_records_of_a_few_strangers_are_kept_until_they_expire(contacts: set[str]) -> None:
    now = [time.time()]
    validator = RunRecordValidator(RUN, lambda: now[0], contacts.__contains__)
    assert accepted(validator, 0, 1, 2, 0, 1) == [True, True, False, True, True]
    expires = now[0] + 100
    assert accepted(validator, 0, expires=expires) == [True]  # renewed, it keeps its place
    now[0] += 90  # the other's has expired
    assert accepted(validator, 2, 1, expires=expires) == [True, False]


def test_a_newcomer_that_calls_is_no_stranger_however_many_there_are(contacts: set[str]) -> None:
    now = [time.time()]
    validator = RunRecordValidator(RUN, lambda: now[0], contacts.__contains__)
    assert accepted(validator, 0, 1, 2) == [True, True, False]
    contacts.add(identity(2).peer_id)
    assert accepted(validator, 2) == [True]
    contacts.add(identity(0).peer_id)  # its place is free within a second
    now[0] += 2
    assert accepted(validator, 3, 4) == [True, False]


def test_a_refused_record_takes_no_place_and_costs_no_signature(contacts: set[str], num_verified: Counter[str]) -> None:
    validator = RunRecordValidator(RUN, time.time, contacts.__contains__)
    expires = soon()
    for i in range(1, 4):  # in the names of others
        good = dht_record(lease(expires), expires)
        assert not validator.validate(replace(good, subkey=pack(identity(i).peer_id)))
    assert accepted(validator, 1, 2) == [True, True]
    num_verified.clear()
    assert accepted(validator, 3) == [False]
    assert not num_verified


def with_bound_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test, what a run's process does for good."""
    monkeypatch.setattr(DHTProtocol, "_validate_dictionary", DHTProtocol._validate_dictionary)
    monkeypatch.setattr(DictionaryDHTValue, "store", DictionaryDHTValue.store)
    bound_storage()


def test_an_old_copy_of_an_entry_neither_takes_memory_nor_ends_the_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with_bound_storage(monkeypatch)
    now = get_dht_time()
    dictionary = DictionaryDHTValue()
    for seconds in range(10, 510):  # a record that is renewed, and read again and again
        assert dictionary.store("peer", b"value", now + seconds)
        assert not dictionary.store("peer", b"value", now + seconds)
        assert not dictionary.store("peer", b"old", now + 1)
    assert len(dictionary.expiration_heap) <= 66
    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", lambda: now + 508)
    assert dictionary.get("peer") == (b"value", now + 509)
    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", lambda: now + 510)
    assert dictionary.get("peer") is None


def test_a_stranger_too_many_does_not_hide_the_others_of_a_dictionary(
    contacts: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_bound_storage(monkeypatch)
    contacts.add(identity(4).peer_id)
    protocol = DHTProtocol(_initialized_with_create=True)
    protocol.record_validator = RunRecordValidator(RUN, time.time, contacts.__contains__)
    expires = soon()
    dictionary = DictionaryDHTValue()
    for i in range(5):
        record = dht_record(lease(expires), expires, writer=identity(i))
        dictionary.store(identity(i).peer_id, record.value, expires)
    key = DHTID.generate(source=record_key(RUN, "leases")).to_bytes()
    assert protocol._validate_dictionary(key, dictionary)
    assert [owner for owner, _ in dictionary.items()] == [identity(i).peer_id for i in (0, 1, 4)]
    assert not protocol._validate_dictionary(b"another key", dictionary)
    assert len(dictionary) == 0


# Two real nodes.


async def two_nodes() -> None:
    daemons: list[Daemon] = []
    nodes: list[DHTNode] = []
    try:
        for i in range(2):
            daemon = await Daemon.start(identity(i).path, ["/ip4/127.0.0.1/tcp/0"])
            daemons.append(daemon)
            known = [maddr for maddr in await daemons[0].maddrs() if "127.0.0.1" in maddr] if i else []
            if known:
                await bootstrap(daemon, known, 5.0)
            nodes.append(await DHTNode.create(p2p=daemon.p2p, initial_peers=known, record_validator=VALIDATOR))
        await honest_peers_see_each_other(nodes)
        await an_intruder_changes_nothing(nodes)
        newcomer = await Daemon.start(identity(2).path, [], client_mode=True)
        daemons.append(newcomer)
        known = [maddr for daemon in daemons[:2] for maddr in await daemon.maddrs() if "127.0.0.1" in maddr]
        await bootstrap(newcomer, known, 5.0)
        nodes.append(
            await DHTNode.create(
                p2p=newcomer.p2p,
                initial_peers=known,
                client_mode=True,
                record_validator=VALIDATOR,
                reuse_get_requests=False,
            )
        )
        await a_blank_answer_hides_nobody(nodes[1], nodes[2])
    finally:
        for node in nodes:
            await node.shutdown()
        for daemon in daemons:
            await daemon.stop()
    assert not any(daemon.is_alive for daemon in daemons)


async def honest_peers_see_each_other(nodes: list[DHTNode]) -> None:
    writers = [RecordWriter(DhtNode(node), identity(i), RUN) for i, node in enumerate(nodes)]
    expires = soon()
    written = {identity(i).peer_id: lease(expires, since_round=i) for i in range(2)}
    for i, writer in enumerate(writers):
        assert await writer.publish("leases", written[identity(i).peer_id])
    for node in nodes:
        assert await read_records(node, RUN, "leases", Lease) == written
    newer = lease(expires + 1, since_round=9)
    assert await writers[1].publish("leases", newer)
    for node in nodes:
        assert (await read_records(node, RUN, "leases", Lease))[identity(1).peer_id] == newer
        assert await read_records(node, RUN, "progress", Progress) == {}
    for i, writer in enumerate(writers):
        assert await writer.publish("progress", progress(expires))
        assert writer.near == {identity(1 - i).peer_id}


async def an_intruder_changes_nothing(nodes: list[DHTNode]) -> None:
    """Node 1 turns hostile: its own checks are off, and it writes under everybody's name."""
    before = await read_records(nodes[0], RUN, "leases", Lease)
    nodes[1].protocol.record_validator = None
    key, later = record_key(RUN, "leases"), soon(600)
    forged = seal(identity(1), "leases", RUN, lease(later))
    attacks: list[tuple[Any, str | None]] = [
        (forged, identity(0).peer_id),  # another's name
        (forged, None),  # a plain value in place of the dictionary
        (b"rubbish", identity(1).peer_id),
    ]
    key_id = DHTID.generate(source=key)
    for value, subkey in attacks:
        answer = await nodes[1].protocol.call_store(nodes[0].peer_id, [key_id], [pack(value)], later, [subkey])
        assert answer == [False], (value, subkey)
    assert await read_records(nodes[0], RUN, "leases", Lease) == before


async def a_blank_answer_hides_nobody(hostile: DHTNode, reader: DHTNode) -> None:
    """A whole dictionary that is empty and never expires: for hivemind, nothing could be newer."""
    nothing = ValueWithExpiration(DictionaryDHTValue(), math.inf)
    hostile.protocol.storage.get = lambda key: nothing
    ask = reader.protocol.call_find

    async def ask_the_honest_later(peer: PeerID, keys: Collection[DHTID]) -> Any:
        if str(peer) == identity(0).peer_id:
            await asyncio.sleep(0.1)
        return await ask(peer, keys)

    reader.protocol.call_find = ask_the_honest_later
    found = await read_records(reader, RUN, "leases", Lease)
    assert set(found) == {identity(0).peer_id, identity(1).peer_id}


@pytest.mark.slow
def test_records_travel_between_two_real_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "a-directory-for-temporary-files-with-a-path-that-is-too-long-for-a-unix-socket-to-lie-in"
    directory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    asyncio.run(asyncio.wait_for(two_nodes(), 120))
    left = [path for parent in (directory, Path("/tmp")) for path in parent.glob(f"spes_swarm-{os.getpid()}-*")]
    assert left == []  # of their sockets
