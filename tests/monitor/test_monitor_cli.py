"""The monitor's command line without a network: mistakes, replays, plots."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import jsonschema
import pytest

from spes_swarm.monitor.__main__ import main
from spes_swarm.monitor.aggregates import Known
from spes_swarm.monitor.history import History
from spes_swarm.monitor.history_file import read_history
from spes_swarm.monitor.schema import STATE_SCHEMA
from spes_swarm.monitor.state import Excluded
from spes_swarm.monitor.views.plot import plot_run
from tests.helpers.histories import written
from tests.helpers.monitoring import peer_id, points, swarm_state, troubled_state

MADDR = f"/ip4/203.0.113.7/tcp/31337/p2p/{peer_id(0)}"


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    path = tmp_path / "run.sqlite"
    written(path, 40)
    return path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--initial-peers is missing: give the address of a peer"),
        (["--nonsense"], "see --help"),
        (["--initial-peers", "not an address"], "is not a multiaddress"),
        (["--initial-peers", "/ip4/1.2.3.4/tcp/5"], "does not end in a peer id"),
        (["--initial-peers", MADDR, "--refresh", "0"], "--refresh: found 0"),
        (["--initial-peers", MADDR, "--refresh", "nan"], "--refresh: found nan"),
        (["--initial-peers", MADDR, "--refresh", "soon"], "invalid float value"),
        (["--initial-peers", MADDR, "--web", "8080"], "expected HOST:PORT"),
        (["--initial-peers", MADDR, "--web", "127.0.0.1:99999"], "expected HOST:PORT"),
        (["--initial-peers", MADDR, "--web", "127.0.0.1:" + 5000 * "9"], "expected HOST:PORT"),
        (["--initial-peers", MADDR, "--web", "127.0.0.1:80", "--once"], "give one of them"),
        (["--initial-peers", MADDR, "--bootstrap"], "needs --identity"),
        (["--initial-peers", MADDR, "--bootstrap", "--identity", "key"], "with a fixed port"),
        (
            ["--initial-peers", MADDR, "--bootstrap", "--identity", "key", "--host-maddrs", "/ip4/0.0.0.0/tcp/0"],
            "with a fixed port",
        ),
        (["--initial-peers", MADDR, "--host-maddrs", "/ip4/0.0.0.0/tcp/1"], "give --bootstrap, too"),
        (["--initial-peers", MADDR, "--plot", "run.png"], "give it with --replay"),
        (["--plot", "run.png"], "--plot draws a history file: give it with --replay FILE"),
        (["--replay", "nothing.sqlite"], "nothing.sqlite: no such file"),
        (["--replay", "nothing.sqlite", "--initial-peers", MADDR], "--initial-peers cannot be combined with --replay"),
        (["--initial-peers", MADDR, "--proofs", "dir"], "--proofs is where --faults saves proofs: give --faults, too"),
        (["--initial-peers", MADDR, "--faults", "--web", "127.0.0.1:80"], "--web keeps running: give one of them"),
        (["--initial-peers", MADDR, "--faults", "--bootstrap"], "--faults prints and exits, --bootstrap keeps running"),
        (["--replay", "nothing.sqlite", "--faults", "--proofs", "dir"], "--proofs cannot be combined with --replay"),
        (["--replay", "nothing.sqlite", "--faults", "--plot", "run.png"], "--faults prints, --plot draws"),
        (["--history", "nothing.sqlite"], "--initial-peers is missing: give the address of a peer"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("monitor: ")
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_ctrl_c_before_its_handler_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: list[str]) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("spes_swarm.monitor.options.parse_options", interrupted)
    assert main([]) == 0


def test_a_mistake_is_found_before_anything_heavy_is_imported() -> None:
    code = "import sys; from spes_swarm.monitor.__main__ import main; main(['--x']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=600).returncode == 0


@pytest.mark.slow
def test_a_replay_is_printed_as_a_screen_or_as_json(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replay", str(finished)]) == 0
    shown = capsys.readouterr().out
    assert "as of 2023-11-1" in shown
    assert "round 12" in shown
    assert "\x1b" not in shown
    assert main(["--replay", str(finished), "--once", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    jsonschema.validate(json.loads(line), STATE_SCHEMA)
    assert json.loads(line)["status"] == "replay"


def test_a_replay_says_who_was_excluded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.sqlite"
    written(path, 3)
    assert main(["--replay", str(path), "--faults"]) == 0
    assert capsys.readouterr().out.endswith(": nobody is excluded or without duty\n")
    eve = Excluded(
        peer_id=peer_id(7), name="eve", by=2, of=3, since=1.7e9, verified=True, round=4, part=1, why="it lied"
    )
    history = History(path)
    history.write(replace(troubled_state(), excluded=(eve,)), Known(), [], [], [])
    history.close()
    assert main(["--replay", str(path), "--faults"]) == 0
    assert "lied in round 4, part 1: it lied" in " ".join(capsys.readouterr().out.split())
    assert main(["--replay", str(path), "--faults", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert [one["peer_id"] for one in json.loads(line)["excluded"]] == [peer_id(7)]


@pytest.mark.slow
def test_a_screen_is_printed_where_there_is_no_unicode(finished: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "spes_swarm.monitor", "--replay", str(finished)],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PATH": ""},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert b"round 12" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_run_is_drawn(finished: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / f"run.{suffix}"
    assert main(["--replay", str(finished), "--plot", str(picture)]) == 0
    assert "40 rounds drawn" in capsys.readouterr().out
    data = picture.read_bytes()
    assert data.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix])
    if suffix == "png":
        assert struct.unpack(">II", data[16:24]) == (1650, 975)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 500])
def test_short_and_long_runs_are_drawn(tmp_path: Path, count: int) -> None:
    plot_run(swarm_state(), points(count), tmp_path / "run.png")


@pytest.mark.slow
def test_what_cannot_be_drawn_is_said(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(words: str, plot: Path, replay: Path = finished) -> None:
        assert main(["--replay", str(replay), "--plot", str(plot)]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1

    fails("No such file or directory", tmp_path / "nowhere" / "run.png")
    fails("Format 'xyz' is not supported", tmp_path / "run.xyz")
    fresh = tmp_path / "fresh.sqlite"
    written(fresh, 0)
    fails("no committed round", tmp_path / "run.png", fresh)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    fails("pip install 'spes-swarm[plot]'", tmp_path / "run.png")


def test_the_file_that_is_replayed_is_not_changed(finished: Path) -> None:
    before = finished.read_bytes()
    state, _ = read_history(finished)
    assert main(["--replay", str(finished), "--json"]) == 0
    assert finished.read_bytes() == before
    assert list(finished.parent.iterdir()) == [finished]
    assert state.peers == troubled_state().peers
