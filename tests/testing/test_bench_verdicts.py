"""The benchmark of verdicts: what it counts, on made-up records, and a short run of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench_verdicts import read_records, table
from scripts.testing.verdict_runs import Kind, Record, Window
from tests.helpers.repository import ROOT

GOOD, BAD = [2.0, 2.1, 1.9, 2.0, 2.0], [3.0, 3.1, 2.9, 3.0, 3.0]
HARMED = {6, 9}


def windows(bad: set[int]) -> list[Window]:
    """Returns the windows of a peer whose loss is high in these rounds."""
    found = []
    for number in range(12):
        kind: Kind = "start" if number == 0 else "harmed" if number in HARMED else "commit"
        if number - 1 in HARMED:
            kind = "return"
        found.append(Window(number, 0, kind, BAD if number in bad else GOOD))
    return found


@pytest.mark.parametrize(("peers_hurt", "noticed"), [(1, 0), (2, 0), (3, 1), (4, 1)])
def test_more_than_half_of_the_peers_decide(peers_hurt: int, noticed: int) -> None:
    peers = {f"peer-{i}": windows({6} if i < peers_hurt else set()) for i in range(4)}
    (row,) = table([Record("noise-10", 0, 12, 1.0, peers)])
    assert (row.harmed, row.seen, row.noticed) == (2, peers_hurt, noticed)
    assert (row.alarms, row.refused) == (0, 0)


def test_a_rise_without_harm_is_an_alarm_and_refused_by_two_of_two() -> None:
    records = [
        Record("pair", seed, 12, 1.0, {"a": windows({5}), "b": windows({5} if seed else set())}) for seed in (0, 1)
    ]
    (row,) = table(records)
    assert (row.runs, row.rounds, row.peer_rounds) == (2, 24, 48)
    assert (row.alarms, row.refused) == (3, 1)


@pytest.mark.slow
def test_short_runs_are_recorded_and_judged_once_more(tmp_path: Path, text: Path) -> None:
    result = tmp_path / "verdicts.json"
    command = [sys.executable, "scripts/bench_verdicts.py", "--data", str(text), "--rounds", "2", "--jobs", "1"]
    command += ["--scenarios", "evaluated", "paper", "--json", str(result)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    records = read_records(result)
    assert [(run.scenario, run.rounds, len(run.peers)) for run in records] == [("evaluated", 2, 4), ("paper", 2, 4)]
    for run, steps in zip(records, (5, 10), strict=True):
        for seen in run.peers.values():
            assert [(window.round, window.kind) for window in seen[:2]] == [(0, "start"), (1, "commit")]
            assert {len(window.losses) for window in seen} == {steps}
    assert json.loads(result.read_text())["rows"][0]["peer_rounds"] == 8
    command = [sys.executable, "scripts/bench_verdicts.py", "--replay", str(result)]
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert again.stdout == "\n".join(done.stdout.splitlines()[2:]) + "\n"
