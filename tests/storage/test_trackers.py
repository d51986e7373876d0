"""Trackers: TensorBoard for real; the others as doubles that keep to the calls that were checked against them."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from spes_swarm.base.errors import ConfigError, UserError
from spes_swarm.join import main
from spes_swarm.metrics import events
from spes_swarm.monitor.__main__ import main as monitor
from spes_swarm.monitor.source import HeldState
from spes_swarm.monitor.views.tracking import follow
from spes_swarm.storage.trackers import Quiet, Tracked, TrackedMetrics, check_tracker, open_metrics, open_tracker
from tests.helpers.events import join_event, round_event, step_event
from tests.helpers.monitoring import peer_id, points, swarm_state

PEER = peer_id(0)


def read_board(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Everything in a TensorBoard directory: (step, value) by name."""
    board = EventAccumulator(str(directory)).Reload()
    return {
        name: [(event.step, round(event.value, 4)) for event in board.Scalars(name)] for name in board.Tags()["scalars"]
    }


class FakeModule(ModuleType):
    """wandb or trackio, as far as they are used."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0
        self.logged_in = False
        self.fails = False

    def init(self, **arguments: Any) -> FakeModule:
        print("hello from the tracker")
        if self.fails:
            raise RuntimeError("no\nluck")
        self.inits.append(arguments)
        return self

    def log(self, figures: Mapping[str, float], step: int) -> None:
        if self.fails:
            raise OSError("the disk is full")
        self.logged.append((step, dict(figures)))

    def finish(self) -> None:
        self.finished += 1

    def login(self, *, prompt: bool) -> bool:
        assert not prompt  # it would wait for somebody to type
        return self.logged_in

    def Settings(self, **settings: Any) -> dict[str, Any]:  # noqa: N802 - as wandb names it
        return settings


@pytest.fixture(params=["wandb", "trackio"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    module = FakeModule(request.param)
    monkeypatch.setitem(sys.modules, request.param, module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return module


def take_part(metrics: TrackedMetrics) -> None:
    metrics.write(events.Reach(reachable=True))
    metrics.write(step_event(1, loss=9.0))
    metrics.write(join_event("run-1"))
    metrics.write(step_event(2))
    metrics.write(step_event(3, loss=float("nan"), tokens_per_second=11.0, mfu=0.25))
    metrics.write(round_event(1, train_loss=5.0, payload_bytes_sent=7))
    metrics.close()


def test_a_peers_metrics_go_to_tensorboard_too(tmp_path: Path) -> None:
    metrics = open_metrics(tmp_path / "metrics.jsonl", PEER, "tensorboard", "laptop")
    assert isinstance(metrics, TrackedMetrics)
    take_part(metrics)
    board = read_board(tmp_path / "tensorboard" / "run-1")
    assert board["step/loss"] == [(2, 5.5)]
    assert board["step/tokens_per_second"] == [(2, 10.0), (3, 11.0)]
    assert board["round/train_loss"] == [(3, 5.0)]
    assert board["round/peers"] == [(3, 3.0)]
    assert "round/eval_loss" not in board
    names = [json.loads(line)["event"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert names == ["reach", "step", "join", "step", "step", "round"]


def test_the_other_trackers_are_told_the_same(
    fake: FakeModule, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    take_part(TrackedMetrics(tmp_path / "metrics.jsonl", PEER, fake.__name__, "laptop"))
    assert fake.logged == [
        (2, {"step/loss": 5.5, "step/tokens_per_second": 10.0, "step/teraflops": 0.5, "step/lr": 0.1}),
        (3, {"step/tokens_per_second": 11.0, "step/teraflops": 0.5, "step/mfu": 0.25, "step/lr": 0.1}),
        (
            3,
            {
                "round/round": 1,
                "round/train_loss": 5.0,
                "round/peers": 3,
                "round/experts_covered": 8,
                "round/group_seconds": 0.25,
                "round/exchange_seconds": 0.5,
                "round/payload_bytes_sent": 7,
            },
        ),
    ]
    assert fake.finished == 1
    (init,) = fake.inits
    assert (init["project"], init["group"]) == ("spes_swarm", "run-1")
    assert init["name"].endswith("laptop")
    if fake.__name__ == "wandb":
        assert init["mode"] == "offline"
    assert "hello" not in capsys.readouterr().out  # standard output is the command's


def test_wandb_is_online_for_those_who_are_logged_in_or_say_so(
    fake: FakeModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracked = Tracked(run_id="run-1", name="x", directory=tmp_path)
    fake.logged_in = True
    open_tracker(fake.__name__, tracked)
    fake.logged_in = False
    monkeypatch.setenv("WANDB_MODE", "offline")
    open_tracker(fake.__name__, tracked)
    assert [init.get("mode") for init in fake.inits] == [None, None]


def test_a_tracker_that_fails_is_given_up_and_training_goes_on(fake: FakeModule, tmp_path: Path) -> None:
    metrics = TrackedMetrics(tmp_path / "metrics.jsonl", PEER, fake.__name__, "")
    metrics.write(join_event())
    fake.fails = True
    for step in range(3):
        metrics.write(step_event(step))
    metrics.close()
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (fault,) = [event for event in written if event["event"] == "fault"]
    assert (fault["kind"], fault["peer"]) == ("tracker", PEER)
    assert "the disk is full" in fault["detail"]
    assert sum(event["event"] == "step" for event in written) == 3


def test_a_tracker_that_does_not_start_says_so_in_one_line(fake: FakeModule, tmp_path: Path) -> None:
    fake.fails = True
    with pytest.raises(UserError, match=f"--log {fake.__name__} did not start: no luck"):
        open_tracker(fake.__name__, Tracked(run_id="run-1", name="x", directory=tmp_path))


def test_a_missing_package_is_one_line_for_both_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("spes_swarm.storage.trackers.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'spes-swarm\[wandb\]'"):
        check_tracker("wandb")
    with pytest.raises(ConfigError, match="expected one of tensorboard, wandb, trackio"):
        check_tracker("paper")
    maddr = f"/ip4/127.0.0.1/tcp/9/p2p/{PEER}"
    for command, arguments in (
        (main, ["--log", "wandb", "--output-dir", str(tmp_path / "peer"), "--initial-peers", maddr]),
        (monitor, ["--log", "wandb", "--initial-peers", maddr]),
        (monitor, ["--log", "paper", "--initial-peers", maddr]),
        (main, ["--log", "paper", "--output-dir", str(tmp_path / "peer")]),
    ):
        assert command(arguments) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "log" in error


class Notes:
    """A tracker that only remembers."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.figures: dict[str, float] = {}
        self.closed = False

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self.steps.append(step)
        self.figures = dict(figures)

    def close(self) -> None:
        self.closed = True


def test_the_monitor_logs_each_round_once_when_it_is_complete() -> None:
    async def watch() -> Notes:
        notes = Notes()
        source = HeldState(swarm_state(), points(3))
        task = asyncio.create_task(follow(source, Quiet(notes, lambda text: None)))
        await asyncio.sleep(0)
        for count in (3, 4, 4, 6):
            source.update(swarm_state(), points(count))
            for _ in range(3):
                await asyncio.sleep(0)
        assert notes.steps == [3, 4, 5]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return notes

    notes = asyncio.run(watch())
    assert notes.steps == [3, 4, 5, 6]  # the last one at the end
    assert notes.closed
    assert notes.figures["swarm/peers"] == 3.0
    assert "swarm/eval_loss" in notes.figures


def test_without_a_tracker_metrics_are_what_they_were(tmp_path: Path) -> None:
    started = time.time()
    metrics = open_metrics(tmp_path / "metrics.jsonl", PEER, None, "")
    assert not isinstance(metrics, TrackedMetrics)
    metrics.write(events.Leave(round=1))
    metrics.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record["time"] >= started
