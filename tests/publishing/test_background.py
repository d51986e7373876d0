"""Volunteers in line: which one publishes a round if the first does nothing."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spes_swarm.base import log
from spes_swarm.config.peer import PeerConfig
from spes_swarm.port.commands import Port
from spes_swarm.port.messages import SwarmView
from spes_swarm.publishing.background import Publishing
from spes_swarm.publishing.client import AGAIN
from spes_swarm.storage.checkpoint_writing import Written
from spes_swarm.storage.metrics_file import Metrics

EVERY = 10


@dataclass
class FakeTarget:
    """What is published; the command of a volunteer looks here and publishes its newest checkpoint if need be."""

    newest: int = 0
    checkpoint: int = 0  # of the volunteer
    looks: list[int] = field(default_factory=list)  # the rounds at which the volunteer has looked
    published: list[int] = field(default_factory=list)  # by the volunteer
    log: Sequence[str] = ()  # what it is told about the peer's log

    def run(self, command: Sequence[str], *, stdout: Any, **_: Any) -> SimpleNamespace:
        """Takes the place of the subprocess."""
        self.looks.append(self.checkpoint)
        self.log = command[command.index("--log") + 1 :][:3]
        status = "unchanged"
        if self.newest < int(command[command.index("--due") + 1]):
            self.newest, status = self.checkpoint, "published"
            self.published.append(self.newest)
        stdout.write(json.dumps({"status": status, "round": self.newest}).encode())
        return SimpleNamespace(poll=lambda: 0, returncode=0)


class Network:
    """A view in which this volunteer must wait this many periods."""

    def __init__(self, periods: int) -> None:
        self.view = SwarmView(1, 1, 1, 0, 0.0, 0.0, 0.0, 0, 8, publishing_periods=periods)

    def submit(self, *_: Any, **__: Any) -> None:
        """Announces nothing."""


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> FakeTarget:
    found = FakeTarget()
    monkeypatch.setattr(subprocess, "Popen", found.run)
    return found


@pytest.fixture
def metrics(tmp_path: Path) -> Iterator[Metrics]:
    opened = Metrics(tmp_path / "metrics.jsonl", "me")
    yield opened
    opened.close()


def volunteer(metrics: Metrics, periods: int, say: Callable[[str], None] = lambda text: None) -> Publishing:
    return Publishing(
        cast(Port, Network(periods)),
        metrics,
        peer=PeerConfig(publish_to="user/model", publish_every=EVERY),
        run_id="run-1",
        peer_id="me",
        say=say,
    )


def train(publishing: Publishing, target: FakeTarget, rounds: int, before: Callable[[int], None] | None = None) -> None:
    """What the trainer does after each commit, and in the step that follows."""
    for number in range(1, rounds + 1):
        if before is not None:
            before(number)
        saved: Future[Written] = Future()
        saved.set_result(Written(path=Path("checkpoint"), round=number, bytes_written=0, bytes_linked=0))
        target.checkpoint = number
        publishing.consider(number, partial(_same, saved))
        publishing.poll()


def _same(saved: Future[Written]) -> Future[Written]:
    return saved


def test_the_first_in_line_publishes_when_it_is_due(metrics: Metrics, target: FakeTarget) -> None:
    train(volunteer(metrics, 0), target, 45)
    assert target.published == target.looks == [10, 20, 30, 40]


def test_the_command_is_told_what_the_lines_of_the_log_name(
    metrics: Metrics, target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "context", log.Context(run="run-1", peer="abcdefgh"))
    train(volunteer(metrics, 0), target, EVERY)
    assert target.log == ["run-1", "abcdefgh", "info"]


@pytest.mark.parametrize("periods", [1, 2, 3])
def test_a_live_volunteer_that_publishes_nothing_is_skipped(metrics: Metrics, target: FakeTarget, periods: int) -> None:
    late = (1 + periods) * EVERY  # the first round due, and so many periods
    train(volunteer(metrics, periods), target, 2 * late)
    assert target.published == [late, 2 * late]


@pytest.mark.parametrize("periods", [1, 2, 3])
def test_a_volunteer_behind_one_that_publishes_never_publishes(
    metrics: Metrics, target: FakeTarget, periods: int
) -> None:
    def publish(number: int) -> None:
        if number % EVERY == EVERY - 1 and number > EVERY:  # almost a period after the round was due
            target.newest = number // EVERY * EVERY

    train(volunteer(metrics, periods), target, 20 * EVERY, publish)
    assert target.published == []
    assert target.newest == 19 * EVERY
    assert len(target.looks) <= 20 / periods  # each look costs a checkpoint


class Clock(threading.Event):
    """A clock that advances only while something waits for this event."""

    now = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.now += timeout
        return False


@pytest.mark.parametrize(("periods", "published_at"), [(0, 0.0), (1, 300.0)])
def test_the_last_round_of_a_run_does_not_wait_forever(
    monkeypatch: pytest.MonkeyPatch, metrics: Metrics, target: FakeTarget, periods: int, published_at: float
) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    target.checkpoint = 7
    volunteer(metrics, periods).publish_last(7, clock, timeout_s=600.0)
    assert target.published == [7]
    assert clock.now == pytest.approx(published_at, abs=1.0)


def ended(monkeypatch: pytest.MonkeyPatch, code: int, output: str) -> None:
    """Makes each publication end with this code and output."""

    def run(command: Sequence[str], *, stdout: Any, **_: Any) -> SimpleNamespace:
        stdout.write(output.encode())
        return SimpleNamespace(poll=lambda: code, returncode=code)

    monkeypatch.setattr(subprocess, "Popen", run)


SUMMARY = json.dumps({"status": "published", "round": 10})


@pytest.mark.parametrize(
    ("code", "output", "said"),
    [
        (0, SUMMARY, "round 10 is published"),
        (0, f"a warning\n{SUMMARY}\na library's last words", "round 10 is published"),
        (2, "publish: user/model: the disk is full", "user/model: the disk is full; publishing is tried again in 30 s"),
        (
            2,
            f"a warning\npublish: user/model: the Hub does not answer in time; {AGAIN}\nlast words",
            "user/model: the Hub does not answer in time; publishing is tried again in 30 s",
        ),
        (
            -9,
            "",
            "publishing was killed by signal 9, as by a system that runs out of memory; publishing is",
        ),
        (
            1,
            "Traceback\nValueError: what",
            "publishing exited with code 1: ValueError: what; publishing is",
        ),
        (0, "", "publishing exited with code 0; publishing is tried again"),
    ],
)
def test_what_is_said_about_a_publication(
    monkeypatch: pytest.MonkeyPatch, metrics: Metrics, target: FakeTarget, code: int, output: str, said: str
) -> None:
    ended(monkeypatch, code, output)
    lines: list[str] = []
    publishing = volunteer(metrics, 0, lines.append)
    train(publishing, target, 10)
    assert len(lines) == 1
    assert lines[0].startswith(said)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), subprocess.SubprocessError("preexec_fn")])
def test_a_publication_that_cannot_start_ends_no_peer(
    monkeypatch: pytest.MonkeyPatch, metrics: Metrics, target: FakeTarget, error: Exception
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(subprocess, "Popen", refuse)
    lines: list[str] = []
    train(volunteer(metrics, 0, lines.append), target, 30)
    (line,) = lines  # the next attempt is due in half a minute
    assert line.startswith("publishing cannot start: ")


def test_a_peer_that_leaves_promises_no_other_attempt(
    monkeypatch: pytest.MonkeyPatch, metrics: Metrics, target: FakeTarget
) -> None:
    lines: list[str] = []
    publishing = volunteer(metrics, 0, lines.append)
    code: list[int] = []

    def run(command: Sequence[str], *, stdout: Any, **_: Any) -> SimpleNamespace:
        stdout.write(b"publish: user/model: no room left")
        return SimpleNamespace(poll=lambda: code[0] if code else None, returncode=2)

    monkeypatch.setattr(subprocess, "Popen", run)
    train(publishing, target, 10)
    stop = threading.Event()
    monkeypatch.setattr(stop, "wait", lambda timeout: code.append(2))
    publishing.stop(600.0, stop)
    assert lines[0].startswith("waiting for the publication to finish")
    assert lines[1:] == ["user/model: no room left; it is not tried again"]


def test_a_peer_that_is_told_to_leave_does_not_wait_for_its_publication(
    monkeypatch: pytest.MonkeyPatch, metrics: Metrics, target: FakeTarget
) -> None:
    killed: list[bool] = []

    def run(command: Sequence[str], **_: Any) -> SimpleNamespace:
        return SimpleNamespace(poll=lambda: None, kill=lambda: killed.append(True), wait=lambda: -9)

    monkeypatch.setattr(subprocess, "Popen", run)
    publishing = volunteer(metrics, 0)
    train(publishing, target, 10)
    stop = threading.Event()
    stop.set()
    publishing.stop(600.0, stop)
    assert killed == [True]
