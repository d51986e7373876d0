"""scripts/bench.py: one of its benchmarks, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import bench
from spes_swarm.protocol.consensus.codec import CODECS


@pytest.mark.slow
def test_a_benchmark_prints_and_writes_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "new" / "codecs.json"
    monkeypatch.setattr("sys.argv", ["bench.py", "codecs", "--parts", "1", "--json", str(result)])
    assert bench.main() == 0
    rows = json.loads(result.read_text(encoding="utf-8"))["rows"]
    assert {row["codec"] for row in rows} == set(CODECS)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == list(rows[0])
    assert [line.split()[0] for line in lines] == [row["codec"] for row in rows]


@pytest.mark.swarm
def test_peers_without_trainers_hold_rounds_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tmp_path / "round.json"
    options = ["round", "--parameters", "3e6", "--peers", "3", "--experts", "3", "--rounds", "4", "--fault", "kill"]
    monkeypatch.setattr("sys.argv", ["bench.py", *options, "--json", str(result)])
    assert bench.main() == 0
    rows = {(row["round"], row["peer"]): row for row in json.loads(result.read_text(encoding="utf-8"))["rows"]}
    assert set(rows) == {(number, peer) for number in (2, 3, 4) for peer in (0, 1)}
    assert all(rows[number, 0]["digest"] == rows[number, 1]["digest"] for number in (2, 3, 4))
    assert {rows[2, peer]["members"] for peer in (0, 1)} == {3}
    assert {rows[4, peer]["members"] for peer in (0, 1)} == {2}
    assert min(rows[2, 0][part] for part in ("encode", "decode", "mean", "results", "commit", "digests")) > 0
    assert rows[2, 0]["answer_ms"] > 0
