"""Sets of small numbers as bitmaps."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from spes_swarm.base.errors import ProtocolError


def num_bitmap_bytes(size: int) -> int:
    """Returns the length in bytes of a bitmap for numbers below `size`."""
    return -(-size // 8)


def bitmap(numbers: Iterable[int], size: int) -> bytes:
    """Returns the bitmap of a set of numbers below `size`."""
    bits = np.zeros(size, dtype=np.uint8)
    bits[list(numbers)] = 1
    return np.packbits(bits).tobytes()


def members_of(data: bytes, size: int) -> list[int]:
    """Inverse of `bitmap`; returns the numbers in ascending order.

    Raises:
        ProtocolError: (`malformed`) `data` has the wrong length.
    """
    if len(data) != num_bitmap_bytes(size):
        raise ProtocolError("malformed", "a bitmap of the wrong length")
    return [int(i) for i in np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8))[:size])]
