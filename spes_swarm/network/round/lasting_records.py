"""Keeps track records over restarts: read before a session's first round, written after commits."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from spes_swarm.protocol.rounds.track_record import TrackRecords
from spes_swarm.storage.track_record_file import TrackRecordFile, encode

_PERIOD_S = 30.0  # at least, between two times


class LastingRecords:
    """One peer's track records of a run and their file, if there is one."""

    def __init__(self, run_id: str, tracks: TrackRecords, path: Path | None) -> None:
        self._run_id = run_id
        self._tracks = tracks
        self._file = None if path is None else TrackRecordFile(path)
        self._is_recalled = False
        self._written_at = -_PERIOD_S  # monotonic time
        self._writing: asyncio.Task[None] | None = None

    async def recall(self, round_number: int) -> None:
        """Reads the file before the first round, whose number this is; later calls do nothing."""
        if self._is_recalled:
            return
        self._is_recalled = True
        if self._file is not None:
            memory = await asyncio.to_thread(self._file.read, self._run_id)
            if memory is not None:
                self._tracks.recall(memory, round_number)

    def save_soon(self) -> None:
        """Writes the file in the background, unless it was written just now."""
        is_writing = self._writing is not None and not self._writing.done()
        if not is_writing and time.monotonic() >= self._written_at + _PERIOD_S:
            self._writing = asyncio.create_task(self._save())

    async def close(self) -> None:
        """Writes the file for the last time."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        if self._is_recalled:  # otherwise, what it holds was not read
            await self._save()

    async def _save(self) -> None:
        if self._file is not None:
            self._written_at = time.monotonic()
            # What this thread encodes is not changed meanwhile.
            content = encode(self._run_id, self._tracks.memory)
            await asyncio.to_thread(self._file.write, content)
