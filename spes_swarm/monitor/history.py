"""Writes what the monitor has seen to an SQLite file, which survives a restart and can be replayed after the run.

A file belongs to one run (format: history_file.py). It holds one row for each round (at most `ledger.MAX_POINTS`; older
rounds are thinned out), one for each peer ever seen, and the last state. Each refresh is one transaction in WAL mode,
so a killed monitor leaves a consistent file, and other processes can read it meanwhile.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from spes_swarm.base.errors import DataError, ManifestError
from spes_swarm.config.manifest import Manifest, open_manifest
from spes_swarm.monitor.aggregates import Known
from spes_swarm.monitor.history_file import (
    APPLICATION_ID,
    BUSY_TIMEOUT_S,
    COLUMNS,
    SCHEMA_VERSION,
    check_kind,
    check_version,
    missing_columns,
    read_meta,
    read_points,
    translate_sqlite_errors,
)
from spes_swarm.monitor.state import Excluded, Fault, HistoryPoint, SwarmState, WithoutDuty
from spes_swarm.storage.run_directory import lock_file

_TABLES: Final = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE rounds ({", ".join(COLUMNS.values())}, PRIMARY KEY (round));
CREATE TABLE peers (peer_id TEXT PRIMARY KEY, name TEXT NOT NULL, tokens INTEGER NOT NULL) WITHOUT ROWID;
"""


class History:
    """The history file of a running monitor, its only writer."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file.

        Raises:
            DataError: the file is not a history, has an unknown version, or cannot be written.
            UserError: another monitor writes to it.
        """
        self.path = path
        self._peers: dict[str, tuple[str, int]] = {}
        if path.exists() and (path.is_dir() or path.stat().st_size > 0):
            check_kind(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            os.close(descriptor)
        except OSError as exc:
            raise DataError(f"history {path}: {exc.strerror}") from exc
        # Released after SQLite has closed the file: closing any descriptor of it drops SQLite's POSIX locks.
        self._lock = lock_file(path, f"history {path}", "each monitor needs its own file")
        with translate_sqlite_errors(path):
            self._db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        with translate_sqlite_errors(self.path):
            if self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                self._db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
            check_version(self._db, self.path)
            if missing := missing_columns(self._db):
                added = "".join(f"ALTER TABLE rounds ADD COLUMN {COLUMNS[name]}; " for name in missing)
                self._db.executescript(f"BEGIN; {added} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
            self._db.execute("PRAGMA synchronous = NORMAL")

    def close(self) -> None:
        """Closes the file; all writes are committed already."""
        self._db.close()
        os.close(self._lock)

    # State for the next monitor.

    def manifest(self) -> Manifest | None:
        """The manifest of the file's run; None for a new file.

        Raises:
            DataError: the file is corrupt.
        """
        with translate_sqlite_errors(self.path):
            stored = read_meta(self._db, "manifest")
        if stored is None:
            return None
        try:
            wire = {key: bytes.fromhex(value) for key, value in stored.items()}
            return open_manifest(wire, source=str(self.path))
        except (ValueError, TypeError, AttributeError, ManifestError) as exc:
            raise DataError(f"history {self.path} is corrupt: {exc}") from exc

    def addresses(self) -> list[str]:
        """Addresses of peers that earlier monitors met."""
        with translate_sqlite_errors(self.path):
            stored = read_meta(self._db, "addresses")
        return [text for text in stored if isinstance(text, str)] if isinstance(stored, list) else []

    def known(self) -> Known:
        """What earlier monitors have recorded.

        Raises:
            DataError: the file is corrupt.
        """
        with translate_sqlite_errors(self.path):
            peers = self._db.execute("SELECT peer_id, name, tokens FROM peers").fetchall()
            rest = read_meta(self._db, "known") or {}
            self._peers = {peer_id: (name, tokens) for peer_id, name, tokens in peers}
            return Known(
                round=int(rest.get("round", 0)),
                alive_at=rest.get("alive_at"),
                points=tuple(read_points(self._db)),
                tokens={peer_id: tokens for peer_id, (_, tokens) in self._peers.items()},
                names={peer_id: name for peer_id, (name, _) in self._peers.items() if name},
                trained_in={int(expert): int(number) for expert, number in rest.get("trained_in", {}).items()},
                faults=tuple(Fault(**fault) for fault in rest.get("faults", ())),
                excluded=tuple(Excluded(**one) for one in rest.get("excluded", ())),
                without_duty=tuple(
                    WithoutDuty(**{**one, "kinds": tuple(one["kinds"])}) for one in rest.get("without_duty", ())
                ),
            )

    def begin(self, manifest: Manifest) -> None:
        """Binds the file to a run.

        Raises:
            DataError: the file belongs to another run.
        """
        stored = self.manifest()
        if stored is not None and stored.run_id != manifest.run_id:
            raise DataError(
                f"history {self.path} belongs to run {stored.run_id}, not {manifest.run_id}; choose another file"
            )
        with self._transaction():
            self._put("manifest", {key: value.hex() for key, value in manifest.to_wire().items()})

    def write(
        self,
        state: SwarmState,
        known: Known,
        points: Sequence[HistoryPoint],
        removed: Sequence[int],
        addresses: Sequence[str],
    ) -> None:
        """Writes what has changed; ignores `known.points`.

        Raises:
            DataError: the disk is full or fails otherwise; the file is unchanged.
        """
        peers = {peer_id: (known.names.get(peer_id, ""), tokens) for peer_id, tokens in known.tokens.items()}
        changed = [(peer_id, *peers[peer_id]) for peer_id in peers if self._peers.get(peer_id) != peers[peer_id]]
        with self._transaction():
            self._db.executemany(
                f"INSERT OR REPLACE INTO rounds ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})",
                [dataclasses.astuple(point) for point in points],
            )
            self._db.executemany("DELETE FROM rounds WHERE round = ?", [(number,) for number in removed])
            self._db.executemany("INSERT OR REPLACE INTO peers VALUES (?, ?, ?)", changed)
            self._db.executemany("DELETE FROM peers WHERE peer_id = ?", [(p,) for p in self._peers if p not in peers])
            if addresses:
                self._put("addresses", list(addresses))
            self._put("state", state.to_json())
            self._put(
                "known",
                {
                    "round": known.round,
                    "alive_at": known.alive_at,
                    "trained_in": known.trained_in,
                    **{
                        name: [dataclasses.asdict(one) for one in getattr(known, name)]
                        for name in ("faults", "excluded", "without_duty")
                    },
                },
            )
        self._peers = peers

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with translate_sqlite_errors(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                with suppress(sqlite3.OperationalError):  # on a full disk, SQLite has rolled back already
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _put(self, key: str, value: Any) -> None:
        data = zlib.compress(json.dumps(value, allow_nan=False).encode(), 1)
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, data))
