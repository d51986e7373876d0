"""A cache of the signed records that this process has verified.

The same bytes arrive many times: from each node that is queried, at each poll, and once more when the answer is read.
Only what follows from the bytes alone is cached: the signature, the schema, the writer. network/link/dht_records.py
checks each time what depends on the clock, or on the key and the expiration under which the bytes were found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from blake3 import blake3

Message = TypeVar("Message")


class VerifiedRecords(Generic[Message]):
    """An LRU cache, limited by the (estimated) memory of its messages."""

    def __init__(self, max_bytes: int, num_bytes: Callable[[Message], int]) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = num_bytes
        self._known: OrderedDict[bytes, tuple[str, Message, int]] = OrderedDict()
        self._held_bytes = 0

    def open(
        self, sealed: bytes, kind: str, run_id: str, verify: Callable[[], tuple[str, Message]]
    ) -> tuple[str, Message]:
        """Returns the writer and the message of a sealed record, from the cache if the same bytes were verified before.

        Raises:
            ProtocolError: from `verify`, which is called on a cache miss. A refused record is not cached.
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
