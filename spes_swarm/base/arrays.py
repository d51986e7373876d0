"""The type of fp32 arrays, and vectors of them in memory that two processes share.

That memory is an anonymous file (memfd): it leaves no name behind, and the kernel frees it when its last user ends,
however that happens. Pages that are never written take no memory.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class SharedVector:
    """A flat vector: `values_N` is a view of the shared memory; another process maps it through `fd`."""

    fd: int
    values_N: FloatArray

    @classmethod
    def create(cls, num_elements: int) -> SharedVector:
        """Allocates zeros.

        Raises:
            OSError: the kernel refused the file descriptor or the mapping.
        """
        fd = os.memfd_create("spes_swarm")
        os.ftruncate(fd, 4 * num_elements)
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
