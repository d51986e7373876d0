"""`metrics.jsonl`: what anybody who reads it line by line can rely on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from spes_swarm.storage.metrics_file import Metrics


@pytest.mark.parametrize("left", ["", '{"event": "step"}\n', '{"event": "step"}\n{"event": "rou'])
def test_what_an_earlier_stay_left_spoils_no_event(tmp_path: Path, left: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(left, encoding="utf-8")
    metrics = Metrics(path, "me")
    metrics.write("round", round=3)
    metrics.write("step", loss=math.nan)
    metrics.close()
    written = path.read_text(encoding="utf-8")
    assert written.startswith(left)
    lines = written[len(left) :].splitlines()
    assert (lines[0] == "") == (left.endswith("rou"))
    events = [json.loads(line) for line in lines if line]
    assert [event["event"] for event in events] == ["round", "step"]
    assert events[1]["loss"] is None
