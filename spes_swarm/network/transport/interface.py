"""What rounds, transfers and calls need of the network: calls with an answer, and streams of bytes, by peer id.

`libp2p` has the implementation of peers; tests have another one, in memory (`tests/helpers/memory_network.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

# A stream raises one of these if the other side dies, stalls or was never there.
STREAM_ERRORS = (OSError, EOFError, asyncio.TimeoutError)

CallHandler = Callable[[str, bytes], Awaitable[bytes]]
"""Returns the answer to a caller's payload; the caller is told what it raises."""

StreamHandler = Callable[[str, str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Serves a stream, and closes it; gets the id and the multiaddress of the peer that opened it."""


class CallError(ConnectionError):
    """A call was not delivered, or the other peer failed to answer it."""


class NotServedError(CallError):
    """The other peer does not serve calls of that name."""


class Transport(Protocol):
    """Reaches other peers. Their ids are authentic."""

    @property
    def peer_id(self) -> str:
        """The id of this peer."""

    async def call(self, peer_id: str, name: str, payload: bytes, timeout_s: float) -> bytes:
        """Calls another peer and returns its answer.

        Raises:
            OSError: no answer came in time (TimeoutError), or none at all (NotServedError or another CallError).
        """

    async def serve_calls(self, name: str, handler: CallHandler) -> None:
        """Answers calls of that name."""

    async def open_stream(
        self, peer_id: str, name: str, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a stream to a peer's handler.

        Raises:
            STREAM_ERRORS: the peer cannot be reached in time or has no such handler.
        """

    async def serve_streams(self, name: str, handler: StreamHandler) -> None:
        """Serves the streams that other peers open under that name."""
