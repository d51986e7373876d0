"""Remembers which signed records this process has verified.

The same bytes come again and again: from each node that is asked, at each look, and once more when the answer is read.
Only what follows from the bytes alone is remembered: the signature, the schema, the writer. Whatever depends on the
clock, or on the key and the expiration under which the bytes were found, is checked each time by who asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from blake3 import blake3

Message = TypeVar("Message")


class VerifiedRecords(Generic[Message]):
    """The least recently used go first, by the memory that they take.

    Args:
        max_bytes: of all messages together.
        num_bytes: estimates what a decoded message takes.
    """

    def __init__(self, max_bytes: int, num_bytes: Callable[[Message], int]) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = num_bytes
        self._known: OrderedDict[bytes, tuple[str, Message, int]] = OrderedDict()
        self._held_bytes = 0

    def open(
        self, sealed: bytes, kind: str, run_id: str, verify: Callable[[], tuple[str, Message]]
    ) -> tuple[str, Message]:
        """The writer and the message of a sealed record: remembered if these very bytes were verified before.

        Raises:
            ProtocolError: what `verify` raises, which is called otherwise. Nothing is remembered of what was refused.
        """
        # Neither a kind nor a run id contains a zero byte.
        key = blake3(b"\0".join((kind.encode(), run_id.encode(), sealed))).digest()
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known[0], known[1]
        writer, message = verify()
        size = self._num_bytes(message)
        self._known[key] = writer, message, size
        self._held_bytes += size
        while self._held_bytes > self._max_bytes:
            self._held_bytes -= self._known.popitem(last=False)[1][2]
        return writer, message
