"""Small questions and answers between peers: msgpack maps over one unary RPC of hivemind's service base."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto import averaging_pb2

from spes_swarm.errors import ProtocolError
from spes_swarm.signed import MAX_MESSAGE_BYTES, unpack

_NAMESPACE = "spes_swarm/1"
# The P2P daemon limits unary messages to 4 MiB; some of that is its own envelope.
MAX_RPC_BYTES = (4 << 20) - 4096
# Questions are small: the largest carries one signed message. Decoded msgpack may take 60 times its length.
MAX_REQUEST_BYTES = 2 * MAX_MESSAGE_BYTES
# An honest peer has two or three calls under way at a time; some of them are held open for a second.
MAX_CALLS_PER_PEER = 16
_MAX_REASON_CHARS = 500

Handler = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


class RemoteError(ConnectionError):
    """The other peer answered that it will not or cannot do what was asked."""


class Rpc(ServicerBase):  # type: ignore[misc]  # hivemind ships no types
    """Dispatches calls by method name. A method is served from the moment of `serve`.

    Attributes:
        on_fault: told about callers that break the protocol, and by those who ask about answers that do.
    """

    def __init__(self, p2p: P2P, on_fault: Callable[[str, ProtocolError], None]) -> None:
        self._p2p = p2p
        self.on_fault = on_fault
        self._handlers: dict[str, Handler] = {}
        self._num_calls: Counter[str] = Counter()

    async def start(self) -> None:
        """Registers the service with the P2P daemon."""
        await self.add_p2p_handlers(self._p2p, namespace=_NAMESPACE)

    async def serve(self, method: str, handler: Handler) -> None:
        """Answers `method` with `handler(peer_id of the caller, arguments)`."""
        self._handlers[method] = handler

    async def call(self, peer_id: str, method: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Asks another peer.

        Raises:
            OSError: it cannot be reached in time (TimeoutError, ConnectionError), or refused (RemoteError).
            ProtocolError: (`malformed`, `oversized`) its answer makes no sense.
        """
        request = averaging_pb2.DownloadData(
            metadata=msgpack.packb({"method": method, "arguments": arguments}, use_bin_type=True)
        )
        try:
            stub = self.get_stub(self._p2p, PeerID.from_base58(peer_id), namespace=_NAMESPACE)
            response = await stub.rpc_call(request, timeout=timeout_s)
        except asyncio.CancelledError:
            raise
        except OSError:
            raise
        except Exception as exc:  # the daemon's client raises bare types of its own for failed calls
            raise ConnectionError(f"{method} at {peer_id}: {exc}") from exc
        answer = unpack(response.metadata, MAX_RPC_BYTES)
        if not isinstance(answer, dict):
            raise ProtocolError("malformed", f"the answer to {method} is not a map")
        if "error" in answer:
            raise RemoteError(f"{method} at {peer_id}: {str(answer['error'])[:_MAX_REASON_CHARS]}")
        return answer

    async def rpc_call(self, request: averaging_pb2.DownloadData, context: P2PContext) -> averaging_pb2.DownloadData:
        """Serves one call."""
        peer_id = str(context.remote_id)
        self._num_calls[peer_id] += 1
        try:
            if self._num_calls[peer_id] > MAX_CALLS_PER_PEER:
                raise ProtocolError("busy", "too many calls at a time")
            message = unpack(request.metadata, MAX_REQUEST_BYTES)
            if not (isinstance(message, dict) and isinstance(message.get("arguments"), dict)):
                raise ProtocolError("malformed", "a call is a map of method and arguments")
            handler = self._handlers.get(str(message.get("method")))
            if handler is None:
                answer: dict[str, Any] = {"error": "unknown method, or not served yet"}
            else:
                answer = await handler(peer_id, message["arguments"])
        except ProtocolError as exc:
            self.on_fault(peer_id, exc)
            answer = {"error": str(exc)}
        finally:
            self._num_calls[peer_id] -= 1
            if not self._num_calls[peer_id]:
                del self._num_calls[peer_id]
        return averaging_pb2.DownloadData(metadata=msgpack.packb(answer, use_bin_type=True))
