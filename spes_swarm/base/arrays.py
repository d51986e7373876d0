"""The type of fp32 arrays, their sum of squares, scratch memory, and vectors in memory that two processes share.

That memory is an anonymous file, in memory (memfd) or on a disk: it leaves no name behind, and the kernel frees it when
its last user ends, however that happens. Pages that are never written take no memory. Those of a file on a disk need
not stay in memory either: the kernel writes them back when it is short of it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
_PIECE = 1 << 16  # elements


class _Scratch(threading.local):
    """The arrays of one thread."""

    def __init__(self) -> None:
        self.arrays: dict[str, NDArray[Any]] = {}


_SCRATCH = _Scratch()


def scratch(use: str, num_elements: int, dtype: npt.DTypeLike = np.float32) -> NDArray[Any]:
    """Returns an uninitialised array, until this thread asks for the same use again.

    Allocating new memory for a part takes as long as computing the part, because the kernel clears the pages first.
    """
    found = _SCRATCH.arrays.get(use)
    if found is None or len(found) < num_elements:
        found = _SCRATCH.arrays[use] = np.empty(num_elements, dtype)
    assert found.dtype == dtype
    return found[:num_elements]


def pieces(num_elements: int) -> Iterator[slice]:
    """Divides a long array into pieces, so short that what is computed of one stays in the cache of a core."""
    return (slice(start, min(start + _PIECE, num_elements)) for start in range(0, num_elements, _PIECE))


def sum_of_squares(values: FloatArray) -> float:
    """Adds up the squares in fp64; infinite if they overflow."""
    values_N, total = values.reshape(-1), 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for where in pieces(len(values_N)):
            piece_N = values_N[where]
            exact_N = scratch("sum of squares", len(piece_N), np.float64)
            exact_N[:] = piece_N
            total += float(np.einsum("n,n->", exact_N, exact_N))
    return total


@dataclass(frozen=True)
class SharedVector:
    """A flat vector: `values_N` is a view of the shared memory; another process maps it through `fd`."""

    fd: int
    values_N: FloatArray

    @classmethod
    def create(cls, num_elements: int, directory: Path | None = None) -> SharedVector:
        """Allocates zeros, in memory or on the disk of a directory.

        Raises:
            OSError: the kernel refused the file descriptor or the mapping, or the disk has too little space.
        """
        if directory is None:
            fd = os.memfd_create("spes_swarm")
            os.ftruncate(fd, 4 * num_elements)
        else:
            with tempfile.TemporaryFile(dir=directory) as file:
                fd = os.dup(file.fileno())
            # The space is taken now: writing to a mapped page that the disk has no room for kills the process.
            os.posix_fallocate(fd, 0, 4 * num_elements)
        return cls.attach(fd, num_elements)

    @classmethod
    def attach(cls, fd: int, num_elements: int) -> SharedVector:
        """Maps the memory behind a descriptor that another process created and sent."""
        memory = mmap.mmap(fd, 4 * num_elements)
        return cls(fd=fd, values_N=np.frombuffer(memory, dtype=np.float32))

    def close(self) -> None:
        """Closes the descriptor; the mapping lives as long as `values_N`."""
        os.close(self.fd)


def attach_from(pid: int, fd: int, num_elements: int) -> FloatArray:
    """Maps memory that another process created after this one was forked, by opening its descriptor through /proc."""
    vector = SharedVector.attach(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR), num_elements)
    vector.close()
    return vector.values_N
