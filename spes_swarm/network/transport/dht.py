"""This process's node in hivemind's DHT, where the records of a run lie."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from hivemind.dht import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, PeerID

from spes_swarm.network.transport import hivemind_changes
from spes_swarm.network.transport.hivemind_changes import Guard

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

    async def store(self, key: str, value: bytes, expires: float, subkey: str) -> bool:
        """Stores an entry; returns False if no node has taken it."""
        return bool(await self._node.store(key, value, expires, subkey=subkey))

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
