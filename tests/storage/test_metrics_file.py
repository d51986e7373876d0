"""`metrics.jsonl`: what anybody who reads it line by line can rely on."""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spes_swarm.base.errors import UserError
from spes_swarm.metrics import events
from spes_swarm.storage.metrics_file import Metrics
from tests.helpers.events import step_event


@pytest.mark.parametrize("left", ["", '{"event": "step"}\n', '{"event": "step"}\n{"event": "rou'])
def test_what_an_earlier_stay_left_spoils_no_event(tmp_path: Path, left: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(left, encoding="utf-8")
    metrics = Metrics(path, "me")
    metrics.write(events.Leave(round=3))
    metrics.write(step_event(loss=math.nan, lr=math.inf))
    metrics.close()
    written = path.read_text(encoding="utf-8")
    assert written.startswith(left)
    lines = written[len(left) :].splitlines()
    assert (lines[0] == "") == (left.endswith("rou"))
    leave, step = (json.loads(line) for line in lines if line)
    assert (leave["event"], leave["round"], leave["peer_id"]) == ("leave", 3, "me")
    assert (step["event"], step["loss"], step["lr"]) == ("step", None, None)


@contextmanager
def no_file_longer_than(num_bytes: int) -> Iterator[None]:
    """For this process. A write that reaches the limit ends there, as on a disk that becomes full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_fault_and_loses_only_what_it_refuses(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reports: list[tuple[str, bool]] = []
    metrics = Metrics(path, "me")
    metrics.report = lambda line, dropping: reports.append((line, dropping))
    metrics.write(events.Leave(round=0))
    with no_file_longer_than(path.stat().st_size + 30):
        for number in (1, 2, 3):
            metrics.write(events.Leave(round=number))
            problem = f"{path} cannot be written: File too large"
            assert reports == [(f"{problem}; training goes on, and events are dropped", True)]
    for number in (4, 5):
        metrics.write(events.Leave(round=number))
    assert reports[1:] == [(f"{path} is written again; 3 events dropped", False)]
    first, fault, *after = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert first["round"] == 0
    assert (fault["event"], fault["kind"], fault["peer"]) == ("fault", "metrics", "me")
    assert fault["detail"] == f"{problem}: 3 events dropped"
    assert [event["round"] for event in after] == [4, 5]
    with no_file_longer_than(path.stat().st_size):  # full once more
        metrics.write(events.Leave(round=6))
    metrics.write(events.Leave(round=7))
    metrics.close()
    assert [dropping for _, dropping in reports] == [True, False, True, False]
    last = path.read_text(encoding="utf-8").splitlines()[-2:]
    assert [json.loads(line)["event"] for line in last] == ["fault", "leave"]


def test_a_file_that_cannot_be_opened_at_the_start_is_the_users_to_know(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be written: No such file or directory"):
        Metrics(tmp_path / "missing" / "metrics.jsonl", "me")


def test_what_comes_after_the_end_is_dropped_silently(tmp_path: Path) -> None:
    """The network process may still report something."""
    metrics = Metrics(tmp_path / "metrics.jsonl", "me")
    metrics.close()
    metrics.write(events.Leave(round=1))
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
