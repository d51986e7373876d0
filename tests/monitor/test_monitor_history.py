"""The SQLite file: what is written comes back, whatever happens to the monitor or to the file."""

from __future__ import annotations

import dataclasses
import gzip
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from spes_swarm.base.errors import DataError, UserError
from spes_swarm.monitor.aggregates import Known
from spes_swarm.monitor.history import History
from spes_swarm.monitor.history_file import read_history
from spes_swarm.monitor.ledger import Ledger
from spes_swarm.monitor.state import Fault
from tests.helpers.histories import manifest, written
from tests.helpers.monitoring import RUN, START, TTL_S, Watched, peer_id, points, progress, troubled_state
from tests.helpers.repository import ROOT

A, B = peer_id(0), peer_id(1)


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.sqlite"
    written(path)
    history = History(path)
    known = history.known()
    assert (known.round, known.alive_at, known.trained_in) == (12, START, {0: 12, 3: 7})
    assert (known.tokens, known.names) == ({A: 100, B: 200}, {A: "laptop"})
    assert known.points == tuple(points(5))
    assert known.faults == (Fault(time=START, peer_id=A, kind="round"),)
    stored = history.manifest()
    assert stored is not None
    assert stored.run_id == manifest().run_id
    assert history.addresses() == ["/ip4/127.0.0.1/tcp/1/p2p/" + A]
    history.close()


def test_points_are_replaced_and_removed(tmp_path: Path) -> None:
    history = History(tmp_path / "run.sqlite")
    history.begin(manifest())
    history.write(troubled_state(), Known(tokens={A: 1, B: 2}), points(6), [], [])
    fuller = dataclasses.replace(points(6)[5], peers=9)
    history.write(troubled_state(), Known(tokens={A: 7}), [fuller, *points(1, 7)], [1, 3], [])
    known = history.known()
    assert [point.round for point in known.points] == [2, 4, 5, 6, 7]
    assert known.points[3].peers == 9
    assert known.tokens == {A: 7}
    history.close()


def test_a_restarted_monitor_shows_the_same_curve(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    history = History(path)
    history.begin(manifest())
    watched = Watched()
    for number in range(1, 8):
        watched.wait(5)
        state = watched.look({A: progress(watched.now, round=number, total_tokens=number * 1000)})
        changed, removed = watched.ledger.take_changes()
        history.write(state, watched.ledger.summary(), changed, removed, [])
    history.close()
    again = History(path)
    ledger = Ledger(RUN, TTL_S, again.known())
    assert ledger.points() == watched.ledger.points()
    assert ledger.summary() == watched.ledger.summary()
    again.close()


def test_a_finished_run_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    before = written(path, 40)
    state, history = read_history(path)
    assert (state.status, state.join_command, state.next_round_s) == ("replay", None, None)
    assert dataclasses.replace(state, status="live", join_command=before.join_command, next_round_s=8.0) == before
    assert history == points(40)


def test_a_replay_neither_needs_nor_disturbs_the_monitor_that_writes(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    history = History(path)
    history.begin(manifest())
    history.write(troubled_state(), Known(), points(2), [], [])
    assert len(read_history(path)[1]) == 2
    history.write(troubled_state(), Known(), points(3), [], [])
    assert len(read_history(path)[1]) == 3
    history.close()


def test_a_file_in_a_folder_that_cannot_be_written_is_replayed(tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    path = folder / "run.sqlite"
    written(path)
    path.chmod(0o400)
    folder.chmod(0o500)
    try:
        assert len(read_history(path)[1]) == 5
    finally:
        folder.chmod(0o700)


@pytest.mark.slow
def test_a_monitor_that_is_killed_leaves_a_file_that_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from spes_swarm.monitor.aggregates import Known
from spes_swarm.monitor.history import History
from tests.helpers.histories import manifest
from tests.helpers.monitoring import peer_id, points, troubled_state
history = History(Path({str(path)!r}))
history.begin(manifest())
history.write(troubled_state(), Known(tokens={{peer_id(0): 1}}), points(9), [], [])
history._db.execute("BEGIN IMMEDIATE")
history._db.execute("DELETE FROM rounds")
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # it is killed before it can remove its key
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == -9, done.stderr
    history = History(path)
    assert history.known().points == tuple(points(9))
    history.close()


def test_a_file_is_of_one_run_and_of_one_monitor(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    written(path)
    history = History(path)
    with pytest.raises(DataError, match=r"belongs to run test-.*, not other-"):
        history.begin(manifest("other"))
    with pytest.raises(UserError, match="in use by another process"):
        History(path)
    history.close()
    History(path).close()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda path: path.write_bytes(b"not a database, but long enough to look like a file" * 30),
            "is not an SQLite file; expected",
        ),
        (lambda path: path.write_bytes(path.read_bytes()[:5000]), "cannot be used|corrupt"),
        (lambda path: execute(path, "PRAGMA user_version = 9"), "supports up to 2: use a newer one"),
        (lambda path: execute(path, "PRAGMA application_id = 5"), "file of another program; expected"),
        (lambda path: execute(path, "UPDATE meta SET value = x'00'"), "corrupt"),
        (lambda path: execute(path, "DROP TABLE rounds"), "cannot be used"),
    ],
)
def test_a_damaged_file_is_said_in_one_line(tmp_path: Path, damage: object, words: str) -> None:
    path = tmp_path / "run.sqlite"
    written(path)
    assert callable(damage)
    damage(path)
    with pytest.raises(DataError, match=words) as caught:
        read_history(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=words):
        History(path).known()


def test_a_file_from_before_losses_had_errors_is_read_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    written(path)
    execute(path, "ALTER TABLE rounds DROP COLUMN eval_loss_stderr")
    execute(path, "PRAGMA user_version = 1")
    _, replayed = read_history(path)
    assert [point.eval_loss for point in replayed] == [point.eval_loss for point in points(5)]
    assert {point.eval_loss_stderr for point in replayed} == {None}
    history = History(path)
    history.write(troubled_state(), history.known(), points(1, first=6), [], [])
    history.close()
    assert [point.eval_loss_stderr for point in read_history(path)[1]] == [*[None] * 5, 0.03]


def execute(path: Path, statement: str) -> None:
    db = sqlite3.connect(path)
    db.execute(statement)
    db.commit()
    db.close()


def test_what_is_not_there_or_cannot_be_written_is_said(tmp_path: Path) -> None:
    History(tmp_path / "new.sqlite").close()
    with pytest.raises(DataError, match="is empty"):
        read_history(tmp_path / "new.sqlite")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"Not a directory|File exists"):
        History(tmp_path / "file" / "run.sqlite")


FILES = {
    "metrics.jsonl": (b'{"event": "step", "round": 1}\n', "holds the events of one peer (a metrics.jsonl)"),
    "state.json": (b'{"schema": 1}', "holds JSON"),
    "run.sqlite.gz": (gzip.compress(b"SQLite format 3\0"), "is compressed with gzip: decompress it first"),
    "run.sqlite.zst": (b"\x28\xb5\x2f\xfd\0", "is compressed with zstd: decompress it first"),
    "run.zip": (b"PK\x03\x04", "is a zip archive: unpack it first"),
    "picture.png": (b"\x89PNG\r\n", "is not an SQLite file"),
    "empty.sqlite": (b"", "is empty"),
}


@pytest.mark.parametrize("name", FILES)
def test_another_file_is_named_for_what_it_is_and_stays_as_it_is(tmp_path: Path, name: str) -> None:
    path, (data, words) = tmp_path / name, FILES[name]
    path.write_bytes(data)
    writer = "python -m spes_swarm.monitor --history FILE"
    expected = f"history {path} {words}; expected the SQLite file that `{writer}` writes"
    with pytest.raises(DataError) as caught:
        read_history(path)
    assert str(caught.value) == expected
    assert path.read_bytes() == data
    if data:  # a monitor begins its history in an empty file, but in no other
        with pytest.raises(DataError) as caught:
            History(path)
        assert str(caught.value) == expected
        assert path.read_bytes() == data


def test_what_is_no_file_is_named_for_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")  # which nobody writes to
    for name, words in (
        ("nothing", "no such file"),
        ("dangling", "no such file"),
        (".", "is a directory"),
        ("pipe", "is not a regular file"),
    ):
        with pytest.raises(DataError, match=f"{words}; expected the SQLite file"):
            read_history(tmp_path / name)
    with pytest.raises(DataError, match="is a directory; expected"):
        History(tmp_path)


def test_a_full_disk_changes_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    history = History(path)
    history.begin(manifest())
    history.write(troubled_state(), Known(tokens={A: 1}), points(2), [], [])
    history._db.execute("PRAGMA max_page_count = 8")
    many = {peer_id(n): n for n in range(5000)}
    with pytest.raises(DataError, match="full"):
        history.write(troubled_state(), Known(tokens=many), points(500), [], [])
    assert (len(history.known().points), history.known().tokens) == (2, {A: 1})
    history._db.execute("PRAGMA max_page_count = 100000")
    history.write(troubled_state(), Known(tokens=many), points(500), [], [])
    assert (len(history.known().points), len(history.known().tokens)) == (500, 5000)
    history.close()


def test_the_file_stays_small(tmp_path: Path) -> None:
    """A round costs about a hundred bytes, so the longest history is a few megabytes."""
    path = tmp_path / "run.sqlite"
    history = History(path)
    history.begin(manifest())
    for first in range(1, 2001, 100):
        history.write(troubled_state(), Known(), points(100, first), [], [])
    history.close()
    assert path.stat().st_size < 2000 * 150 + 100_000
