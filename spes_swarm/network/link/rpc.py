"""Small requests between peers: msgpack maps over one call of the transport.

Its name has no version, so that peers of all later versions can tell each other theirs. Peers of version 1, under whose
name it is served as well, get an answer that they show.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

import msgpack

from spes_swarm.base.decoding import MAX_MESSAGE_BYTES, unpack
from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.wire import FaultSink, Slots
from spes_swarm.network.transport.interface import CallError, NotServedError, Transport
from spes_swarm.protocol.version import with_version, without_version

_LOGGER = logging.getLogger(__name__)
# As hivemind names a method `rpc_call` of a service `Rpc` in a namespace.
_NAME, _NAME_1 = "spes_swarm::Rpc.rpc_call", "spes_swarm/1::Rpc.rpc_call"
# The P2P daemon limits unary messages to 4 MiB; some of that is its own envelope.
MAX_RPC_BYTES = (4 << 20) - 4096
# Requests are small: the largest carries one signed message.
MAX_REQUEST_BYTES = 2 * MAX_MESSAGE_BYTES
# An honest peer has two or three calls under way at a time; some of them are held open for a second.
MAX_CALLS_PER_PEER = 16
# Strangers' calls under way, in all and from each: a call may be held open, and identities cost nothing.
MAX_CALLS_OF_STRANGERS, MAX_CALLS_PER_STRANGER = 128, 8
_MAX_REASON_CHARS = 500
# After this many unanswered calls in a row, and this long without any sign of life, a connection counts as dead.
_DEAD_CALLS, _DEAD_S = 2, 5.0
_LONG_CALL_S = 2.0  # shorter calls do not count: a busy peer may well miss their deadline
_MAX_HEARD = 1024

Handler = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


class RemoteError(ConnectionError):
    """The other peer answered that it refuses the request or cannot serve it."""


class RefusedError(RemoteError):
    """The other peer does not answer this one, which may not take part in its run."""


class Doorkeeper(Protocol):
    """Decides which calls are served; see door.py."""

    @property
    def digest(self) -> bytes:
        """Of the acts that this peer knows; empty without any."""

    async def receive(self, peer_id: str, message: dict[str, Any]) -> str | None:
        """Takes in what a call shows; returns why it is refused, None if it is served."""

    def receive_answer(self, peer_id: str, answer: dict[str, Any]) -> None:
        """Takes in what an answer shows."""

    def note_refusal(self, peer_id: str, reason: str) -> None:
        """Notes that another peer does not answer this one."""


class Rpc:
    """Dispatches calls by method name. A method is served once `serve` has registered it.

    Attributes:
        on_fault: called for peers whose calls break the protocol; callers use it for peers whose answers do.
        is_member: returns True for peers whose calls are served however many strangers call; see wire.Guests.
        on_contact: called for peers that answer a call or make one.
        on_silence: called for peers that no longer answer. A hanging peer looks the same as a path that was cut for a
            while. In the latter case, TCP waits longer and longer before it retries the old connection, libp2p keeps
            using it for up to 40 s, and only a new connection helps.
    """

    def __init__(self, transport: Transport, on_fault: FaultSink) -> None:
        self._transport = transport
        self.admission = b""  # of this peer to a private run
        self.door: Doorkeeper | None = None  # of the run, once it is open
        self._shown: OrderedDict[str, None] = OrderedDict()  # peers that have seen the admission
        self.on_fault = on_fault
        self.is_member: Callable[[str], bool] = lambda peer_id: True
        self.on_contact: Callable[[str], None] = lambda peer_id: None
        self.on_silence: Callable[[str], None] = lambda peer_id: None
        self._handlers: dict[str, Handler] = {}
        self._unanswered: Counter[str] = Counter()
        self._heard_at: dict[str, float] = {}
        self._slots = Slots(
            "calls at a time",
            per_peer=MAX_CALLS_PER_PEER,
            per_stranger=MAX_CALLS_PER_STRANGER,
            of_strangers=MAX_CALLS_OF_STRANGERS,
            most=math.inf,
        )

    async def start(self) -> None:
        """Registers the service with the transport."""
        for name in (_NAME, _NAME_1):
            await self._transport.serve_calls(name, self._answer)

    def open(self, door: Doorkeeper) -> None:
        """Lets a door decide from now on. It learns the admissions of all whom this peer calls, once each."""
        self.door = door
        self._shown.clear()

    async def serve(self, method: str, handler: Handler) -> None:
        """Answers `method` with `handler(peer_id of the caller, arguments)`."""
        self._handlers[method] = handler

    async def call(self, peer_id: str, method: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Calls a method of another peer and returns its answer.

        Raises:
            OSError: it cannot be reached in time (TimeoutError, ConnectionError), refused (RemoteError), or does not
                answer this peer at all (RefusedError).
            ProtocolError: (`malformed`, `oversized`) its answer is invalid; (`version`) it has another major version.
        """
        shows = bool(self.admission) and peer_id not in self._shown
        answer = await self._send(peer_id, method, arguments, timeout_s, shows=shows)
        if answer.get("refused") and self.admission and not shows:  # it has started again since it saw the admission
            answer = await self._send(peer_id, method, arguments, timeout_s, shows=True)
        if answer.get("refused"):
            self._shown.pop(peer_id, None)
            reason = str(answer.get("error"))[:_MAX_REASON_CHARS]
            if self.door is not None:
                self.door.note_refusal(peer_id, reason)
            raise RefusedError(reason)
        self._shown[peer_id] = None
        if len(self._shown) > _MAX_HEARD:
            self._shown.popitem(last=False)
        self._note_sign_of_life(peer_id)
        if self.door is not None:
            self.door.receive_answer(peer_id, answer)
        if "error" in answer:
            raise RemoteError(f"{method} at {peer_id}: {str(answer['error'])[:_MAX_REASON_CHARS]}")
        return answer

    async def introduce(self, peer_id: str, timeout_s: float) -> None:
        """Shows this peer's admission to a peer that has not seen it yet; errors are ignored."""
        if self.admission and peer_id not in self._shown:
            with suppress(OSError, ProtocolError):
                await self.call(peer_id, "ping", {}, timeout_s)

    async def _send(
        self,
        peer_id: str,
        method: str,
        arguments: dict[str, Any],
        timeout_s: float,
        *,
        shows: bool,
        name: str = _NAME,
    ) -> dict[str, Any]:
        message = with_version({"method": method, "arguments": arguments})
        if shows:
            message["admission"] = self.admission
        if self.door is not None and self.door.digest:
            message["acts"] = self.door.digest
        request = msgpack.packb(message, use_bin_type=True)
        try:
            response = await self._transport.call(peer_id, name, request, timeout_s)
        except TimeoutError:
            if timeout_s >= _LONG_CALL_S:
                self._note_silence(peer_id)
            raise
        except CallError as exc:
            if isinstance(exc, NotServedError) and name == _NAME:  # an answer shows that it has version 1
                return await self._send(peer_id, method, arguments, timeout_s, shows=shows, name=_NAME_1)
            raise ConnectionError(f"{method} at {peer_id}: {exc}") from exc
        return without_version(unpack(response, MAX_RPC_BYTES), f"peer {peer_id}")

    def _note_sign_of_life(self, peer_id: str) -> None:
        self._unanswered.pop(peer_id, None)
        self._heard_at.pop(peer_id, None)
        self._heard_at[peer_id] = time.monotonic()
        if len(self._heard_at) > _MAX_HEARD:
            del self._heard_at[next(iter(self._heard_at))]  # the one that has been silent longest
        self.on_contact(peer_id)

    def _note_silence(self, peer_id: str) -> None:
        self._unanswered[peer_id] += 1
        heard_at = self._heard_at.get(peer_id, -math.inf)
        if self._unanswered[peer_id] >= _DEAD_CALLS and time.monotonic() - heard_at > _DEAD_S:
            del self._unanswered[peer_id]
            self._heard_at.pop(peer_id, None)
            self.on_silence(peer_id)

    async def _answer(self, peer_id: str, request: bytes) -> bytes:
        try:
            with self._slots.take(peer_id, is_member=self.is_member(peer_id)):
                message = without_version(unpack(request, MAX_REQUEST_BYTES), "the caller")
                if not isinstance(message.get("arguments"), dict):
                    raise ProtocolError("malformed", "a call is a map of method and arguments")
                answer = await self._respond(peer_id, message)
        except ProtocolError as exc:
            self.on_fault(peer_id, exc)
            answer = {"error": str(exc)}
        except Exception:
            _LOGGER.exception("a call of %s failed", peer_id)
            raise  # the transport tells the caller
        return bytes(msgpack.packb(with_version(answer), use_bin_type=True))

    async def _respond(self, peer_id: str, message: dict[str, Any]) -> dict[str, Any]:
        refusal = await self.door.receive(peer_id, message) if self.door is not None else None
        if refusal is not None:
            return {"error": refusal, "refused": True}
        self._note_sign_of_life(peer_id)
        handler = self._handlers.get(str(message.get("method")))
        if handler is None:
            return {"error": "unknown method, or not served yet"}
        answer = await handler(peer_id, message["arguments"])
        if self.door is not None and self.door.digest:
            answer = {**answer, "acts_digest": self.door.digest}
        return {**answer, "admission": self.admission} if self.admission and "admission" in message else answer
