"""The records of a run that a member knows: members tell each other what is new, instead of searching the DHT.

A search asks up to twenty nodes for all records of a kind. With 64 members, to read them once a second would take most
of a core; so a member tells two others once a second what it has, and gets what is newer. While members are few, one of
the two is a node with which records are stored, so all know a record within about a second. Among many it spreads from
member to member: after about three seconds, 64 know it.

Nobody decides alone what another one knows: whom a member asks is drawn by lot, from those whose work is in a commit
while there are any, since identities cost nothing. The DHT is searched now and then; that also finds peers that no
member knows of, as after a cut.
"""

from __future__ import annotations

import asyncio
import math
import random
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from blake3 import blake3

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.dht_records import RunRecordValidator, Vet, record_key
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.transport.dht import DhtNode, stored_record
from spes_swarm.protocol.members.records import Record
from spes_swarm.protocol.members.signed import Model

KINDS: Final = ("progress", "leases", "publishers")
_TIMEOUT_S = 1.5  # so short that a connection does not count as dead, see Rpc
_PATIENCE_S = 1.0  # for the second of two answers; what comes later counts as well
_ASKED = 2  # members, each time
_FEW = 16  # among so many others, a node that stores records is asked each time
# Between two searches of the DHT, for each member: usually, and if nobody answers. A machine that is so busy that no
# answer comes in time would have even less for them if each of its peers searched.
_SEARCH_S, _SEARCH_SOON_S, _MAX_SEARCH_S = 2.0, 0.5, 120.0
_MARK = struct.Struct("<8sd")  # of a record: digest of its writer's id, and its expiration
_MAX_HAVE_BYTES = 2048 * _MARK.size  # of each kind
_MAX_ANSWER_BYTES = 1 << 18  # of each kind
# Why this peer may refuse what an honest member passes on, who knows other peers or acts, or has another time.
_DIFFERENT_VIEWS = frozenset({"excluded", "strangers", "stranger", "terms", "lifetime", "version"})


@dataclass(frozen=True, slots=True)
class _Entry:
    """A valid record, and how it is passed on."""

    message: Record
    sealed: bytes
    writer_mark: bytes


@dataclass(eq=False)
class KnownRecords:
    """The newest record of each kind and writer.

    `members` returns the ids of members that can be asked, `near` those of them whose nodes have stored this
    peer's last record; `now` the swarm's time in Unix seconds. Records of peers for which `is_known` is False are not
    passed on: nobody may be behind them.
    """

    node: DhtNode
    rpc: Rpc
    validator: RunRecordValidator
    run_id: str
    now: Callable[[], float]
    is_known: Callable[[str], bool]
    vet: Vet
    members: Callable[[], Collection[str]]
    near: Callable[[], Collection[str]]

    def __post_init__(self) -> None:
        self._known: dict[str, dict[str, _Entry]] = {kind: {} for kind in KINDS}
        self._searched_at = -math.inf  # by the event loop's clock
        self._asking: dict[str, asyncio.Task[bool]] = {}  # by peer id

    async def start(self) -> None:
        """Registers the handler."""
        await self.rpc.serve("records", self._serve)

    def stop(self) -> None:
        """Ends what is under way, as this peer leaves."""
        for task in self._asking.values():
            task.cancel()

    def of(self, kind: str, schema: type[Model]) -> dict[str, Model]:
        """The valid, unexpired records of a kind by peer id."""
        return {
            writer: entry.message for writer, entry in self._current(kind).items() if isinstance(entry.message, schema)
        }

    def search_soon(self) -> None:
        """Makes the next refresh a search: there may be peers that no member knows of."""
        self._searched_at = -math.inf

    async def refresh(self) -> None:
        """Asks others what is new, and searches the DHT if it is time for that."""
        num_members = len(self.members())
        is_answered = num_members > 0 and await self._ask_some()
        pause_s = min(num_members * (_SEARCH_S if is_answered else _SEARCH_SOON_S), _MAX_SEARCH_S)
        now = asyncio.get_running_loop().time()
        if now - self._searched_at > pause_s:
            await asyncio.gather(*map(self.search, KINDS))
            self._searched_at = now
        self._take_stored()
        self._drop_expired()

    async def search(self, kind: str) -> None:
        """Takes in all records of a kind that the DHT has."""
        for owner, entry in (await self.node.search(record_key(self.run_id, kind))).items():
            self.take(kind, owner, entry.value, entry.expiration_time)

    def _drop_expired(self) -> None:
        now = self.now()
        for kind, known in self._known.items():
            self._known[kind] = {writer: entry for writer, entry in known.items() if entry.message.expires > now}

    def _current(self, kind: str) -> dict[str, _Entry]:
        """What is known, without records that have expired, and those of peers that may no longer take part."""
        now = self.now()
        return {
            writer: entry
            for writer, entry in self._known[kind].items()
            if entry.message.expires > now and self._may_take_part(writer, entry.message)
        }

    def _may_take_part(self, writer: str, message: Record) -> bool:
        try:
            self.vet(writer, message)
        except ProtocolError:
            return False
        return True

    def take(self, kind: str, owner: object, sealed: object, expires: float) -> str | None:
        """Takes in a record if it is newer than the one known; returns what is wrong with it, if it is invalid."""
        if kind not in self._known:
            return None
        known = self._known[kind].get(owner) if isinstance(owner, str) else None
        if known is not None and known.message.expires >= expires:
            return None
        try:
            writer, message = self.validator.open(stored_record(record_key(self.run_id, kind), owner, sealed, expires))
        except ProtocolError as exc:
            return exc.kind
        assert isinstance(sealed, bytes)
        self._known[kind][writer] = _Entry(message, sealed, blake3(writer.encode()).digest()[:8])
        return None

    def _take_stored(self) -> None:
        """Takes in the records that this peer's own node stores for others."""
        for kind in KINDS:
            for owner, sealed, expires in self.node.stored(record_key(self.run_id, kind)):
                self.take(kind, owner, sealed, expires)

    # Asking others, and answering them.

    async def _ask_some(self) -> bool:
        """Asks a few members, drawn by lot; returns False if nobody answers."""
        for peer in (drawn := self._draw()):
            self._asking[peer] = asyncio.create_task(self._ask(peer), name=peer)
            self._asking[peer].add_done_callback(lambda task: self._asking.pop(task.get_name()))
        if not drawn:
            return False
        asking = [self._asking[peer] for peer in drawn]
        answered, _ = await asyncio.wait(asking, timeout=_PATIENCE_S)
        if not answered:
            answered, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        return any(task.result() for task in answered)

    def _draw(self) -> list[str]:
        members = [peer for peer in self.members() if peer not in self._asking]
        near = [peer for peer in self.near() if peer not in self._asking]
        drawn = [random.choice(near)] if near and random.random() * len(members) < _FEW else []
        others = [peer for peer in members if peer not in drawn]
        return drawn + random.sample(others, min(_ASKED - len(drawn), len(others)))

    async def _ask(self, peer_id: str) -> bool:
        """Asks a peer for records that it lacks or has older ones of; returns False if there is no answer."""
        have = {kind: self._marks(kind) for kind in KINDS}
        try:
            answer = await self.rpc.call(peer_id, "records", {"run": self.run_id, "have": have}, _TIMEOUT_S)
        except (OSError, ProtocolError):
            return False
        try:
            self._take_answer(answer)
        except ProtocolError as exc:
            self.rpc.on_fault(peer_id, exc)
            return False
        return True

    def _marks(self, kind: str) -> bytes:
        entries = self._known[kind].values()
        marks = [_MARK.pack(entry.writer_mark, entry.message.expires) for entry in entries]
        return b"".join(marks)[:_MAX_HAVE_BYTES]

    def _take_answer(self, answer: dict[str, Any]) -> None:
        """Takes in the records of an answer, up to the first one that no honest member would pass on."""
        for kind in KINDS:
            records = answer.get(kind)
            if not isinstance(records, list):
                raise ProtocolError("malformed", "an answer about records lacks its fields")
            for record in records:
                if not (isinstance(record, list) and len(record) == 3 and isinstance(record[2], float)):
                    raise ProtocolError("malformed", "a record in an answer has three fields")
                fault = self.take(kind, *record)
                if fault is not None and fault not in _DIFFERENT_VIEWS:
                    raise ProtocolError(fault, "an answer with an invalid record")

    async def _serve(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        del peer_id
        have = request.get("have")
        if request.get("run") != self.run_id or not isinstance(have, dict):
            raise ProtocolError("malformed", "a question about records of another run, or without a list")
        self._take_stored()
        answer = dict[str, Any]()
        for kind in KINDS:
            marks = have.get(kind, b"")
            if not isinstance(marks, bytes) or len(marks) > _MAX_HAVE_BYTES or len(marks) % _MARK.size:
                raise ProtocolError("malformed", "a list of records that a peer has")
            expires = dict[bytes, float](_MARK.iter_unpack(marks))
            newer = [
                (writer, entry.sealed, entry.message.expires)
                for writer, entry in self._current(kind).items()
                if expires.get(entry.writer_mark, -math.inf) < entry.message.expires and self.is_known(writer)
            ]
            random.shuffle(newer)  # what has no room now comes another time
            ends = accumulate(len(sealed) for _, sealed, _ in newer)
            answer[kind] = [record for record, end in zip(newer, ends, strict=True) if end <= _MAX_ANSWER_BYTES]
        return answer
