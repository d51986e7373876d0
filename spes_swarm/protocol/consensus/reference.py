"""The consensus reference: the weights that the whole swarm agreed on at the last commit.

One flat fp32 vector (see layout.py) with, for each block, the round of its last change and a BLAKE3 digest. A block is
hashed in chunks of 1 MiB: the block's digest is the hash of its chunks' digests, so a newcomer can verify every chunk
on its own as it arrives. The digest of the whole reference is the hash of all blocks' versions and digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import ProtocolError
from spes_swarm.base.wording import plural
from spes_swarm.protocol.consensus.layout import Block, Layout

CHUNK_ELEMENTS = 1 << 18
DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one block, the unit of state transfer."""

    block: int
    index: int  # within the block
    start: int  # first element in the flat vector
    size: int


def chunks_of(block: Block) -> list[Chunk]:
    """The chunks of a block, in order; all but the last have CHUNK_ELEMENTS elements."""
    starts = range(block.start, block.stop, CHUNK_ELEMENTS)
    return [Chunk(block.index, i, start, min(CHUNK_ELEMENTS, block.stop - start)) for i, start in enumerate(starts)]


def chunk_digest(values_N: FloatArray) -> bytes:
    """BLAKE3 of the little-endian fp32 values."""
    return blake3(values_N.astype("<f4", copy=False).view(np.uint8).data).digest()


def block_digest(chunk_digests: Sequence[bytes]) -> bytes:
    """Digest of a block from those of its chunks."""
    return blake3(b"".join(chunk_digests)).digest()


def digest_of_values(block_N: FloatArray) -> bytes:
    """Digest of a block from its values."""
    starts = range(0, block_N.size, CHUNK_ELEMENTS)
    return block_digest([chunk_digest(block_N[start : start + CHUNK_ELEMENTS]) for start in starts])


def whole_digest(versions: Sequence[int], digests: Sequence[bytes]) -> bytes:
    """Digest of the whole reference."""
    hasher = blake3()
    for version, digest in zip(versions, digests, strict=True):
        hasher.update(version.to_bytes(8, "little") + digest)
    return hasher.digest()


@dataclass(frozen=True)
class ReferenceTable:
    """A reference without its values: its round, and the version and digests of each block."""

    round: int
    versions: tuple[int, ...]
    chunk_digests: tuple[tuple[bytes, ...], ...]

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Digest of each block."""
        return tuple(block_digest(chunks) for chunks in self.chunk_digests)

    @property
    def digest(self) -> bytes:
        """Digest of the whole."""
        return whole_digest(self.versions, self.digests)

    def check_shape(self, layout: Layout) -> None:
        """Checks that a table received from a peer describes this layout.

        Raises:
            ProtocolError: (`shape`) it does not.
        """
        if len(self.versions) != len(layout.blocks) or len(self.chunk_digests) != len(layout.blocks):
            raise ProtocolError("shape", f"a reference table of {plural(len(self.versions), 'block')}")
        for block, digests in zip(layout.blocks, self.chunk_digests, strict=True):
            if len(digests) != -(-block.size // CHUNK_ELEMENTS):
                raise ProtocolError("shape", f"{plural(len(digests), 'chunk')} for {block.name}")


class Reference:
    """The reference of this peer: values in (shared) memory and their table.

    Values change in a commit, which ends with `finish`, or chunk by chunk in a download, which ends with `adopt`.
    Outside a commit the digests always match the values, even in the middle of a download.
    """

    def __init__(self, layout: Layout, values_N: FloatArray) -> None:
        self.layout = layout
        self.values_N = values_N
        self.round = 0
        self._versions = [0] * len(layout.blocks)
        self._chunk_digests = [self._hash(block) for block in layout.blocks]
        self._digests = [block_digest(chunks) for chunks in self._chunk_digests]

    def _hash(self, block: Block) -> tuple[bytes, ...]:
        return tuple(chunk_digest(self.values_N[c.start : c.start + c.size]) for c in chunks_of(block))

    @property
    def versions(self) -> tuple[int, ...]:
        """For each block, the round of its last change."""
        return tuple(self._versions)

    @property
    def digests(self) -> tuple[bytes, ...]:
        """For each block, its digest."""
        return tuple(self._digests)

    @property
    def digest(self) -> bytes:
        """Digest of the whole."""
        return whole_digest(self._versions, self._digests)

    @property
    def table(self) -> ReferenceTable:
        """A snapshot of everything but the values."""
        return ReferenceTable(self.round, tuple(self._versions), tuple(self._chunk_digests))

    def digest_of(self, chunk: Chunk) -> bytes:
        """Digest of one chunk."""
        return self._chunk_digests[chunk.block][chunk.index]

    def replace_chunk(self, chunk: Chunk, values_N: FloatArray, digest: bytes) -> None:
        """Replaces a chunk and its digest, which the caller has verified."""
        self.values_N[chunk.start : chunk.start + chunk.size] = values_N
        digests = self._chunk_digests[chunk.block]
        self._chunk_digests[chunk.block] = (*digests[: chunk.index], digest, *digests[chunk.index + 1 :])
        self._digests[chunk.block] = block_digest(self._chunk_digests[chunk.block])

    def adopt(self, round_number: int, versions: Sequence[int]) -> None:
        """Ends a download: sets the round, and the versions that the values belong to."""
        self._versions = list(versions)
        self.round = round_number

    def finish(self, round_number: int, changed: Iterable[tuple[int, int]]) -> None:
        """Ends a change to the values: rehashes the `changed` (block, new version) pairs and sets the round."""
        for index, version in changed:
            self._chunk_digests[index] = self._hash(self.layout.blocks[index])
            self._digests[index] = block_digest(self._chunk_digests[index])
            self._versions[index] = version
        self.round = round_number
