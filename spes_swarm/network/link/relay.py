"""Circuits: connections between two peers of a run through a third, where they cannot connect directly.

p2pd can be either end of a circuit (libp2p's circuit relay v2, see github.com/libp2p/specs/blob/master/relay), but its
own relay cannot be used here: on most starts it ends up with default limits, which cut a circuit after 128 KiB or two
minutes, whatever its flags are. So this process serves relay requests itself, only for live peers of its own run,
without reservations and without a limit on bytes. The ends of a circuit authenticate each other and encrypt as on any
other connection; the relay forwards bytes that it cannot read.

    B ── hop: CONNECT to A ──▶ C (relay) ── stop: CONNECT from B ──▶ A        then C copies bytes in both directions
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum

import base58

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.transport.daemon import Daemon
from spes_swarm.network.transport.interface import STREAM_ERRORS
from spes_swarm.protocol.members.identity import protobuf_varint

HOP = "/libp2p/circuit/relay/0.2.0/hop"
_STOP = "/libp2p/circuit/relay/0.2.0/stop"
CIRCUIT = "/p2p-circuit"
_MAX_MESSAGE_BYTES = 4096
_SETUP_TIMEOUT_S = 10.0
_COPY_BYTES = 1 << 16
# A circuit is one connection between two peers, whatever runs over it.
MAX_CIRCUITS = 256
MAX_CIRCUITS_PER_PEER = 32
_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]

# Relay messages are length-prefixed protobuf.
# Message types, between the source and the relay (hop), and between the relay and the target (stop).
_HOP_CONNECT, _HOP_STATUS = 1, 2
_STOP_CONNECT, _STOP_STATUS = 0, 1


class Status(IntEnum):
    """Status codes of a relay's answers."""

    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


def encode(fields: Sequence[tuple[int, int | bytes]]) -> bytes:
    """Encodes (field number, value) pairs as a protobuf message."""
    parts: list[bytes] = []
    for number, value in fields:
        if isinstance(value, int):
            parts.append(protobuf_varint(number << 3) + protobuf_varint(value))
        else:
            parts.append(protobuf_varint(number << 3 | 2) + protobuf_varint(len(value)) + value)
    return b"".join(parts)


def decode(message: bytes) -> dict[int, int | bytes]:
    """Decodes the varint and bytes fields of a protobuf message; of repeated fields, the last value.

    Raises:
        ProtocolError: (`malformed`) it is truncated, or has a field of another wire type.
    """
    position = 0

    def varint() -> int:
        nonlocal position
        number = 0
        for shift in range(0, 64, 7):
            if position >= len(message):
                break
            byte = message[position]
            position += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
        raise ProtocolError("malformed", "an unterminated varint")

    fields: dict[int, int | bytes] = {}
    while position < len(message):
        key = varint()
        if key & 7 == 0:
            fields[key >> 3] = varint()
        elif key & 7 == 2:
            size = varint()
            if size > len(message) - position:
                raise ProtocolError("malformed", "a truncated field")
            fields[key >> 3] = message[position : position + size]
            position += size
        else:
            raise ProtocolError("malformed", f"a protobuf field of wire type {key & 7}")
    return fields


async def _receive(reader: asyncio.StreamReader) -> dict[int, int | bytes]:
    size = 0
    for shift in (0, 7):  # two bytes hold any allowed length
        byte = (await reader.readexactly(1))[0]
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    if byte >= 0x80 or size > _MAX_MESSAGE_BYTES:
        raise ProtocolError("oversized", "the relay message is too long")
    return decode(await reader.readexactly(size))


async def _send(writer: asyncio.StreamWriter, fields: Sequence[tuple[int, int | bytes]]) -> None:
    message = encode(fields)
    writer.write(protobuf_varint(len(message)) + message)
    await writer.drain()


class _RefusedError(Exception):
    def __init__(self, status: Status) -> None:
        super().__init__(status.name)
        self.status = status


def is_circuit(maddr: str) -> bool:
    """Returns True if a connection to this remote address goes through a relay."""
    return CIRCUIT in maddr


class Relay:
    """Relays connections between peers. Refuses all until `admits` is set, and if `enabled` is False."""

    def __init__(self, daemon: Daemon, *, enabled: bool) -> None:
        self._daemon = daemon
        self._enabled = enabled
        # Returns True if a peer may be an end of a circuit through this one.
        self.admits: Callable[[str], bool] = lambda peer_id: False
        self.bytes_relayed = 0  # total so far, in both directions together
        self._ends: Counter[str] = Counter()  # of circuits, by peer
        self._asking: Counter[str] = Counter()  # streams on which a request is expected or under way, by peer
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Registers the handler, in place of p2pd's own relay."""
        await self._daemon.transport.serve_streams(HOP, self._serve)

    async def _serve(
        self, source: str, source_maddr: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        # A separate task: asyncio's, which calls this handler, logs an error if it is cancelled at the end.
        task = asyncio.create_task(self._pass_on(source, source_maddr, reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass_on(
        self, source: str, source_maddr: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        ends: Counter[str] = Counter()
        request = Counter((source,))
        self._asking += request
        try:
            async with asyncio.timeout(_SETUP_TIMEOUT_S):
                try:
                    target = await self._read_request(source, source_maddr, reader)
                    ends = Counter((source, target))
                    self._ends += ends
                    onward = await self._open(source, target)
                except _RefusedError as exc:
                    await _send(writer, [(1, _HOP_STATUS), (5, exc.status)])
                    # The source closes the stream: a daemon that closes one may drop what it has not forwarded yet.
                    while await reader.read(_MAX_MESSAGE_BYTES):
                        pass
                    return
            self._asking -= request
            request.clear()
            try:
                await _send(writer, [(1, _HOP_STATUS), (5, Status.OK)])
                await self._copy((reader, writer), onward)
            finally:
                onward[1].close()
        except STREAM_ERRORS:
            pass  # one end is gone, and so is the circuit
        finally:
            self._asking -= request
            self._ends -= ends
            writer.close()

    async def _read_request(self, source: str, source_maddr: str, reader: asyncio.StreamReader) -> str:
        """Returns the peer that `source` asks to be connected to, if that is allowed."""
        if self._asking[source] > MAX_CIRCUITS_PER_PEER:
            raise _RefusedError(Status.RESOURCE_LIMIT_EXCEEDED)
        try:
            request = await _receive(reader)
            peer = request.get(2)
            if request.get(1) != _HOP_CONNECT:  # reservations are not needed here
                raise _RefusedError(Status.RESERVATION_REFUSED)
            identifier = decode(peer).get(1) if isinstance(peer, bytes) else None
            if not isinstance(identifier, bytes):
                raise _RefusedError(Status.MALFORMED_MESSAGE)
            target: str = base58.b58encode(identifier).decode()
        except ProtocolError as exc:
            raise _RefusedError(Status.MALFORMED_MESSAGE) from exc
        # No circuits over circuits: they could form loops.
        if not self._enabled or is_circuit(source_maddr) or target == source:
            raise _RefusedError(Status.PERMISSION_DENIED)
        if not (self.admits(source) and self.admits(target)):
            raise _RefusedError(Status.PERMISSION_DENIED)
        if (
            self._ends.total() >= 2 * MAX_CIRCUITS
            or max(self._ends[source], self._ends[target]) >= MAX_CIRCUITS_PER_PEER
        ):
            raise _RefusedError(Status.RESOURCE_LIMIT_EXCEEDED)
        return target

    async def _open(self, source: str, target: str) -> _Stream:
        """Asks the other end to accept the circuit."""
        if all(is_circuit(maddr) for maddr in (await self._daemon.connections()).get(target, [])):
            raise _RefusedError(Status.CONNECTION_FAILED)
        try:
            reader, writer = await self._daemon.transport.open_stream(target, _STOP, _SETUP_TIMEOUT_S)
        except STREAM_ERRORS as exc:
            raise _RefusedError(Status.CONNECTION_FAILED) from exc
        try:
            await _send(writer, [(1, _STOP_CONNECT), (2, encode([(1, base58.b58decode(source))]))])
            answer = await _receive(reader)
            if answer.get(1) != _STOP_STATUS or answer.get(4) != Status.OK:
                raise _RefusedError(Status.CONNECTION_FAILED)
        except (ProtocolError, EOFError, OSError) as exc:
            writer.close()
            raise _RefusedError(Status.CONNECTION_FAILED) from exc
        except BaseException:
            writer.close()
            raise
        return reader, writer

    async def _copy(self, one: _Stream, other: _Stream) -> None:
        """Copies in both directions until one of them ends; half a circuit is useless."""

        async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(*STREAM_ERRORS):
                while data := await reader.read(_COPY_BYTES):
                    writer.write(data)
                    await writer.drain()
                    self.bytes_relayed += len(data)

        directions = [asyncio.create_task(copy(one[0], other[1])), asyncio.create_task(copy(other[0], one[1]))]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in directions:
                task.cancel()
