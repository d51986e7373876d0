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
