"""This process's node in hivemind's DHT, where the records of a run lie."""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from hivemind.dht import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, PeerID

from spes_swarm.network.transport import hivemind_changes
from spes_swarm.network.transport.hivemind_changes import Guard

_NEAREST = 10  # nodes to a key that are looked for, of which some store what is written

StoredRecord: TypeAlias = DHTRecord  # an entry of a dictionary; its subkey and value are encoded


class RecordValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind ships no types
    """Decides about records from other nodes."""

    @abstractmethod
    def validate(self, record: StoredRecord) -> bool:
        """Returns True if a record may be stored or used."""


def key_bytes(key: str) -> bytes:
    """A key as stored records have it."""
    return bytes(DHTID.generate(source=key).to_bytes())


def stored_record(key: str, subkey: object, value: object, expires: float) -> StoredRecord:
    """An entry as other nodes send it."""
    pack = DHTProtocol.serializer.dumps
    return DHTRecord(key_bytes(key), pack(subkey), pack(value), expires)


def is_plain(record: StoredRecord) -> bool:
    """Returns True for a value that would replace a whole dictionary."""
    return bool(record.subkey in DHTProtocol.RESERVED_SUBKEYS)


class DhtNode:
    """A node of the DHT."""

    def __init__(self, node: DHTNode) -> None:
        self._node = node

    @classmethod
    async def start(
        cls,
        p2p: P2P,
        initial_peers: Sequence[str],
        validator: RecordValidator,
        now: Callable[[], float],
        guard: Guard | None,
        **options: Any,
    ) -> DhtNode:
        """Joins the DHT; `options` are passed on to `DHTNode.create`."""
        hivemind_changes.use_clock(now)
        hivemind_changes.bound_decoding()
        hivemind_changes.bound_storage()
        hivemind_changes.use_guard(guard)
        # `daemon.bootstrap` has run before, and reports better which initial peers do not answer.
        return cls(
            await DHTNode.create(
                p2p=p2p,
                initial_peers=list(initial_peers) or None,
                record_validator=validator,
                reuse_get_requests=False,  # see `search`
                strict=False,
                ensure_bootstrap_success=False,
                **options,
            )
        )

    async def stop(self) -> None:
        """Leaves the DHT."""
        await self._node.shutdown()

    async def search(self, key: str) -> Mapping[Any, Any]:
        """The entries under a key by subkey, with their `value` and `expiration_time`, from all nodes that answer.

        With hivemind's own "latest" (infinity), a single node that answers with an empty dictionary that never expires
        would end the search, and all peers would seem to be gone. No expiration time satisfies a comparison with NaN,
        so every node near the key is asked. The node must not share searches (`reuse_get_requests=False`): one that
        ends early would end this one, too.
        """
        found = (await self._node.get_many([key], sufficient_expiration_time=math.nan)).get(key)
        return found.value if found is not None and isinstance(found.value, dict) else {}

    async def store(self, key: str, value: bytes, expires: float, subkey: str) -> set[str]:
        """Stores an entry with the nodes nearest to its key; returns the peer ids of those that have taken it.

        hivemind's own `store` looks for these nodes by asking up to twenty for the key, and each of them answers with
        all entries that it has.
        """
        key_id, protocol = DHTID.generate(source=key), self._node.protocol
        beside = DHTID(key_id ^ 1)  # has the same neighbours, and nobody stores anything there
        found = await self._node.find_nearest_nodes([beside], k_nearest=_NEAREST, beam_size=_NEAREST)
        candidates = list(found[beside].values())
        if self._node.peer_id not in candidates:  # at last, it has the record itself
            candidates.append(self._node.peer_id)
        packed = protocol.serializer.dumps(value)
        record, taken, answered = stored_record(key, subkey, value, expires), set[str](), 0

        async def store_at(peer: PeerID) -> bool | None:
            if peer == self._node.peer_id:
                is_valid = protocol._validate_record(record.key, record.subkey, record.value, expires)
                return bool(is_valid and protocol.storage.store_subkey(key_id, subkey, packed, expires))
            stored = await protocol.call_store(peer, [key_id], [packed], [expires], [subkey])
            return None if stored is None else list(stored) == [True]

        while candidates and answered < self._node.num_replicas:  # others stand in for those that do not answer
            turn = [candidates.pop(0) for _ in candidates[: self._node.num_replicas - answered]]
            for peer, stored in zip(turn, await asyncio.gather(*map(store_at, turn)), strict=True):
                answered += stored is not None
                if stored:
                    taken.add(str(peer))
        return taken

    def stored(self, key: str) -> Iterator[tuple[Any, Any, float]]:
        """The entries under a key that this node stores for others: subkey, value and expiration time."""
        item = self._node.protocol.storage.get(DHTID.generate(source=key))
        if item is not None and isinstance(item.value, DictionaryDHTValue):
            for subkey, (packed, expires) in list(item.value.items()):
                yield subkey, DHTProtocol.serializer.loads(packed), expires

    def knows(self, peer_id: str) -> bool:
        """Returns True if a peer's node has answered this one, or called it."""
        with suppress(ValueError):  # not a peer id
            return PeerID.from_base58(peer_id) in self._node.protocol.routing_table
        return False

    async def ping(self, peer_id: str) -> bool:
        """Adds two nodes to each other's routing tables; returns False if the other one does not answer."""
        peer = PeerID.from_base58(peer_id)
        if await self._node.protocol.call_ping(peer) is None:
            return False
        self._node.blacklist.register_success(peer)
        return True

    def forgive_all(self) -> None:
        """Asks all peers again that did not answer."""
        self._node.blacklist.clear()
