"""A process's node in the DHT of one run, and what every node answers: the time, the manifest and the tokenizer.

Any connected peer can send a dictionary to be stored, or answer a search with one: up to 4 MiB of msgpack, which
hivemind would decode by itself. So what it decodes is limited before any validator runs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from heapq import heapify
from pathlib import Path
from typing import Any, Final

import hivemind.dht.node
import msgpack
from hivemind.dht import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import RecordValidatorBase
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.serializer import MSGPackSerializer

from spes_swarm.base.decoding import MAX_TOKENIZER_BYTES, check_msgpack
from spes_swarm.base.errors import ProtocolError
from spes_swarm.config.manifest import Manifest
from spes_swarm.network.link.clock import Timekeeper, give_to_hivemind
from spes_swarm.network.link.door import Door
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.link.wire import FaultSink
from spes_swarm.network.transport.daemon import Daemon
from spes_swarm.storage.acts_file import ActsFile

_PIECE_BYTES = 1 << 20  # of a tokenizer, in one answer
_MAX_OUTDATED = 64  # expirations that a dictionary keeps needlessly, beyond one for each entry

# The only extension that the swarm's records use. hivemind's other one, for tuples, would be decoded without a limit.
_DICTIONARY: Final[int] = MSGPackSerializer._ext_types[DictionaryDHTValue]


def _loads(buf: bytes) -> Any:
    check_msgpack(buf, ext_codes=(_DICTIONARY,))
    return msgpack.loads(buf, ext_hook=MSGPackSerializer._decode_ext_types, raw=False)


def bound_dht_decoding() -> None:
    """Makes hivemind in this process refuse messages with more values, or deeper nesting, than honest nodes send.

    A dictionary is decoded by a separate call, so the limits hold for its content as well. A refused message ends the
    call that brought it, as malformed bytes do.
    """
    MSGPackSerializer.loads = staticmethod(_loads)


def _guarded(door: Door, rpc: Rpc) -> type[DHTProtocol]:
    """Hivemind's protocol between DHT nodes, for those who may see the run.

    hivemind's own authorisation passes no peer id to the check, so an admission could be used by anybody who saw it.
    """

    def check(context: P2PContext) -> None:
        if not door.sees(str(context.remote_id)):
            raise PermissionError("the records of this run are for its members")

    class Guarded(DHTProtocol):  # type: ignore[misc]  # hivemind ships no types
        async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
            check(context)
            return await super().rpc_ping(request, context)

        async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
            check(context)
            return await super().rpc_store(request, context)

        async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
            check(context)
            return await super().rpc_find(request, context)

        async def call_ping(self, peer: PeerID, *args: Any, **kwargs: Any) -> Any:
            await rpc.introduce(str(peer), self.wait_timeout)
            return await super().call_ping(peer, *args, **kwargs)

        async def call_store(self, peer: PeerID, *args: Any, **kwargs: Any) -> Any:
            await rpc.introduce(str(peer), self.wait_timeout)
            return await super().call_store(peer, *args, **kwargs)

        async def call_find(self, peer: PeerID, *args: Any, **kwargs: Any) -> Any:
            await rpc.introduce(str(peer), self.wait_timeout)
            return await super().call_find(peer, *args, **kwargs)

    Guarded.__name__ = DHTProtocol.__name__  # part of the names of its handlers
    return Guarded


def _drop_refused(protocol: DHTProtocol, key: bytes, dictionary: DictionaryDHTValue) -> bool:
    with dictionary.freeze():
        kept = [
            (subkey, *entry)
            for subkey, entry in dictionary.items()
            if protocol._validate_record(key, protocol.serializer.dumps(subkey), *entry)
        ]
    dictionary.clear()
    for subkey, value, expiration_time in kept:
        dictionary.store(subkey, value, expiration_time)
    return bool(kept)


_STORE = DictionaryDHTValue.store


def _store_newer(dictionary: DictionaryDHTValue, subkey: Any, value: bytes, expiration_time: float) -> bool:
    known = dictionary.data.get(subkey)
    if known is not None and known.expiration_time >= expiration_time:
        return False
    stored = bool(_STORE(dictionary, subkey, value, expiration_time))
    if len(dictionary.expiration_heap) > 2 * len(dictionary.data) + _MAX_OUTDATED:
        dictionary.expiration_heap = list(dictionary.key_to_heap.values())
        heapify(dictionary.expiration_heap)
    return stored


def bound_dht_storage() -> None:
    """Makes hivemind in this process drop the refused entries of a dictionary, not all of it, and outdated expirations.

    Nodes know different peers, so what an honest node hands on may contain a stranger too many for the one that asked.
    hivemind 1.1.12 notes the expiration of each entry that is stored, even if a newer one is there, until that moment:
    each read of a key takes memory, and an old copy of an entry ends the newer one.
    """
    DHTProtocol._validate_dictionary = _drop_refused
    DictionaryDHTValue.store = _store_newer


Trust = Callable[[set[str]], Collection[str]]
"""Returns those of the connected peers whose clocks count."""


class RunDht:
    """Joins and leaves the DHT, and keeps the swarm's time. `on_fault` gets invalid answers, and wrong clocks."""

    def __init__(
        self,
        daemon: Daemon,
        rpc: Rpc,
        manifest: Manifest,
        on_fault: FaultSink,
        tokenizer: Path | None = None,
        acts: Path | None = None,
    ) -> None:
        """`tokenizer` is a file for peers that ask for it, `acts` the file of the run's acts."""
        self._daemon = daemon
        self._rpc = rpc
        self._manifest = manifest
        self._tokenizer = tokenizer
        self._timekeeper = Timekeeper(rpc, manifest.run_id, daemon.peer_id, on_fault)
        self._node: DHTNode | None = None
        self.now = self._timekeeper.clock.now  # returns the swarm's time in Unix seconds
        self.door = Door(rpc, manifest, self.now, ActsFile(acts) if acts is not None else None)
        self.own_maddrs: list[str] = []  # addresses at which other peers may reach this process, once it has joined

    @property
    def node(self) -> DHTNode:
        """The DHT node; it exists between `join` and `leave`."""
        assert self._node is not None
        return self._node

    async def join(
        self,
        initial_peers: Sequence[str],
        validator: RecordValidatorBase,
        trust: Trust,
        *,
        client_mode: bool,
        **options: Any,
    ) -> None:
        """Takes the swarm's time and joins the DHT; `options` are passed on to `DHTNode.create`."""
        give_to_hivemind(self.now)
        bound_dht_decoding()
        bound_dht_storage()
        await self.door.open(self._daemon.peer_id, trust(await self.connected()))
        hivemind.dht.node.DHTProtocol = DHTProtocol if self.door.is_visible else _guarded(self.door, self._rpc)
        trusted = await self._trusted(trust)
        await self._timekeeper.settle(trusted)
        # `daemon.bootstrap` has run before, and reports better which initial peers do not answer.
        self._node = await DHTNode.create(
            p2p=self._daemon.p2p,
            initial_peers=list(initial_peers) or None,
            client_mode=client_mode,
            record_validator=validator,
            reuse_get_requests=False,  # see dht_records.search
            strict=False,
            ensure_bootstrap_success=False,
            **options,
        )
        self.own_maddrs = await self._daemon.maddrs()
        more = await self._trusted(trust)
        if more != trusted:  # the DHT has found them
            await self._timekeeper.settle(more)

    async def serve(self) -> None:
        """Starts answering other peers."""
        await self._timekeeper.serve()
        await self._rpc.serve("manifest", self._serve_manifest)
        if self._tokenizer is not None:
            await self._rpc.serve("tokenizer", self._serve_tokenizer)

    async def _serve_manifest(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        del peer_id, request
        return dict(self._manifest.to_wire())

    async def _serve_tokenizer(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        del peer_id
        offset = request.get("offset")
        if not isinstance(offset, int) or not 0 <= offset <= MAX_TOKENIZER_BYTES:
            raise ProtocolError("malformed", "offset of a tokenizer")
        assert self._tokenizer is not None
        try:
            with self._tokenizer.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(offset)
                return {"piece": file.read(_PIECE_BYTES), "size": size}
        except OSError:
            return {"error": "the tokenizer cannot be read"}

    async def check_time(self, trust: Trust) -> float:
        """Waits until the next clock check, then corrects the clock; returns the step in seconds."""
        await asyncio.sleep(self._timekeeper.until_check_s())
        step_s = await self._timekeeper.check(await self._trusted(trust))
        if step_s < 0 and self._node is not None:
            self._node.blacklist.clear()  # it would exclude peers until a time that is now far away
        return step_s

    async def _trusted(self, trust: Trust) -> set[str]:
        return set(filter(self.door.admits, trust(await self.connected())))

    def has_met(self, peer_id: str) -> bool:
        """Returns True if a peer's DHT node has answered this one, or called it."""
        with suppress(ValueError):  # not a peer id
            return self._node is not None and PeerID.from_base58(peer_id) in self._node.protocol.routing_table
        return False

    async def connected(self) -> set[str]:
        """Ids of the peers that this process is connected to."""
        return {peer_id for peer_id in await self._daemon.connections() if peer_id != self._daemon.peer_id}

    async def leave(self) -> None:
        """Leaves the DHT."""
        if self._node is not None:
            await self._node.shutdown()
