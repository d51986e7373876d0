"""Framed messages on libp2p streams.

Tensor data goes over raw streams with our own frames rather than through protobuf RPC streams: the RPC layer allocates
whatever length a sender announces and writes without a deadline. Here every frame has a size limit set by the reader,
and every read and write has a deadline, so neither a hostile nor a frozen peer can hold memory or a task.

The side that opened a stream closes it once it has received what it asked for; the serving side waits for that. If the
serving process closes first, its p2pd closes the libp2p stream for reading, then for writing. In between, the goroutine
that reads may notice the end and reset the stream; the other p2pd then discards whatever it has not forwarded.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar
from weakref import WeakSet

import msgpack

from spes_swarm.base.decoding import unpack
from spes_swarm.base.errors import ProtocolError
from spes_swarm.base.log import where_to_read
from spes_swarm.network.transport.interface import STREAM_ERRORS, Transport
from spes_swarm.protocol.rounds.frames import MAX_ERROR_BYTES, Frame, FrameKind
from spes_swarm.protocol.version import with_version, without_version

T = TypeVar("T")
_LOGGER = logging.getLogger(__name__)

_HEADER = struct.Struct("<BBHIdI")  # kind, form, extra bytes, part, weight, payload bytes
MAX_EXTRA_BYTES = 1 << 15  # what goes along with a result: about a hundred bytes for each member
# An honest peer has one stream of each kind open, two or three while an old one is closing.
MAX_STREAMS_PER_PEER = 8
# Of one kind, from all peers together: each stream costs a file descriptor.
MAX_STREAMS = 256
# Those of them that strangers may hold: in all, and each. Identities cost nothing, so the rest is for members.
MAX_STREAMS_OF_STRANGERS, MAX_STREAMS_PER_STRANGER = 32, 3
# A stranger that opens a stream says within this time what it wants. An honest one does so at once.
STRANGER_HELLO_S = 5.0
# Limit on what a served peer sends after the answer, such as requests made in advance.
_MAX_LATE_BYTES = 1 << 16


class Channel:
    """A stream with deadlines. `timeout_s` bounds the time that one frame may take."""

    _open: ClassVar[WeakSet[Channel]] = WeakSet()

    def __init__(
        self,
        peer_id: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        timeout_s: float,
        name: str = "",  # of the stream
        address: str = "",  # multiaddress of the other side, if that side opened the stream
    ) -> None:
        self.peer_id = peer_id
        self.name = name
        self.address = address
        self.opened_at = self.active_at = time.monotonic()  # when it was opened, and when a frame passed last
        self._open.add(self)
        self._reader = reader
        self._writer = writer
        self._timeout_s = timeout_s
        self.next_timeout_s = timeout_s  # for the next frame that arrives, not for those after it

    @classmethod
    def open_ones(cls) -> list[Channel]:
        """The open streams of this process, the oldest first."""
        return sorted(cls._open, key=lambda channel: channel.opened_at)

    async def send(self, frame: Frame) -> None:
        """Writes a frame; returns when all but the last few KiB have left this process.

        Raises:
            STREAM_ERRORS: the other side is gone, or did not take the frame in time.
        """
        header = _HEADER.pack(frame.kind, frame.form, len(frame.extra), frame.part, frame.weight, len(frame.payload))
        # In one piece, because p2pd forwards what it reads. Not by `writelines`: in Python 3.12 it never pauses, and
        # never gets past an empty piece.
        self._writer.write(b"".join((header, frame.extra, frame.payload)))
        async with asyncio.timeout(self._timeout_s):  # unlike wait_for, it starts no task for each frame
            await self._writer.drain()
        self.active_at = time.monotonic()

    async def receive(self, max_payload_bytes: int) -> Frame:
        """Reads a frame.

        Raises:
            STREAM_ERRORS: the other side has ended the stream between two frames, or is silent for too long.
            ProtocolError: (`malformed`, `oversized`, `truncated`) not a frame, longer than allowed, or cut off; the
                stream is unusable.
        """
        try:
            return await self._read_frame(max_payload_bytes)
        except asyncio.IncompleteReadError as exc:
            if not exc.partial and exc.expected == _HEADER.size:
                raise
            raise ProtocolError("truncated", "the stream ended within a frame") from exc

    async def _read_frame(self, max_payload_bytes: int) -> Frame:
        async with asyncio.timeout(self.next_timeout_s):
            header = await self._reader.readexactly(_HEADER.size)
            kind, form, num_extra, part, weight, num_payload = _HEADER.unpack(header)
            if kind not in FrameKind._value2member_map_:
                raise ProtocolError("malformed", f"unknown frame kind {kind}")
            if num_payload > max_payload_bytes or num_extra > MAX_EXTRA_BYTES:
                raise ProtocolError("oversized", f"a frame of {num_payload + num_extra} bytes")
            extra = await self._reader.readexactly(num_extra)
            payload = await self._reader.readexactly(num_payload)
        self.next_timeout_s = self._timeout_s
        self.active_at = time.monotonic()
        return Frame(FrameKind(kind), form, part, weight, extra, payload)

    async def send_hello(self, **fields: Any) -> None:
        """Sends the opening message."""
        await self.send(Frame(FrameKind.HELLO, payload=msgpack.packb(with_version(fields), use_bin_type=True)))

    async def receive_hello(self, max_bytes: int) -> dict[str, Any]:
        """Reads the opening message.

        Raises:
            ProtocolError: (`malformed`) the frame is not an opening message; (`version`) of another major version.
        """
        return read_hello(await self.receive(max_bytes), max_bytes)

    async def end(self) -> None:
        """Signals the end of the data and waits for the answer.

        A stream that closes without an answer is not an error: the other side may have stopped after it received
        everything, which its result shows.

        Raises:
            STREAM_ERRORS: the signal could not be sent, or no answer came in time.
            ProtocolError: (`refused`) the other side answered with an error.
        """
        await self.send(Frame(FrameKind.END))
        try:
            answer = await self.receive(MAX_ERROR_BYTES)
        except (EOFError, ConnectionError):
            return
        if answer.kind is FrameKind.ERROR:
            raise ProtocolError("refused", answer.error_text())

    async def send_error(self, message: str) -> None:
        """Tells the other side why the stream ends; it may be gone already."""
        try:
            await self.send(Frame(FrameKind.ERROR, payload=message.encode()[:MAX_ERROR_BYTES]))
        except STREAM_ERRORS:
            return

    async def wait_until_closed(self) -> None:
        """Waits until the other side closes the stream, so that it receives what was sent last.

        Whatever it still sends is dropped. Waits at most the deadline of one frame in total, and for at most 64 KiB.
        """
        num_bytes = 0
        with suppress(*STREAM_ERRORS):
            async with asyncio.timeout(self._timeout_s):
                while num_bytes < _MAX_LATE_BYTES and (data := await self._reader.read(_MAX_LATE_BYTES)):
                    num_bytes += len(data)

    def close(self) -> None:
        """Closes the stream without waiting; what the other side does not take within the deadline is dropped."""
        self._open.discard(self)
        transport = self._writer.transport
        self._writer.close()
        if transport.get_write_buffer_size() > 0:
            asyncio.get_running_loop().call_later(self._timeout_s, _abort_unread, transport)


def read_hello(frame: Frame, max_bytes: int) -> dict[str, Any]:
    """Reads an opening message; see `Channel.receive_hello`."""
    if frame.kind is not FrameKind.HELLO:
        raise ProtocolError("malformed", "a stream must begin with a hello")
    return without_version(unpack(frame.payload, max_bytes), "the peer that opened the stream")


def _abort_unread(transport: asyncio.WriteTransport) -> None:
    # Once its buffer is empty, a closed transport has no loop any more and must not be aborted.
    if transport.get_write_buffer_size() > 0:
        transport.abort()


ChannelHandler = Callable[[Channel], Awaitable[None]]
FaultSink = Callable[[str, ProtocolError], None]
"""Receives the id of a peer that broke the protocol, or with which an operation failed, and the error."""


@dataclass(frozen=True)
class Guests:
    """Who may open streams at all, and whose slots are reserved; both by peer id."""

    admits: Callable[[str], bool]
    is_member: Callable[[str], bool]


@asynccontextmanager
async def open_channel(transport: Transport, peer_id: str, name: str, timeout_s: float) -> AsyncIterator[Channel]:
    """Opens a stream to a peer's handler.

    Raises:
        STREAM_ERRORS: the peer cannot be reached in time or has no such handler.
    """
    reader, writer = await transport.open_stream(peer_id, name, timeout_s)
    channel = Channel(peer_id, reader, writer, timeout_s, name)
    try:
        yield channel
    finally:
        channel.close()


class Slots:
    """What peers hold at a time, such as streams. A slot counts as what its peer was when it was taken."""

    def __init__(self, name: str, *, per_peer: int, per_stranger: int, of_strangers: int, most: float) -> None:
        self._name = name
        self._per_peer, self._per_stranger = per_peer, per_stranger
        self._of_strangers, self._most = of_strangers, most
        self._num_open: Counter[str] = Counter()
        self._num_of_strangers = 0

    @contextmanager
    def take(self, peer_id: str, *, is_member: bool) -> Iterator[None]:
        """Holds a slot.

        Raises:
            ProtocolError: (`busy`) this peer, strangers together or all peers together have no slot left.
        """
        full = self._num_open.total() >= self._most or (not is_member and self._num_of_strangers >= self._of_strangers)
        if full or self._num_open[peer_id] >= (self._per_peer if is_member else self._per_stranger):
            raise ProtocolError("busy", f"too many {self._name}")
        self._num_open[peer_id] += 1
        self._num_of_strangers += not is_member
        try:
            yield
        finally:
            self._num_of_strangers -= not is_member
            self._num_open[peer_id] -= 1
            if not self._num_open[peer_id]:
                del self._num_open[peer_id]


async def serve_channel(
    transport: Transport, name: str, handler: ChannelHandler, timeout_s: float, on_fault: FaultSink, guests: Guests
) -> None:
    """Registers a stream handler. A ProtocolError in it is reported, is sent to the other side, and ends the stream.

    Peers without a slot (`busy`) or a right (`stranger`) get the error alone. After the handler has returned, the
    stream stays open until the other side closes it.
    """
    slots = Slots(
        "open streams",
        per_peer=MAX_STREAMS_PER_PEER,
        per_stranger=MAX_STREAMS_PER_STRANGER,
        of_strangers=MAX_STREAMS_OF_STRANGERS,
        most=MAX_STREAMS,
    )

    async def handle(peer_id: str, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(peer_id, reader, writer, timeout_s, name, address)
        is_member = guests.is_member(channel.peer_id)
        if not is_member:
            channel.next_timeout_s = min(STRANGER_HELLO_S, timeout_s)
        try:
            if not guests.admits(channel.peer_id):
                raise ProtocolError("stranger", "this peer is not in the run")
            with slots.take(channel.peer_id, is_member=is_member):
                await _serve(channel, handler, on_fault)
        except ProtocolError as exc:  # a wait would defeat the limit on streams; the answer may be lost
            on_fault(channel.peer_id, exc)
            await channel.send_error(str(exc))
        except TimeoutError:
            detail = f"a stream made no progress for {channel.next_timeout_s:.0f} s"
            on_fault(channel.peer_id, ProtocolError("stalled", detail))
        except STREAM_ERRORS:
            pass  # the other side is gone; whatever waits for it notices
        finally:
            channel.close()

    await transport.serve_streams(name, handle)


async def _serve(channel: Channel, handler: ChannelHandler, on_fault: FaultSink) -> None:
    try:
        await handler(channel)
    except ProtocolError as exc:
        on_fault(channel.peer_id, exc)
        await channel.send_error(str(exc))
    await channel.wait_until_closed()


def report_loop_errors(report: Callable[[str], None]) -> None:
    """Reports errors that nobody awaits in the running event loop, each in one line; the log has the traceback.

    What was cancelled is no error. When a loop ends, Python 3.11 calls every stream that is still being served one.
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        del loop
        error = context.get("exception")
        if not isinstance(error, asyncio.CancelledError):
            _LOGGER.error("%s", context.get("message"), exc_info=error)
            report(f"{context.get('message')}: {error!r}{where_to_read()}")

    asyncio.get_running_loop().set_exception_handler(handle)
