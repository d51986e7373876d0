"""The type of fp32 arrays, their sum of squares, and vectors of them in memory that two processes share.

That memory is an anonymous file, in memory (memfd) or on a disk: it leaves no name behind, and the kernel frees it when
its last user ends, however that happens. Pages that are never written take no memory. Those of a file on a disk need
not stay in memory either: the kernel writes them back when it is short of it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]


def sum_of_squares(values: FloatArray) -> float:
    """Adds up the squares in fp64; infinite if they overflow."""
    with np.errstate(over="ignore"):
        return float(np.sum(np.square(values, dtype=np.float64)))


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
