"""A network in memory: peers in one event loop that call each other and open streams without sockets.

Streams are asyncio's own readers and writers: a writer whose reader does not keep up waits in `drain`. Nothing here
depends on real time, so all of it runs on a virtual clock, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from weakref import WeakSet

from spes_swarm.network.transport.interface import CallError, CallHandler, NotServedError, StreamHandler

_PIECE_BYTES = 1 << 16  # handed over at a time
_HIGH_BYTES, _LOW_BYTES = 1 << 16, 1 << 14  # asyncio's: a writer waits beyond the first, until it is at the second


class MemoryNetwork:
    """All peers reach each other, unless one has been cut off or frozen."""

    def __init__(self) -> None:
        self._peers: dict[str, MemoryTransport] = {}
        self._ends: WeakSet[_End] = WeakSet()
        self._thawed: dict[str, asyncio.Event] = {}  # of each frozen peer

    def join(self, peer_id: str) -> MemoryTransport:
        """Adds a peer, or one that starts again."""
        self._peers[peer_id] = peer = MemoryTransport(self, peer_id, len(self._peers))
        return peer

    def __contains__(self, peer_id: str) -> bool:
        """Returns True if a peer has not been cut off."""
        return peer_id in self._peers

    def cut(self, peer_id: str) -> None:
        """Ends a peer's calls and resets its streams; from now on it reaches nobody, and nobody reaches it."""
        self._peers.pop(peer_id).gone.set()
        for end in [end for end in self._ends if end.peer_id == peer_id]:
            for each in (end, end.other):
                each.reset(ConnectionResetError(f"{peer_id} has been cut off"))

    def freeze(self, peer_id: str) -> None:
        """Holds back all that a peer sends, and all that is sent to it."""
        self._thawed[peer_id] = asyncio.Event()

    def thaw(self, peer_id: str) -> None:
        """Delivers what was held back."""
        self._thawed.pop(peer_id).set()
        for end in self._ends:
            end.hand_over_soon()

    def is_frozen(self, *peer_ids: str) -> bool:
        """Returns True if nothing passes between these peers at the moment."""
        return not self._thawed.keys().isdisjoint(peer_ids)

    async def passable(self, *peer_ids: str) -> None:
        """Waits until none of these peers is frozen."""
        while self.is_frozen(*peer_ids):
            await next(self._thawed[peer_id] for peer_id in peer_ids if peer_id in self._thawed).wait()

    async def reach(self, source: MemoryTransport, target: str) -> MemoryTransport:
        """Waits until a peer can be reached, and returns it.

        Raises:
            ConnectionError: it has been cut off, or was never there.
        """
        await self.passable(source.peer_id, target)
        if source.gone.is_set() or target not in self._peers:
            raise ConnectionError(f"{target} cannot be reached")
        return self._peers[target]

    def stream(self, source: MemoryTransport, target: MemoryTransport) -> tuple[_End, _End]:
        """A new stream between two peers."""
        one, other = _End(self, source.peer_id), _End(self, target.peer_id)
        one.other, other.other = other, one
        self._ends |= {one, other}
        return one, other


class MemoryTransport:
    """The Transport of one peer of a MemoryNetwork."""

    def __init__(self, network: MemoryNetwork, peer_id: str, number: int) -> None:
        self.peer_id = peer_id
        self.address = f"/ip4/127.0.0.1/tcp/{number + 1}"
        self.gone = asyncio.Event()  # it has been cut off
        self._network = network
        self._calls: dict[str, CallHandler] = {}
        self._streams: dict[str, StreamHandler] = {}
        self._serving: set[asyncio.Task[None]] = set()

    async def serve_calls(self, name: str, handler: CallHandler) -> None:
        """See Transport."""
        self._calls[name] = handler

    async def serve_streams(self, name: str, handler: StreamHandler) -> None:
        """See Transport."""
        self._streams[name] = handler

    async def call(self, peer_id: str, name: str, payload: bytes, timeout_s: float) -> bytes:
        """See Transport."""
        async with asyncio.timeout(timeout_s):
            try:
                other = await self._network.reach(self, peer_id)
            except ConnectionError as exc:
                raise CallError(str(exc)) from exc
            if name not in other._calls:
                raise NotServedError(f"protocols not supported: [{name}]")
            return await self._until_cut(other, other._calls[name](self.peer_id, payload))

    async def _until_cut(self, other: MemoryTransport, answering: Awaitable[bytes]) -> bytes:
        answer = asyncio.ensure_future(answering)
        cuts = [asyncio.ensure_future(peer.gone.wait()) for peer in (self, other)]
        try:
            await asyncio.wait([answer, *cuts], return_when=asyncio.FIRST_COMPLETED)
            await self._network.passable(self.peer_id, other.peer_id)
            if any(cut.done() for cut in cuts):
                raise CallError("the connection has ended")
            if answer.exception() is not None:
                raise CallError(repr(answer.exception()))
            return answer.result()
        finally:
            for task in (answer, *cuts):
                task.cancel()

    async def open_stream(
        self, peer_id: str, name: str, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """See Transport."""
        async with asyncio.timeout(timeout_s):
            other = await self._network.reach(self, peer_id)
        if name not in other._streams:
            raise ConnectionError(f"cannot open {name} at {peer_id}: protocols not supported: [{name}]")
        here, there = self._network.stream(self, other)
        serving = asyncio.ensure_future(other._streams[name](self.peer_id, self.address, there.reader, there.writer))
        other._serving.add(serving)
        serving.add_done_callback(other._served)
        return here.reader, here.writer

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            details = {"message": "Unhandled exception in a stream's handler", "exception": error}
            asyncio.get_running_loop().call_exception_handler(details)  # as asyncio does for its servers


class _End(asyncio.Transport):
    """One end of a stream. What is written waits here until the other end takes it."""

    other: _End

    def __init__(self, network: MemoryNetwork, peer_id: str) -> None:
        super().__init__()
        loop = self._loop = asyncio.get_running_loop()
        self._network = network
        self.peer_id = peer_id
        self.reader = asyncio.StreamReader(loop=loop)
        self._protocol = asyncio.StreamReaderProtocol(self.reader, loop=loop)
        self._protocol.connection_made(self)
        self.writer = asyncio.StreamWriter(self, self._protocol, self.reader, loop)
        self._written = bytearray()
        self._is_soon = False  # a handover is scheduled
        self._is_full = False  # the writer has been told to wait
        self._is_reading = True
        self._closes = self._is_broken = self._is_lost = False

    # As asyncio's streams use it.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Takes data, and more than is wanted, if the writer does not wait."""
        if self._closes:
            return
        self._written += data
        if len(self._written) > _HIGH_BYTES and not self._is_full:
            self._is_full = True
            self._protocol.pause_writing()
        self.hand_over_soon()

    def can_write_eof(self) -> bool:
        """Half a stream cannot be closed: with p2pd, both directions would end."""
        return False

    def get_write_buffer_size(self) -> int:
        """Bytes that the other end has not taken."""
        return len(self._written)

    def pause_reading(self) -> None:
        """The reader is full."""
        self._is_reading = False

    def resume_reading(self) -> None:
        """The reader has room."""
        self._is_reading = True
        self.other.hand_over_soon()

    def is_reading(self) -> bool:
        """Returns True if the reader has room."""
        return self._is_reading

    def is_closing(self) -> bool:
        """Returns True if this end is closed, or will be once everything has been taken."""
        return self._closes

    def close(self) -> None:
        """Closes this end once everything has been taken; what still comes is dropped."""
        self._closes = True
        self.hand_over_soon()

    def abort(self) -> None:
        """Drops what has not been taken, and resets the stream."""
        self.reset(None)
        self.other.reset(ConnectionResetError("the other end was aborted"))

    # Between the ends.

    def reset(self, error: Exception | None) -> None:
        """The stream has broken."""
        self._closes = self._is_broken = True
        self._written.clear()
        self._loop.call_soon(self._lose, error)

    def hand_over_soon(self) -> None:
        """Lets the other end take what it has room for."""
        if not self._is_soon:
            self._is_soon = True
            self._loop.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        self._is_soon = False
        if self._is_broken or self._is_lost or self._network.is_frozen(self.peer_id, self.other.peer_id):
            return None
        if self._written and self.other._is_lost:
            return self._lose(ConnectionResetError("the other end is closed"))
        if self._written and (self.other._is_reading or self.other._closes):
            piece = bytes(self._written[:_PIECE_BYTES])
            del self._written[:_PIECE_BYTES]
            if not self.other._closes:
                self.other._protocol.data_received(piece)
            if len(self._written) <= _LOW_BYTES and self._is_full:
                self._is_full = False
                self._protocol.resume_writing()
            self.hand_over_soon()
        elif not self._written and self._closes:
            if not self.other._closes:
                self.other._protocol.eof_received()
            self._lose(None)
        return None

    def _lose(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = self._closes = True
            self._written.clear()
            self._protocol.connection_lost(error)
