"""A signed result: what a reducer vouches for, and its encoding in messages.

The contributors' signed roots come with it, so whoever has the result can later ask each of them for its contribution.
On a stream each root is sent once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.averaging.commitments import (
    CONTRIBUTION,
    DIGEST_BYTES,
    RESULT,
    SIGNATURE_BYTES,
    STEP_BYTES,
    Commitment,
    Opening,
    digest,
    leaf_of,
)
from spes_swarm.protocol.bitmap import bitmap, members_of, num_bitmap_bytes

MAX_COMMITMENTS = 1 << 20  # on one stream
_INDEX = np.dtype("<u4")
_HEAD = struct.Struct(f"<I{3 * DIGEST_BYTES}s")


def contribution_leaf(part: int, payload: bytes) -> bytes:
    """The leaf that a contributor signs. Its weight follows from the plan, as does the form of its values."""
    return leaf_of(CONTRIBUTION, part, digest(payload))


@dataclass(frozen=True, slots=True)
class Head:
    """What a reducer signs of a result."""

    part: int
    recipe: bytes  # digest
    payload: bytes  # digest
    contributions: bytes  # digest of the contributors' signed roots, in the order of the recipe's shares

    SIZE = _HEAD.size

    @property
    def wire(self) -> bytes:
        """Its encoding, of SIZE bytes."""
        return _HEAD.pack(self.part, self.recipe + self.payload + self.contributions)

    @classmethod
    def from_wire(cls, data: bytes) -> Self:
        """The inverse of `wire`, for SIZE bytes."""
        part, digests = _HEAD.unpack(data)
        return cls(part, *(digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES)))

    @property
    def leaf(self) -> bytes:
        """The leaf that is signed."""
        return leaf_of(RESULT, self.part, self.wire)


@dataclass(frozen=True, slots=True)
class SignedResult:
    """A result's head and signature, with the roots of the contributions that it includes."""

    head: Head
    opening: Opening
    commitments: tuple[Commitment, ...]  # in the order of the members


def head_of(part: int, recipe: bytes, payload: bytes, commitments: Sequence[Commitment]) -> Head:
    """The head of a result. `recipe` is a digest, `payload` the encoded result."""
    return Head(part, recipe, digest(payload), digest(*(commitment.wire for commitment in commitments)))


def encode(included: frozenset[int], num_members: int, signed: SignedResult, sent: dict[Commitment, int]) -> bytes:
    """What goes along with a result; `sent`: the roots that this stream has carried, to which new ones are added."""
    new = [commitment for commitment in dict.fromkeys(signed.commitments) if commitment not in sent]
    for commitment in new:
        sent[commitment] = len(sent)
    opening = signed.opening.wire
    references = np.array([sent[commitment] for commitment in signed.commitments], dtype=_INDEX)
    first = bitmap(included, num_members), bytes([len(signed.opening.path)]), opening, references.tobytes()
    return b"".join((*first, *(commitment.wire for commitment in new)))


def decode(
    data: bytes, num_members: int, known: list[Commitment]
) -> tuple[frozenset[int], Opening, tuple[Commitment, ...]]:
    """The inverse of `encode`; `known`: the roots that the stream has carried, to which new ones are added.

    Raises:
        ProtocolError: (`malformed`) it is not what goes along with a result; (`oversized`) too many roots.
    """
    begin = num_bitmap_bytes(num_members)
    included = frozenset(members_of(data[:begin], num_members))
    path = data[begin] if len(data) > begin else 0
    end = begin + 1 + SIGNATURE_BYTES + path * STEP_BYTES
    after = end + _INDEX.itemsize * len(included)
    rest = data[after:]
    if len(data) < after or len(rest) % Commitment.SIZE:
        raise ProtocolError("malformed", "what goes along with a result has a wrong length")
    opening = Opening.from_wire(data[begin + 1 : end])
    new = [Commitment.from_wire(rest[i : i + Commitment.SIZE]) for i in range(0, len(rest), Commitment.SIZE)]
    if len(new) > len(included):
        raise ProtocolError("malformed", "a result with more signed roots than contributions")
    if len(known) + len(new) > MAX_COMMITMENTS:
        raise ProtocolError("oversized", f"more than {MAX_COMMITMENTS} signed roots on a stream")
    references = np.frombuffer(data[end:after], dtype=_INDEX).tolist()
    if any(reference >= len(known) + len(new) for reference in references):
        raise ProtocolError("malformed", "a result refers to a signed root that was not sent")
    known += new
    return included, opening, tuple(known[reference] for reference in references)
