"""Chunks of the reference on a stream: requests one way, pieces of chunks the other.

A request names chunks with the digests that are wanted. The donor answers requests in their order. A chunk is sent in
pieces of 64 KiB, so that the rate limit and the stall timeout work on slow connections as well. A single empty piece
means that the donor does not have that digest, or no longer has it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgpack
import numpy as np

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.wire import read_hello
from spes_swarm.protocol.consensus.codec import EXACT
from spes_swarm.protocol.consensus.reference import DIGEST_BYTES, Chunk, chunk_digest
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.protocol.version import with_version

PIECE_BYTES = 1 << 16
MAX_REQUEST_BYTES = 4096


def request_frame(wanted: Mapping[int, bytes]) -> Frame:
    """Makes a request for chunks, given as number -> digest."""
    numbers = np.array(list(wanted), dtype="<u4").tobytes()
    fields = with_version({"chunks": numbers, "digests": b"".join(wanted.values())})
    return Frame(FrameKind.HELLO, payload=msgpack.packb(fields, use_bin_type=True))


def read_request(frame: Frame, num_chunks: int) -> list[tuple[int, bytes]]:
    """Checks a request; returns pairs of number and digest.

    Raises:
        ProtocolError: (`malformed`) it is not a request, (`part`) there is no such chunk; (`version`) it has another
            major version.
    """
    fields = read_hello(frame, MAX_REQUEST_BYTES)
    listed, digests = fields.get("chunks"), fields.get("digests", b"")
    if not (isinstance(listed, bytes) and isinstance(digests, bytes)) or len(listed) % 4:
        raise ProtocolError("malformed", "a request lists its chunks as 32-bit numbers")
    numbers = np.frombuffer(listed, dtype="<u4").tolist()
    for number in numbers:
        if number >= num_chunks:
            raise ProtocolError("part", f"there is no chunk {number}")
    if len(digests) != DIGEST_BYTES * len(numbers):
        raise ProtocolError("malformed", "a request has one digest for each chunk")
    return [(n, digests[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)]) for i, n in enumerate(numbers)]


def piece_frames(number: int, payload: bytes | None, round_number: int) -> Iterator[Frame]:
    """Yields the answer for one chunk: all pieces, or an empty one for None; the extra bytes are the donor's round."""
    extra = round_number.to_bytes(8, "little")
    if payload is None:
        yield Frame(FrameKind.DATA, part=number, extra=extra)
        return
    for start in range(0, len(payload), PIECE_BYTES):
        yield Frame(FrameKind.DATA, part=number, extra=extra, payload=payload[start : start + PIECE_BYTES])


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of the request for one chunk."""

    number: int
    values_N: FloatArray | None  # verified; None: the donor does not have that digest, or no longer has it


class ChunkAssembler:
    """Assembles the pieces of one stream into chunks. What was requested bounds all that a donor may send."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._asked: deque[tuple[int, bytes]] = deque()
        self._buffer = bytearray()

    @property
    def num_asked(self) -> int:
        """Requested chunks that have not been answered yet."""
        return len(self._asked)

    def ask(self, number: int, digest: bytes) -> Frame:
        """Records the request for a chunk and returns its frame."""
        self._asked.append((number, digest))
        return request_frame({number: digest})

    def take(self, frame: Frame) -> Answer | None:
        """Adds a piece; returns the answer that it completes, if any.

        Raises:
            ProtocolError: (`part`) the piece was not requested, (`shape`) it has the wrong length, (`digest`,
                `nonfinite`) the chunk is not what its donor has announced. The stream is unusable.
        """
        if not self._asked or frame.part != self._asked[0][0]:
            raise ProtocolError("part", f"chunk {frame.part} is not the one requested next")
        number, digest = self._asked[0]
        if not frame.payload and not self._buffer:
            self._asked.popleft()
            return Answer(number, None)
        num_bytes = EXACT.num_bytes(self._chunks[number].size)
        if len(frame.payload) != min(PIECE_BYTES, num_bytes - len(self._buffer)):
            raise ProtocolError("shape", f"a piece of chunk {number} has {len(frame.payload)} bytes")
        self._buffer += frame.payload
        if len(self._buffer) < num_bytes:
            return None
        values_N = EXACT.decode(bytes(self._buffer), self._chunks[number].size)
        if chunk_digest(values_N) != digest:
            raise ProtocolError("digest", f"chunk {number} does not match its digest")
        self._asked.popleft()
        self._buffer.clear()
        return Answer(number, values_N)
