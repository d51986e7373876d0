"""What members tell each other of records; the network is in memory, and the DHT is a dictionary."""

from __future__ import annotations

import asyncio
import math
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.dht_records import RunRecordValidator, record_key
from spes_swarm.network.link.known_records import KnownRecords
from spes_swarm.network.link.rpc import RemoteError, Rpc
from spes_swarm.protocol.members.records import Lease, Progress, Record
from spes_swarm.protocol.members.signed import seal
from tests.helpers.memory_network import MemoryNetwork
from tests.helpers.records import lease, progress
from tests.helpers.rounds import identity
from tests.helpers.virtual_time import run_at_once

RUN = "run-1"
NOON = 1e6


class Dht:
    """What its nodes have stored, by key and subkey."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = defaultdict(dict)
        self.num_searches = 0

    async def search(self, key: str) -> Mapping[str, Any]:
        self.num_searches += 1
        return {
            owner: SimpleNamespace(value=sealed, expiration_time=expires)
            for owner, (sealed, expires) in self.entries[key].items()
        }


class Member:
    """A member that has as yet no record, and asks all others."""

    def __init__(self, number: int, network: MemoryNetwork, dht: Dht, others: list[str]) -> None:
        self.identity = identity(number)
        self.id = self.identity.peer_id
        self.faults: list[tuple[str, str]] = []
        self.network = network
        self.rpc = Rpc(network.join(self.id), lambda peer, error: self.faults.append((peer, error.kind)))
        self.stored: dict[str, list[tuple[str, bytes, float]]] = defaultdict(list)  # by its node for others, by key
        self.now = NOON
        self.near: set[str] = set()
        self.excluded: set[str] = set()
        self.strangers: set[str] = set()
        self.members = others
        node: Any = SimpleNamespace(search=dht.search, stored=lambda key: self.stored[key])
        self.records = KnownRecords(
            node,
            self.rpc,
            RunRecordValidator(RUN, lambda: self.now, vet=self.vet),
            RUN,
            lambda: self.now,
            lambda peer_id: peer_id not in self.strangers,
            self.vet,
            members=lambda: [peer for peer in self.members if peer != self.id],
            near=lambda: self.near,
        )

    def vet(self, peer_id: str, record: Record) -> None:
        if peer_id in self.excluded:
            raise ProtocolError("excluded", "there is a proof")

    def sealed(self, kind: str, record: Record) -> tuple[str, bytes, float]:
        """A record of its own, as nodes store it."""
        return self.id, seal(self.identity, kind, RUN, record), record.expires

    def store(self, kind: str, *records: tuple[str, bytes, float]) -> None:
        """Stores records of others."""
        self.stored[record_key(RUN, kind)] += records

    @property
    def sees(self) -> dict[str, float]:
        """Whose progress it knows, and until when."""
        return {peer: record.expires for peer, record in self.records.of("progress", Progress).items()}


async def swarm(count: int) -> tuple[Dht, list[Member]]:
    """So many members, a while after a search that has found nothing."""
    network, dht = MemoryNetwork(), Dht()
    others = [identity(number).peer_id for number in range(count)]
    members = [Member(number, network, dht, others) for number in range(count)]
    for member in members:
        await member.rpc.start()
        await member.records.start()
        await member.records.refresh()
    await asyncio.sleep(3.0)  # long enough for another search if nobody answers, and only then
    dht.num_searches = 0
    return dht, members


def test_a_record_that_a_node_has_stored_is_known_to_all_of_a_few_at_the_next_look() -> None:
    async def scenario() -> None:
        dht, (writer, node, *others) = await swarm(5)
        own = writer.sealed("progress", progress(NOON + 60))
        node.store("progress", own)
        node.store("leases", writer.sealed("leases", lease(NOON + 90)))
        for member in others:
            member.near = {node.id}
            await member.records.refresh()
            assert member.sees == {writer.id: NOON + 60}
            assert member.records.of("leases", Lease) == {writer.id: lease(NOON + 90)}
        assert dht.num_searches == 0
        assert not [fault for member in (writer, node, *others) for fault in member.faults]

    run_at_once(scenario(), 60)


def test_among_many_a_record_spreads_from_member_to_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spes_swarm.network.link.known_records._FEW", 0)

    async def scenario() -> None:
        dht, members = await swarm(24)
        writer, *nodes = members[:6]
        for node in nodes:
            node.store("progress", writer.sealed("progress", progress(NOON + 60)))
        num_looks = 0
        while not all(member.sees for member in members):
            num_looks += 1
            for member in members:
                await member.records.refresh()
        assert num_looks < 7
        assert dht.num_searches == 0

    run_at_once(scenario(), 60)


def test_only_what_is_newer_is_told() -> None:
    async def scenario() -> None:
        _, (asker, told, writer) = await swarm(3)
        asker.members = [told.id]
        answers = []
        call = asker.rpc.call

        async def noted(*arguments: Any) -> dict[str, Any]:
            answers.append(await call(*arguments))
            return answers[-1]

        noting: Any = noted
        asker.rpc.call = noting  # type: ignore[method-assign]
        told.store("progress", writer.sealed("progress", progress(NOON + 60)))
        told.store("progress", told.sealed("progress", progress(NOON + 61)))
        await asker.records.refresh()
        await asker.records.refresh()
        told.store("progress", writer.sealed("progress", progress(NOON + 62)))
        await asker.records.refresh()
        told_of = [[record[0] for record in answer["progress"]] for answer in answers]
        assert sorted(told_of[0]) == sorted([writer.id, told.id])
        assert told_of[1:] == [[], [writer.id]]
        assert asker.sees == {writer.id: NOON + 62, told.id: NOON + 61}
        told.store("progress", writer.sealed("progress", progress(NOON + 59)))
        await asker.records.refresh()
        assert asker.sees[writer.id] == NOON + 62, "an older one replaces nothing"

    run_at_once(scenario(), 60)


def test_a_member_that_withholds_a_record_hides_nobody() -> None:
    async def scenario() -> None:
        _, (asker, silent, honest, writer) = await swarm(4)

        async def nothing(peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
            return {"progress": [], "leases": [], "publishers": []}

        await silent.rpc.serve("records", nothing)
        asker.members, asker.near = [silent.id, honest.id, writer.id], {silent.id}
        honest.store("progress", writer.sealed("progress", progress(NOON + 60)))
        for _ in range(20):
            await asker.records.refresh()
        assert asker.sees == {writer.id: NOON + 60}

    run_at_once(scenario(), 60)


def test_records_expire_and_those_of_excluded_peers_are_neither_shown_nor_passed_on() -> None:
    async def scenario() -> None:
        _, (asker, told, writer) = await swarm(3)
        asker.members = [told.id]
        told.store("progress", writer.sealed("progress", progress(NOON + 60)))
        await told.records.refresh()
        told.excluded = {writer.id}
        assert not told.sees
        await asker.records.refresh()
        assert not asker.sees
        told.excluded = set()
        await asker.records.refresh()
        assert asker.sees
        asker.now = NOON + 60
        assert not asker.sees

    run_at_once(scenario(), 60)


def test_a_record_that_its_writer_has_just_written_is_told_and_one_of_a_stranger_is_not() -> None:
    async def scenario() -> None:
        _, (asker, writer, stranger) = await swarm(3)
        asker.members = [writer.id]
        writer.records.take("progress", *writer.sealed("progress", progress(NOON + 60)))
        writer.store("progress", stranger.sealed("progress", progress(NOON + 60)))
        writer.strangers = {stranger.id}
        await asker.records.refresh()
        assert asker.sees == {writer.id: NOON + 60}
        assert writer.sees.keys() == {writer.id, stranger.id}
        writer.strangers = set()
        await asker.records.refresh()
        assert asker.sees.keys() == {writer.id, stranger.id}

    run_at_once(scenario(), 60)


def test_what_has_no_room_in_an_answer_comes_another_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        _, (asker, told, *writers) = await swarm(6)
        asker.members = [told.id]
        for writer in writers:
            told.store("progress", writer.sealed("progress", progress(NOON + 60)))
        size = len(writers[0].sealed("progress", progress(NOON + 60))[1])
        monkeypatch.setattr("spes_swarm.network.link.known_records._MAX_ANSWER_BYTES", 2 * size + size // 2)
        counts = []
        for _ in range(2):
            await asker.records.refresh()
            counts.append(len(asker.sees))
        assert counts == [2, 4]

    run_at_once(scenario(), 60)


Change = Callable[[Member, list[Any]], list[Any]]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        pytest.param(lambda _, record: [record[0], record[1][:-1] + b"x", record[2]], "signature", id="signature"),
        pytest.param(lambda other, record: [other.id, *record[1:]], "owner", id="in another's name"),
        pytest.param(lambda _, record: [*record[:2], record[2] + 1], "expiration", id="lives longer"),
        pytest.param(lambda _, record: [*record[:2], math.nan], "expiration", id="no number"),
        pytest.param(lambda _, record: [*record[:2], 60], "malformed", id="an integer"),
        pytest.param(lambda _, record: record[:2], "malformed", id="too short"),
        pytest.param(lambda _, record: [{}, *record[1:]], "owner", id="no id"),
        pytest.param(lambda _, record: [record[0], "text", record[2]], "malformed", id="no bytes"),
        pytest.param(lambda _, record: {"record": record}, "malformed", id="a map"),
    ],
)
def test_an_answer_with_an_invalid_record_is_a_fault_of_its_sender(change: Change, fault: str) -> None:
    async def scenario() -> None:
        dht, (asker, hostile, writer) = await swarm(3)
        asker.members = [hostile.id]
        first, record = hostile.sealed("progress", progress(NOON + 60)), writer.sealed("progress", progress(NOON + 70))

        async def lie(peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
            return {"progress": [list(first), change(hostile, list(record))], "leases": [], "publishers": []}

        await hostile.rpc.serve("records", lie)
        await asker.records.refresh()
        assert asker.faults == [(hostile.id, fault)]
        assert asker.sees == {hostile.id: NOON + 60}
        assert dht.num_searches == 3, "it does not count as an answer"

    run_at_once(scenario(), 60)


def test_a_record_that_this_peer_alone_refuses_is_nobodys_fault() -> None:
    async def scenario() -> None:
        _, (asker, told, writer) = await swarm(3)
        asker.members, asker.excluded = [told.id], {writer.id}
        told.store("progress", writer.sealed("progress", progress(NOON + 60)))
        told.store("progress", told.sealed("progress", progress(NOON + 60)))
        await asker.records.refresh()
        assert asker.sees == {told.id: NOON + 60}
        assert not asker.faults

    run_at_once(scenario(), 60)


@pytest.mark.parametrize(
    "request_of",
    [
        pytest.param({"run": "run-2", "have": {}}, id="another run"),
        pytest.param({"run": RUN}, id="no list"),
        pytest.param({"run": RUN, "have": {"progress": 5}}, id="no bytes"),
        pytest.param({"run": RUN, "have": {"progress": b"x" * 17}}, id="a torn mark"),
        pytest.param({"run": RUN, "have": {"progress": bytes(16 * 2049)}}, id="too long"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(request_of: dict[str, Any]) -> None:
    async def scenario() -> None:
        _, (asker, told) = await swarm(2)
        with pytest.raises(RemoteError, match="malformed"):
            await asker.rpc.call(told.id, "records", request_of, 5.0)
        assert told.faults == [(asker.id, "malformed")]

    run_at_once(scenario(), 60)


def test_marks_that_are_no_numbers_only_hide_records_from_who_sends_them() -> None:
    async def scenario() -> None:
        _, (asker, told) = await swarm(2)
        told.store("progress", told.sealed("progress", progress(NOON + 60)))
        marks = struct.pack("<8sd", b"somebody", math.nan)
        answer = await asker.rpc.call(told.id, "records", {"run": RUN, "have": {"progress": marks}}, 5.0)
        assert [record[0] for record in answer["progress"]] == [told.id]

    run_at_once(scenario(), 60)


def test_the_dht_is_searched_if_nobody_answers_but_not_each_time() -> None:
    async def scenario() -> None:
        dht, (asker, told, *_) = await swarm(9)
        dht.entries[record_key(RUN, "progress")][told.id] = told.sealed("progress", progress(NOON + 60))[1:]
        for peer in asker.members:
            asker.network.freeze(peer)
        await asker.records.refresh()
        assert dht.num_searches == 3
        assert asker.sees == {told.id: NOON + 60}
        await asker.records.refresh()
        assert dht.num_searches == 3
        asker.records.search_soon()
        await asker.records.refresh()
        assert dht.num_searches == 6

    run_at_once(scenario(), 60)


def test_who_does_not_answer_holds_nobody_up_and_counts_later() -> None:
    async def scenario() -> None:
        dht, (asker, slow, quick) = await swarm(3)
        slow.store("progress", slow.sealed("progress", progress(NOON + 60)))
        quick.store("progress", quick.sealed("progress", progress(NOON + 60)))
        asker.network.freeze(slow.id)
        begun = asyncio.get_running_loop().time()
        await asker.records.refresh()
        assert asyncio.get_running_loop().time() - begun < 1.5
        assert asker.sees == {quick.id: NOON + 60}
        asker.network.thaw(slow.id)
        await asyncio.sleep(0.1)
        assert asker.sees.keys() == {slow.id, quick.id}
        assert dht.num_searches == 0

    run_at_once(scenario(), 60)
