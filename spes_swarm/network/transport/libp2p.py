"""The transport of peers: libp2p, as p2pd and hivemind's client of it offer it."""

from __future__ import annotations

import asyncio
from typing import Any

from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.proto.averaging_pb2 import DownloadData

from spes_swarm.network.transport.interface import (
    STREAM_ERRORS,
    CallError,
    CallHandler,
    NotServedError,
    StreamHandler,
)

_NOT_SERVED = "protocols not supported"  # libp2p's words


class Libp2p:
    """The Transport of a peer whose p2pd is running. A call's payload is the metadata of a `DownloadData` message."""

    def __init__(self, p2p: P2P) -> None:
        self._p2p = p2p
        self.peer_id = str(p2p.peer_id)
        self._unwanted: set[asyncio.Future[Any]] = set()  # streams being opened, which nobody waits for any more

    async def call(self, peer_id: str, name: str, payload: bytes, timeout_s: float) -> bytes:
        """See Transport."""
        request = DownloadData(metadata=payload)
        try:
            calling = self._p2p.call_protobuf_handler(PeerID.from_base58(peer_id), name, request, DownloadData)
            response = await asyncio.wait_for(calling, timeout_s)
        except OSError:
            raise
        except Exception as exc:  # for failed calls, the daemon's client raises types derived from Exception directly
            raise (NotServedError if _NOT_SERVED in str(exc) else CallError)(str(exc)) from exc
        return bytes(response.metadata)

    async def serve_calls(self, name: str, handler: CallHandler) -> None:
        """See Transport."""

        async def serve(request: DownloadData, context: P2PContext) -> DownloadData:
            return DownloadData(metadata=await handler(str(context.remote_id), request.metadata))

        await self._p2p.add_protobuf_handler(name, serve, DownloadData)

    async def open_stream(
        self, peer_id: str, name: str, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """See Transport."""
        opening = asyncio.create_task(self._open(peer_id, name))
        try:
            _, reader, writer = await asyncio.wait_for(asyncio.shield(opening), timeout_s)
        except BaseException as exc:
            # hivemind 1.1.12 never closes a stream whose opening is cancelled. So it goes on, and is closed when open.
            if opening.done():
                self._close_unwanted(opening)
            else:
                self._unwanted.add(opening)
                opening.add_done_callback(self._close_unwanted)
            if isinstance(exc, STREAM_ERRORS) or not isinstance(exc, Exception):
                raise
            raise ConnectionError(f"cannot open {name} at {peer_id}: {exc}") from exc  # as in `call`
        return reader, writer

    async def _open(self, peer_id: str, name: str) -> tuple[StreamInfo, asyncio.StreamReader, asyncio.StreamWriter]:
        stream: tuple[StreamInfo, asyncio.StreamReader, asyncio.StreamWriter]
        stream = await self._p2p.call_binary_stream_handler(PeerID.from_base58(peer_id), name)
        return stream

    def _close_unwanted(self, opening: asyncio.Future[Any]) -> None:
        self._unwanted.discard(opening)
        if not opening.cancelled() and opening.exception() is None:
            opening.result()[2].close()

    async def serve_streams(self, name: str, handler: StreamHandler) -> None:
        """See Transport."""

        async def serve(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await handler(str(info.peer_id), str(info.addr), reader, writer)

        await self._p2p.add_binary_stream_handler(name, serve)
