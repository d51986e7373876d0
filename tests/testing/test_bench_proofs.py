"""The benchmark of proofs, with few of each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import bench_proofs
from tests.helpers.repository import ROOT


@pytest.mark.slow
def test_lies_are_proven_and_nothing_else_is(tmp_path: Path) -> None:
    result = tmp_path / "proofs.json"
    command = [sys.executable, "-m", "scripts.bench_proofs", "--quick", "--json", str(result)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["what"]: row for row in json.loads(result.read_text(encoding="utf-8"))}
    lies = [row for what, row in rows.items() if what.startswith("lie: ")]
    assert len(lies) == 8
    assert sum(row["accepted"] for row in lies) == 16
    assert rows["honest"]["accepted"] == rows["mutated proofs"]["accepted"] == 0
    assert sum(row["errors"] for row in rows.values()) == 0


def test_another_error_of_a_decoder_is_counted_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def decoder(data: bytes) -> None:
        raise KeyError(len(data))

    row = bench_proofs.fuzz("a decoder", decoder, 3, [b"one message", b"another one"])
    assert (row.errors, row.is_fine) == (3, False)
    assert capsys.readouterr().out.count("a decoder: KeyError") == 3
    monkeypatch.setattr(bench_proofs, "rows", lambda options: iter([row]))
    assert bench_proofs.main(["--json", str(tmp_path / "rows.json")]) == 1
