"""`metrics.jsonl`: one JSON object a line, written as things happen."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any, TextIO


class Metrics:
    """Appends events to OUTPUT_DIR/metrics.jsonl, line-buffered; safe to use from several threads."""

    def __init__(self, path: Path, peer_id: str) -> None:
        self._peer_id = peer_id
        self._lock = threading.Lock()
        self._file: TextIO = path.open("a", buffering=1, encoding="utf-8")

    def write(self, event: str, **fields: Any) -> None:
        """Writes one event. Values that JSON cannot hold (NaN) become null, so that every reader can parse a line."""
        record = {"event": event, "time": time.time(), "peer_id": self._peer_id, **fields}
        try:
            line = json.dumps(record, allow_nan=False)
        except ValueError:
            line = json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False)
        with self._lock:
            if not self._file.closed:
                self._file.write(line + "\n")

    def close(self) -> None:
        """Ends the file."""
        with self._lock:
            self._file.close()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not (-1e308 < value < 1e308) else value
