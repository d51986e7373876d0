"""The benchmark of what a step takes beside arithmetic, on a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.repository import ROOT

ARITHMETIC = {"forward", "backward", "clipping", "AdamW"}


@pytest.mark.slow
def test_the_parts_of_a_real_peers_steps_are_measured(tmp_path: Path) -> None:
    text, result = tmp_path / "text.txt", tmp_path / "overhead.json"
    text.write_text("".join(f"{number} times {number} is {number * number}.\n" for number in range(4000)))
    command = [sys.executable, "scripts/bench_overhead.py", "--size", "1M", "--steps", "2"]
    command += ["--sequence-length", "64", "--data", str(text), "--json", str(result)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    written = json.loads(result.read_text(encoding="utf-8"))
    assert len(written["steps"]) == 2 + 2
    for step in written["steps"]:
        # Whatever the trainer calls these by now, each of them takes time in every step.
        for part in (*ARITHMETIC, "data", "routed tokens", "metrics", "status"):
            assert step[part] > 0, part
        assert step["rest"] > 0  # so no part is counted twice
        assert sum(seconds for part, seconds in step.items() if part != "total") == pytest.approx(step["total"])
    assert "outside" in done.stdout
