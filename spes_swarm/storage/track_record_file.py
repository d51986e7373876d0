"""The file in OUTPUT_DIR in which a peer remembers the others over restarts: JSON, for this peer alone."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from spes_swarm.base.decoding import first_complaint
from spes_swarm.base.user_paths import replace_file
from spes_swarm.protocol.rounds.track_record import Memory

_LOGGER = logging.getLogger(__name__)
_MAX_BYTES = 64 << 20  # 4,096 peers of whose work nothing is missing take 4 MiB


@dataclass(frozen=True, slots=True)
class _Content:
    __pydantic_config__ = ConfigDict(ser_json_bytes="hex", val_json_bytes="hex", ser_json_inf_nan="constants")
    run_id: str
    memory: Memory


_CONTENT = TypeAdapter(_Content)


def encode(run_id: str, memory: Memory) -> bytes:
    """The content of the file."""
    return _CONTENT.dump_json(_Content(run_id, memory))


@dataclass(frozen=True)
class TrackRecordFile:
    """Reads and writes the file. A peer can do without: what goes wrong is logged."""

    path: Path

    def read(self, run_id: str) -> Memory | None:
        """What is remembered about a run; None if nothing is."""
        try:
            with self.path.open("rb") as file:
                content = _CONTENT.validate_json(file.read(_MAX_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as exc:
            why = first_complaint(exc) if isinstance(exc, ValidationError) else exc
            _LOGGER.warning(
                "%s cannot be read, so this peer has forgotten how reliable the others are: %s", self.path, why
            )
            return None
        return content.memory if content.run_id == run_id else None

    def write(self, content: bytes) -> bool:
        """Replaces it; returns False if it could not be written."""
        try:
            if len(content) > _MAX_BYTES:
                raise OSError(f"{len(content)} bytes are too many")
            replace_file(self.path, content, mode=0o600)
        except OSError as exc:
            _LOGGER.warning(
                "%s cannot be written, so a restart forgets how reliable other peers are: %s", self.path, exc
            )
            return False
        return True
