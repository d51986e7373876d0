"""The consensus reference: the weights that the whole swarm agreed on at the last commit.

One flat fp32 vector (see layout.py) with, for each block, the round of its last change and a BLAKE3 digest. A block is
hashed in chunks of 1 MiB: the block's digest is the hash of its chunks' digests, so a newcomer can verify every chunk
on its own as it arrives. The digest of the whole reference is the hash of all blocks' versions and digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


class Table(NamedTuple):
    """What is known of all blocks, in their order."""

    round: int
    versions: Sequence[int]
    chunk_digests: list[tuple[bytes, ...]]
    digests: list[bytes]


class Reference:
    """The reference of this peer: values in (shared) memory and their table.

    Values change in a commit, which ends with `finish`, or chunk by chunk in a download, which ends with `adopt`.
    Except in blocks that are `changing`, the digests always match the values, even in the middle of a download.

    Attributes:
        changing: the blocks that a commit is changing, in another thread.
    """

    def __init__(self, layout: Layout, values_N: FloatArray) -> None:
        self.layout = layout
        self.values_N = values_N
        self.changing: frozenset[int] = frozenset()
        chunk_digests = [self._hash(block) for block in layout.blocks]
        digests = [block_digest(chunks) for chunks in chunk_digests]
        self._table = Table(0, [0] * len(layout.blocks), chunk_digests, digests)

    def _hash(self, block: Block) -> tuple[bytes, ...]:
        return tuple(chunk_digest(self.values_N[c.start : c.start + c.size]) for c in chunks_of(block))

    @property
    def round(self) -> int:
        """Of the last commit."""
        return self._table.round

    @property
    def versions(self) -> tuple[int, ...]:
        """For each block, the round of its last change."""
        return tuple(self._table.versions)

    @property
    def digests(self) -> tuple[bytes, ...]:
        """For each block, its digest."""
        return tuple(self._table.digests)

    @property
    def digest(self) -> bytes:
        """Digest of the whole."""
        table = self._table
        return whole_digest(table.versions, table.digests)

    @property
    def table(self) -> ReferenceTable:
        """A snapshot of everything but the values."""
        table = self._table
        return ReferenceTable(table.round, tuple(table.versions), tuple(table.chunk_digests))

    def digest_of(self, chunk: Chunk) -> bytes:
        """Digest of one chunk."""
        return self._table.chunk_digests[chunk.block][chunk.index]

    def replace_chunk(self, chunk: Chunk, values_N: FloatArray, digest: bytes) -> None:
        """Replaces a chunk and its digest, which the caller has verified."""
        self.values_N[chunk.start : chunk.start + chunk.size] = values_N
        table = self._table
        digests = table.chunk_digests[chunk.block]
        table.chunk_digests[chunk.block] = (*digests[: chunk.index], digest, *digests[chunk.index + 1 :])
        table.digests[chunk.block] = block_digest(table.chunk_digests[chunk.block])

    def adopt(self, round_number: int, versions: Sequence[int]) -> None:
        """Ends a download: sets the round, and the versions that the values belong to."""
        self._table = self._table._replace(round=round_number, versions=list(versions))

    def rehashed(self, round_number: int, changed: Iterable[tuple[int, int]]) -> Table:
        """The table after a change to the values, given as (block, new version) pairs."""
        old = self._table
        versions, chunk_digests, digests = list(old.versions), list(old.chunk_digests), list(old.digests)
        for index, version in changed:
            chunk_digests[index] = self._hash(self.layout.blocks[index])
            digests[index] = block_digest(chunk_digests[index])
            versions[index] = version
        return Table(round_number, versions, chunk_digests, digests)

    def install(self, table: Table) -> None:
        """Ends a change to the values, of which this is the new table."""
        self._table = table
        self.changing = frozenset()

    def finish(self, round_number: int, changed: Iterable[tuple[int, int]]) -> None:
        """`install` of what is `rehashed`."""
        self.install(self.rehashed(round_number, changed))
