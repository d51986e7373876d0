"""The file of a run's acts in OUTPUT_DIR: one per line, in base64.

The peer's network process and the `invite` command both append to it and read what the other has added.
"""

from __future__ import annotations

import base64
import binascii
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_MAX_BYTES = 64 << 20  # several times what a run may have


@dataclass
class ActsFile:
    """Reads and appends acts, which the caller verifies."""

    path: Path
    _position: int = field(default=0, init=False)

    def read_new(self) -> list[bytes]:
        """Returns the acts that were appended since the last call, at the first call all; damaged lines are left out.

        Raises:
            OSError: the file exists but cannot be read.
        """
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return []
        if size <= self._position:
            return []
        with self.path.open("rb") as file:
            file.seek(self._position)
            data = file.read(_MAX_BYTES)
        complete = data[: data.rfind(b"\n") + 1]
        self._position += len(complete)
        acts = []
        for line in filter(None, complete.split(b"\n")):
            with suppress(binascii.Error):
                acts.append(base64.b64decode(line, validate=True))
        return acts

    def append(self, *acts: bytes) -> None:
        """Appends acts, durably.

        Raises:
            OSError: it cannot be written.
        """
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            # A line that a crash has cut off must not spoil this one.
            os.write(descriptor, b"\n".join((b"", *map(base64.b64encode, acts), b"")))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
