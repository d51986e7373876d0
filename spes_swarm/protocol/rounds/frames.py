"""The messages of a round and of a transfer, as they travel on a stream; wire.py moves them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

MAX_ERROR_BYTES = 1024


class FrameKind(IntEnum):
    """What a frame is for."""

    HELLO = 0  # opens a stream; the payload is a msgpack map
    DATA = 1  # values of one part or chunk
    KEEPALIVE = 2  # "I am alive and waiting for others"
    END = 3  # nothing more will come
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
        """What an ERROR frame says, cut to a length that can be logged."""
        return self.payload[:MAX_ERROR_BYTES].decode(errors="replace")
