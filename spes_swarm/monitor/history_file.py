"""The SQLite file of the monitor's history: its format, and how to read a finished run from it.

Separate from the writer (history.py), so that a replay does not import the network packages.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any, Final, get_args, get_type_hints

from spes_swarm.base.errors import DataError
from spes_swarm.monitor.state import HistoryPoint, SwarmState

# Columns are added without a new version, since readers take those that they know.
SCHEMA_VERSION: Final = 2
_READABLE: Final = (1, SCHEMA_VERSION)
_EXPECTED: Final = "expected the SQLite file that `python -m spes_swarm.monitor --history FILE` writes"
_STARTS: Final = (  # of files that people have next to a history
    (b"\x1f\x8b", "is compressed with gzip: decompress it first"),
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd: decompress it first"),
    (b"\xfd7zXZ\0", "is compressed with xz: decompress it first"),
    (b"BZh", "is compressed with bzip2: decompress it first"),
    (b"PK\x03\x04", "is a zip archive: unpack it first"),
    (b'{"event"', "holds the events of one peer (a metrics.jsonl)"),
    (b"{", "holds JSON"),
    (b"", "is not an SQLite file"),
)
APPLICATION_ID: Final = 0x53504553  # "SPES", in the file's header
BUSY_TIMEOUT_S: Final = 5.0


def _columns() -> dict[str, str]:
    kinds = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(HistoryPoint).items()}
    return {
        name: f"{name} {'INTEGER' if int in kind else 'REAL'}{'' if NoneType in kind else ' NOT NULL'}"
        for name, kind in kinds.items()
    }


# The columns of the table of rounds in SQL, by name, in the order of the fields of HistoryPoint.
COLUMNS: Final = _columns()


def read_history(path: Path) -> tuple[SwarmState, list[HistoryPoint]]:
    """Reads the last state, as a replay, and all rounds of a file, without disturbing a monitor that writes to it.

    Raises:
        DataError: the file does not exist, or no monitor has written to it.
    """
    check_kind(path)
    with translate_sqlite_errors(path):
        # Even reading a WAL database creates files next to it, except as immutable, which is safe while no process has
        # it open (no -wal file).
        mode = "mode=ro" if path.with_name(path.name + "-wal").exists() else "immutable=1"
        db = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=BUSY_TIMEOUT_S)
        try:
            check_version(db, path)
            stored = read_meta(db, "state")
            points = read_points(db)
            if stored is None:
                raise DataError(f"history {path} is empty: its monitor has not seen the run")
            state = SwarmState.from_json(stored)
        finally:
            db.close()
    return dataclasses.replace(state, status="replay", next_round_s=None, join_command=None), points


def check_kind(path: Path) -> None:
    """Checks, before SQLite opens it, that a path leads to a readable SQLite file.

    Raises:
        DataError: it does not; the message says what is there instead.
    """
    try:
        if path.is_dir():
            raise DataError(f"history {path} is a directory; {_EXPECTED}")
        if path.exists() and not path.is_file():
            raise DataError(f"history {path} is not a regular file; {_EXPECTED}")
        with path.open("rb") as file:
            start = file.read(16)
    except FileNotFoundError as exc:
        raise DataError(f"history {path}: no such file; {_EXPECTED}") from exc
    except OSError as exc:
        raise DataError(f"history {path}: {exc.strerror}") from exc
    if start == b"SQLite format 3\0":
        return
    kind = next(words for known, words in _STARTS if start.startswith(known)) if start else "is empty"
    raise DataError(f"history {path} {kind}; {_EXPECTED}")


def check_version(db: sqlite3.Connection, path: Path) -> None:
    """Checks the application id and the version in the file's header.

    Raises:
        DataError: the file is not a history, or has an unknown version.
    """
    application = db.execute("PRAGMA application_id").fetchone()[0]
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID:
        raise DataError(f"history {path} is the SQLite file of another program; {_EXPECTED}")
    if version not in _READABLE:
        raise DataError(
            f"history {path} has version {version}; this version of spes_swarm supports up to {SCHEMA_VERSION}: "
            "use a newer one"
        )


def read_meta(db: sqlite3.Connection, key: str) -> Any:
    """A stored JSON value; None if there is none."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else json.loads(zlib.decompress(row[0]))


def missing_columns(db: sqlite3.Connection) -> list[str]:
    """Columns that a file written by an older version lacks."""
    there = {row[1] for row in db.execute("PRAGMA table_info(rounds)")}
    return [name for name in COLUMNS if name not in there]


def read_points(db: sqlite3.Connection) -> list[HistoryPoint]:
    """All rounds, in order."""
    missing = missing_columns(db)
    fields = [name for name in COLUMNS if name not in missing]
    rows = db.execute(f"SELECT {', '.join(fields)} FROM rounds ORDER BY round")
    return [HistoryPoint(**dict(zip(fields, row, strict=True))) for row in rows]


@contextmanager
def translate_sqlite_errors(path: Path) -> Iterator[None]:
    """Turns errors of SQLite and of the decoders into one that names the file.

    Raises:
        DataError: the file is damaged or cannot be used.
    """
    try:
        yield
    except sqlite3.DatabaseError as exc:
        raise DataError(f"history {path} cannot be used: {exc}") from exc
    except (zlib.error, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise DataError(f"history {path} is corrupt: {exc!r}") from exc
