"""`metrics.jsonl`: one JSON object per line, written as events happen."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path

from spes_swarm.base.errors import UserError, os_errors_as
from spes_swarm.base.wording import plural
from spes_swarm.metrics.events import Event, Fault


class Metrics:
    """Appends events to OUTPUT_DIR/metrics.jsonl; safe to use from several threads.

    Events are dropped while the disk is full, or fails otherwise; the file then has a `fault` that counts them.

    Attributes:
        report: called with a line for the user when events begin to be dropped (True), and when they no longer are.
    """

    def __init__(self, path: Path, peer_id: str) -> None:
        """Opens the file.

        Raises:
            UserError: it cannot be written.
        """
        self.report: Callable[[str, bool], None] = lambda line, dropping: None
        self._path = path
        self._peer_id = peer_id
        self._lock = threading.Lock()
        self._file: FileIO | None = None
        self._closed = False
        self._num_dropped = 0  # since the last event that was written
        self._problem = ""
        with os_errors_as(UserError, f"{path} cannot be written"):
            self._append("")

    def write(self, event: Event) -> None:
        """Writes one event. NaN and inf become null, so that any JSON parser can read the line."""
        with self._lock:
            if self._closed:
                return
            lines, before = self._line(event), self._num_dropped
            if before:
                detail = f"{self._problem}: {plural(before, 'event')} dropped"
                lines = self._line(Fault(kind="metrics", peer=self._peer_id, detail=detail)) + lines
            try:
                self._append(lines)
                self._num_dropped = 0
            except OSError as exc:
                self._close_file()
                self._problem = f"{self._path} cannot be written: {exc.strerror or exc}"
                self._num_dropped += 1
            now = self._num_dropped
        if now == 1:
            self.report(f"{self._problem}; training goes on, and events are dropped", True)
        elif before and not now:
            self.report(f"{self._path} is written again; {plural(before, 'event')} dropped", False)

    def _line(self, event: Event) -> str:
        record = {"event": event.event_name, "time": time.time(), "peer_id": self._peer_id, **event.to_dict()}
        line = json.dumps(record)
        if "NaN" in line or "Infinity" in line:  # in a number, or in a text
            line = json.dumps(json.loads(line, parse_constant=lambda _: None))
        return line + "\n"

    def _append(self, lines: str) -> None:
        """Opens the file if need be, on a new line if it ends in half of one, and appends whole lines or nothing."""
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
            if _ends_in_half_a_line(self._path):  # an earlier session was killed
                lines = "\n" + lines
        data, written = lines.encode(), 0
        try:
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError:
            with suppress(OSError):
                self._file.truncate(os.fstat(self._file.fileno()).st_size - written)
            raise

    def _close_file(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._file = None

    def close(self) -> None:
        """Closes the file; later events are dropped."""
        with self._lock:
            self._closed = True
            self._close_file()


def _ends_in_half_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
