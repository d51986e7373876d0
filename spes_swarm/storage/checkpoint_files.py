"""The files of a checkpoint: safetensors, written and verified in pieces, so that nothing is held in memory twice.

The reference is cut into files of whole blocks. Such a file never changes: its content follows from the digests of its
blocks, so a later checkpoint in which these are the same gets it as a hard link instead of a copy.

Shape: N elements of the flat vector.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from blake3 import blake3
from safetensors import safe_open

from spes_swarm.base.arrays import FloatArray
from spes_swarm.protocol.consensus.layout import Block, Layout
from spes_swarm.protocol.consensus.reference import block_digest, chunk_digest, chunks_of

Array = np.ndarray[Any, np.dtype[Any]]

_MAX_REFERENCE_FILES = 256  # a reader maps all of them, and each takes a file descriptor
_PIECE_BYTES = 8 << 20
_LENGTH_BYTES = 8
_DTYPE_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}


@dataclass(frozen=True)
class ReferenceFile:
    """One file of the reference: some blocks, one tensor for each."""

    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        """File name, which has the index of the first block."""
        return f"reference-{self.blocks[0].index:05d}.safetensors"

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self._header()) + sum(4 * block.size for block in self.blocks)

    def _header(self) -> bytes:
        return _header({block.name: ("F32", (block.size,), 4 * block.size) for block in self.blocks})

    def write(self, directory: Path, reference_N: FloatArray, digests: Sequence[bytes]) -> bool:
        """Writes the file. Returns False if a block does not have its digest: it has changed meanwhile.

        Raises:
            OSError: the file cannot be written.
        """
        with (directory / self.name).open("wb") as file:
            file.write(self._header())
            for block in self.blocks:
                found: list[bytes] = []
                for chunk in chunks_of(block):
                    # What is hashed is what is written, whatever another process does to the reference.
                    chunk_N = reference_N[chunk.start : chunk.start + chunk.size].astype("<f4", copy=True)
                    found.append(chunk_digest(chunk_N))
                    file.write(_bytes_of(chunk_N))
                if block_digest(found) != digests[block.index]:
                    return False
        return True

    def is_intact(self, directory: Path, digests: Sequence[bytes]) -> bool:
        """Returns True if the file holds exactly these blocks, with these digests.

        Raises:
            OSError: the file cannot be read.
        """
        header = self._header()
        with (directory / self.name).open("rb") as file:
            if file.read(len(header)) != header:
                return False
            for block in self.blocks:
                found = [blake3(file.read(4 * chunk.size)).digest() for chunk in chunks_of(block)]
                if block_digest(found) != digests[block.index]:
                    return False
            return not file.read(1)


def reference_files(layout: Layout) -> list[ReferenceFile]:
    """The files of a reference in order: one for each block, or for some neighbours if there are very many."""
    each = -(-len(layout.blocks) // _MAX_REFERENCE_FILES)
    return [ReferenceFile(layout.blocks[i : i + each]) for i in range(0, len(layout.blocks), each)]


def write_tensors(path: Path, tensors: MutableMapping[str, Array]) -> str:
    """Writes a safetensors file; returns its BLAKE3 digest in hex.

    Each tensor is removed from `tensors` once it is written: the page cache holds it from then on.

    Raises:
        OSError: the file cannot be written.
    """
    # The widest items first, so that all tensors are aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header = _header({n: (_DTYPE_NAMES[tensors[n].dtype.name], tensors[n].shape, tensors[n].nbytes) for n in order})
    hasher = blake3(header)
    with path.open("wb") as file:
        file.write(header)
        for name in order:
            _write_pieces(_bytes_of(tensors.pop(name)), file, hasher.update)
    return hasher.hexdigest()


def file_digest(path: Path) -> str:
    """BLAKE3 of a file in hex.

    Raises:
        OSError: the file cannot be read.
    """
    hasher = blake3()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            hasher.update(piece)
    return hasher.hexdigest()


def read_blocks(path: Path, blocks: Sequence[Block], out_N: FloatArray) -> set[int]:
    """Copies those of the blocks that a file has to their places in a flat vector; returns their indices.

    Memory: one block.

    Raises:
        OSError, SafetensorError: the file cannot be read.
    """
    read: set[int] = set()
    with safe_open(path, framework="numpy") as file:
        names = set(file.keys())
        for block in blocks:
            if block.name in names:
                out_N[block.start : block.stop] = file.get_tensor(block.name)
                read.add(block.index)
    return read


def _header(tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> bytes:
    """The start of a safetensors file of (dtype, shape, bytes) entries, up to the first tensor.

    Source: https://github.com/huggingface/safetensors#format
    """
    entries: dict[str, Any] = {}
    begin = 0
    for name, (dtype, shape, num_bytes) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + num_bytes]}
        begin += num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _bytes_of(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _write_pieces(content: memoryview, file: BinaryIO, update: Callable[[memoryview], object]) -> None:
    for start in range(0, len(content), _PIECE_BYTES):
        piece = content[start : start + _PIECE_BYTES]
        update(piece)
        file.write(piece)
