"""The pseudo-random order in which a run goes through its data, and which peer trains on which piece of it.

An order is a permutation of 0 .. n-1 that is never stored. A Feistel network permutes the integers of 2h bits whatever
its round function; cycle walking restricts it to n of them (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
2002). Each element costs the same few operations, so an order of billions of windows needs no memory and a cursor into
it is one integer. It shuffles; it does not encrypt.

A piece belongs to one member, by rendezvous hash: if a member joins or leaves, only its pieces change owners (Thaler
and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998).
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

MAX_SIZE = 1 << 62
MAX_POSITION = (1 << 62) - 1  # in all epochs; progress records hold no larger number

_NUM_ROUNDS = 8  # 4 suffice for pseudo-randomness of wide halves (Luby and Rackoff); more help the narrow ones
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)  # the finaliser of splitmix64
_MIX_2 = np.uint64(0x94D049BB133111EB)


class Permutation:
    """A bijection of range(size), up to 2**62; equal keys and sizes give equal permutations on every machine."""

    def __init__(self, size: int, key: bytes) -> None:
        assert 1 <= size <= MAX_SIZE
        self.size = size
        self._half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half_bits)) - 1)
        digest = blake3(key).digest(length=8 * _NUM_ROUNDS)
        self._round_keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The elements at `positions`, both int64 (n,) and in range(size)."""
        values = self._feistel(positions.astype(np.uint64))
        # A value outside the range is replaced by the next one of its cycle, which leads back into the range, where it
        # began. The domain is at most four times the range, so this takes few iterations.
        while (outside := np.flatnonzero(values >= np.uint64(self.size))).size:
            values[outside] = self._feistel(values[outside])
        return values.astype(np.int64)

    def _feistel(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._half_bits, values & self._mask
        for key in self._round_keys:
            mixed = right + key  # wraps around, as do the products
            mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
            mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & self._mask)
        return (left << self._half_bits) | right


def owner_of(piece: bytes, members: Collection[str]) -> str:
    """Returns the member that trains on the piece with this unique name; all members are equally likely."""
    return min(members, key=lambda member: blake3(piece + member.encode()).digest())
