"""`metrics.jsonl`: one JSON object per line, written as events happen."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from spes_swarm.base.errors import UserError, os_errors_as


class Metrics:
    """Appends events to OUTPUT_DIR/metrics.jsonl, line-buffered; safe to use from several threads."""

    def __init__(self, path: Path, peer_id: str) -> None:
        """Opens the file.

        Raises:
            UserError: it cannot be written.
        """
        self._path = path
        self._peer_id = peer_id
        self._lock = threading.Lock()
        with os_errors_as(UserError, f"{path} cannot be written"):
            self._file: TextIO = path.open("a", buffering=1, encoding="utf-8")
            if _ends_in_half_a_line(path):  # an earlier session was killed, or its disk was full
                self._file.write("\n")

    def write(self, event: str, **fields: Any) -> None:
        """Writes one event. NaN and inf become null, so that any JSON parser can read the line.

        Raises:
            UserError: the disk is full, or fails otherwise.
        """
        record = {"event": event, "time": time.time(), "peer_id": self._peer_id, **fields}
        try:
            line = json.dumps(record, allow_nan=False)
        except ValueError:
            line = json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False)
        with self._lock, os_errors_as(UserError, f"{self._path} cannot be written"):
            if not self._file.closed:
                self._file.write(line + "\n")

    def close(self) -> None:
        """Closes the file. Lines that a full disk has refused are lost; `write` has raised for them."""
        with self._lock, suppress(OSError):
            self._file.close()


def _ends_in_half_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not (-1e308 < value < 1e308) else value
