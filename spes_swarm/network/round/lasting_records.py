"""Keeps track records over restarts: read before a session's first round, written after commits."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from spes_swarm.protocol.rounds.track_record import RECENT_ROUNDS, TrackRecords
from spes_swarm.storage.track_record_file import TrackRecordFile, encode

# The file is rewritten after a commit once it is this old: what happened in the last rounds counts most.
_MAX_AGE_S, _MAX_AGE_COMMITS = 30.0, RECENT_ROUNDS // 2


class LastingRecords:
    """One peer's track records of a run and their file, if there is one."""

    def __init__(self, run_id: str, tracks: TrackRecords, path: Path | None) -> None:
        self._run_id = run_id
        self._tracks = tracks
        self._file = None if path is None else TrackRecordFile(path)
        self._is_recalled = False
        self._written_at = -_MAX_AGE_S  # monotonic time
        self._unwritten = 0  # commits
        self._writing: asyncio.Task[None] | None = None

    async def recall(self, round_number: int) -> None:
        """Reads the file before the first round. Rounds up to the first commit of this session begin with it."""
        if self._file is not None and not self._is_recalled:
            memory = await asyncio.to_thread(self._file.read, self._run_id)
            self._is_recalled = True
            if memory is not None:
                self._tracks.recall(memory)
        self._tracks.resume_at(round_number)

    def committed(self) -> None:
        """Notes a commit, and writes the file in the background if it is too old."""
        self._unwritten += 1
        is_old = time.monotonic() - self._written_at >= _MAX_AGE_S or self._unwritten >= _MAX_AGE_COMMITS
        if is_old and (self._writing is None or self._writing.done()):
            self._writing = asyncio.create_task(self._write())

    async def close(self) -> None:
        """Writes the file for the last time, unless nothing was committed since."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        if self._unwritten:
            await self._write()

    async def _write(self) -> None:
        self._written_at, written = time.monotonic(), self._unwritten
        self._unwritten = 0
        if self._file is not None:
            # Encoded in the event loop, so that no round changes the records meanwhile.
            content = encode(self._run_id, self._tracks.memory)
            if not await asyncio.to_thread(self._file.write, content):
                self._unwritten += written
