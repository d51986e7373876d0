"""The messages of a round and of a transfer, as sent on a stream; network/link/wire.py reads and writes them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

MAX_ERROR_BYTES = 1024


class FrameKind(IntEnum):
    """What a frame is for."""

    HELLO = 0  # opens a stream; the payload is a msgpack map
    DATA = 1  # values of one part or chunk
    KEEPALIVE = 2  # "I am alive and waiting for others"
    END = 3  # nothing more follows
    ERROR = 4  # the payload says why the stream ends


@dataclass(frozen=True, slots=True)
class Frame:
    """One message on a stream."""

    kind: FrameKind
    form: int = 0
    part: int = 0
    weight: float = 0.0
    extra: bytes = b""
    payload: bytes = b""

    def error_text(self) -> str:
        """The text of an ERROR frame, truncated for the log."""
        return self.payload[:MAX_ERROR_BYTES].decode(errors="replace")
