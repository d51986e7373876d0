"""The chunks of an unfinished download on disk, so that a newcomer that is killed does not start over.

The file is the flat vector with holes, and has no index. A chunk that is read back counts only if it has the digest
that the donors announce, so a damaged or outdated file costs nothing but the time to read it.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.consensus.codec import EXACT
from spes_swarm.protocol.consensus.reference import Chunk

_BYTES = EXACT.num_bytes(1)


class PartialReference:
    """Reads and writes chunks of one file; may be used from several threads.

    Disk errors never raise: the file only saves time, and is given up.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.error: str | None = None  # why the file was given up, None while it is in use
        self._lock = threading.RLock()
        self._fd: int | None = None
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as exc:
            self._give_up(exc)

    def read(self, chunk: Chunk) -> FloatArray | None:
        """Returns what the file has at a chunk's place, not verified; None if it is unusable."""
        with self._lock:
            if self._fd is None:
                return None
            try:
                data = os.pread(self._fd, _BYTES * chunk.size, _BYTES * chunk.start)
            except OSError as exc:
                self._give_up(exc)
                return None
        try:
            return EXACT.decode(data, chunk.size)
        except ProtocolError:  # too short, or not finite
            return None

    def write(self, chunk: Chunk, values_N: FloatArray) -> None:
        """Writes a verified chunk."""
        data = memoryview(EXACT.encode(values_N))
        offset = _BYTES * chunk.start
        with self._lock:
            if self._fd is None:
                return
            try:
                while data:
                    num_written = os.pwrite(self._fd, data, offset)
                    data, offset = data[num_written:], offset + num_written
            except OSError as exc:
                self._give_up(exc)
                self.remove()  # a full disk needs the space for more important files

    def _give_up(self, exc: OSError) -> None:
        self.error = exc.strerror or str(exc)
        self.close()

    def close(self) -> None:
        """Closes the file and keeps it for the next start."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def remove(self) -> None:
        """Removes the file: the download is complete, or the disk is full."""
        self.close()
        try:
            self._path.unlink(missing_ok=True)
        except OSError as exc:
            self.error = exc.strerror or str(exc)
