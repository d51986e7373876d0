"""All that is changed in hivemind, for this process; each change says what it fixes.

The changes reach into private parts, so they hold for the versions that they were tested with.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from heapq import heapify
from pathlib import Path
from typing import Any, Final

import hivemind
import hivemind.dht.node
import msgpack
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.serializer import MSGPackSerializer

from spes_swarm.base.decoding import check_msgpack

TESTED: Final = ("1.1.12",)
_MAX_OUTDATED = 64  # expirations that a dictionary keeps needlessly, beyond one for each entry
_LOGGER = logging.getLogger(__name__)

# The only extension that the swarm's records use. hivemind's other one, for tuples, would be decoded without a limit.
_DICTIONARY: Final[int] = MSGPackSerializer._ext_types[DictionaryDHTValue]


def check_version() -> None:
    """Warns, in one line, of a version of hivemind that was not tested."""
    if hivemind.__version__ not in TESTED:
        _LOGGER.warning(
            "hivemind %s is not tested with spes_swarm, which changes private parts of it: pip install hivemind==%s",
            hivemind.__version__,
            TESTED[-1],
        )


def _loads(buf: bytes) -> Any:
    check_msgpack(buf, ext_codes=(_DICTIONARY,))
    return msgpack.loads(buf, ext_hook=MSGPackSerializer._decode_ext_types, raw=False)


def bound_decoding() -> None:
    """Refuses messages with more values, or deeper nesting, than honest nodes send.

    Any connected peer can send a dictionary to be stored, or answer a search with one: up to 4 MiB of msgpack, which
    hivemind would decode by itself, before any validator runs. A dictionary is decoded by a separate call, so the
    limits hold for its content as well. A refused message ends the call that brought it, as malformed bytes do.
    """
    MSGPackSerializer.loads = staticmethod(_loads)


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


def bound_storage() -> None:
    """Drops the refused entries of a dictionary, not all of it, and outdated expirations.

    Nodes know different peers, so what an honest node hands on may contain a stranger too many for the one that asked.
    hivemind 1.1.12 notes the expiration of each entry that is stored, even if a newer one is there, until that moment:
    each read of a key takes memory, and an old copy of an entry ends the newer one.
    """
    DHTProtocol._validate_dictionary = _drop_refused
    DictionaryDHTValue.store = _store_newer


def use_clock(now: Callable[[], float]) -> None:
    """Makes the DHT use the swarm's time: each hivemind module has imported time.time under its own name."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "hivemind" and vars(module).get("get_dht_time") is time.time:
            vars(module)["get_dht_time"] = now


@dataclass(frozen=True)
class Guard:
    """Who may see the records of a run; `introduce` shows a peer, within seconds, that this one may."""

    sees: Callable[[str], bool]
    introduce: Callable[[str, float], Awaitable[None]]


def use_guard(guard: Guard | None) -> None:
    """Makes the nodes that are created from now on answer only those who may see the run; None: everybody.

    hivemind's own authorisation passes no peer id to the check, so an admission could be used by anybody who saw it.
    """
    hivemind.dht.node.DHTProtocol = DHTProtocol if guard is None else _guarded(guard)


def _guarded(guard: Guard) -> type[DHTProtocol]:
    def check(context: P2PContext) -> None:
        if not guard.sees(str(context.remote_id)):
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
            await guard.introduce(str(peer), self.wait_timeout)
            return await super().call_ping(peer, *args, **kwargs)

        async def call_store(self, peer: PeerID, *args: Any, **kwargs: Any) -> Any:
            await guard.introduce(str(peer), self.wait_timeout)
            return await super().call_store(peer, *args, **kwargs)

        async def call_find(self, peer: PeerID, *args: Any, **kwargs: Any) -> Any:
            await guard.introduce(str(peer), self.wait_timeout)
            return await super().call_find(peer, *args, **kwargs)

    Guarded.__name__ = DHTProtocol.__name__  # part of the names of its handlers
    return Guarded


class _PendingCalls(dict[Any, asyncio.Future[Any]]):
    """Calls that wait for an answer; those whose caller has given up count as absent.

    hivemind 1.1.12 sets an answer without checking that its future is still pending. If a call times out at the moment
    its answer arrives, that raises inside the task that reads from the daemon, and from then on no unary call of this
    process is ever answered, the DHT's included. (Seen in tests that kill a peer during an exchange.)
    """

    def __contains__(self, key: object) -> bool:
        future = self.get(key)
        return future is not None and not future.done()


async def connect(sockets: Path, control: Multiaddr) -> P2P:
    """Connects to a running p2pd; the client's own socket lies in `sockets`, too, instead of /tmp."""
    client: Any = type("P2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{sockets}/"})  # `replicate` names it so
    p2p: P2P = await client.replicate(control)
    p2p._client.control._pending_calls = _PendingCalls()
    return p2p
