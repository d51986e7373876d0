"""The events of metrics.jsonl: each is declared in full, the reference is up to date, and what peers write fits it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from scripts.events_reference import PAGE, SCHEMA, all_events, build_page, build_schema, check
from spes_swarm.config.data import DataConfig
from spes_swarm.metrics import events
from spes_swarm.port.messages import CaughtUp, MeasuredRound, RoundReport
from spes_swarm.protocol.members.round_metrics import Of, PeerMetrics, RoundMetrics, metrics_of
from spes_swarm.storage.metrics_file import Metrics
from tests.helpers.events import check_events, round_event, step_event
from tests.helpers.lone_trainer import LoneTrainer, StubNetwork, run_config

NAMES = """checkpoint data fault from_hub group hub_blocks join lease leave link listening publish reach round
routing schedule_end step sync sync_progress"""


def test_the_names_that_scripts_look_for() -> None:
    assert sorted(kind.event_name for kind in all_events()) == NAMES.split()


def test_the_reference_is_up_to_date() -> None:
    remedy = "run: python -m scripts.events_reference"
    assert PAGE.read_text(encoding="utf-8") == build_page(), remedy
    assert SCHEMA.read_text(encoding="utf-8") == json.dumps(build_schema(), indent=2) + "\n", remedy
    Draft202012Validator.check_schema(build_schema())


@pytest.mark.parametrize("kind", all_events(), ids=lambda kind: str(kind.event_name))
def test_an_event_says_when_it_is_written_and_what_its_fields_are(kind: type[Any]) -> None:
    check(kind)
    assert kind.__dataclass_params__.frozen
    assert "__slots__" in vars(kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Complete(events.Event):
    """Written by a test."""

    seconds: Annotated[float, Of("how long it took", "seconds")]


@dataclass(frozen=True, kw_only=True, slots=True)
class WithoutNote(Complete):
    """Written by a test."""

    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WithoutUnit(Complete):
    """Written by a test."""

    size: Annotated[int, Of("how much was sent")]


@dataclass(frozen=True, kw_only=True, slots=True)
class WithoutMeaning(Complete):
    """Written by a test."""

    size: Annotated[int, Of("", "bytes")]


@dataclass(frozen=True, kw_only=True, slots=True)
class WithoutDocstring(events.Event):
    pass


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (WithoutNote, "WithoutNote.size lacks its meaning or its unit"),
        (WithoutUnit, "WithoutUnit.size lacks its meaning or its unit"),
        (WithoutMeaning, "WithoutMeaning.size lacks its meaning or its unit"),
        (WithoutDocstring, "the docstring of WithoutDocstring does not say when it is written"),
    ],
)
def test_an_incomplete_declaration_is_noticed(kind: type[Any], complaint: str) -> None:
    check(Complete)
    with pytest.raises(ValueError, match=complaint):
        check(kind)


@pytest.mark.parametrize("carrier", [PeerMetrics, RoundMetrics], ids=lambda carrier: str(carrier.__name__))
def test_a_metric_that_peers_report_has_a_meaning_and_a_unit(carrier: type) -> None:
    complete = [name for name, note in metrics_of(carrier).items() if note.help and note.unit]
    assert complete == [field.name for field in fields(carrier)]


def test_what_the_trainer_and_the_data_fill_in_by_name_is_declared() -> None:
    """mypy cannot check these calls: their arguments come from other dataclasses."""
    assert {field.name for field in fields(MeasuredRound)} <= {field.name for field in fields(events.Round)}
    filled = {field.name for field in fields(DataConfig)} | {"shards", "shards_total", "differs"}
    assert {field.name for field in fields(events.Data)} == filled


def written(path: Path) -> list[dict[str, Any]]:
    """The events in a file of metrics, each of which fits the schema."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    check_events(lines)
    return lines


def test_what_a_trainer_writes_fits_the_schema(tmp_path: Path) -> None:
    """With a catch-up in place of a round, an evaluation, an exchange of experts and the end of the schedule."""

    def catch_up(network: StubNetwork) -> CaughtUp:
        return CaughtUp(round=1, why="it slept", seconds=1.5, payload_bytes=7, complete=True)

    def change_experts(network: StubNetwork) -> RoundReport:
        report = network.commit()
        return replace(report, experts=replace(report.experts, held=(1, 5), gained=(5,), lost=(4,)))

    run = run_config(training={"total_steps": 20}, round={"inner_steps": 5}, evaluation={"every_rounds": 1})
    peer = LoneTrainer(tmp_path, run, max_rounds=5, evaluation=[np.arange(128).reshape(2, 64)])
    peer.network.answers = [catch_up, change_experts]
    peer.trainer.run()
    peer.close()
    names = {line["event"] for line in written(peer.metrics_path)}
    assert names == {"step", "round", "routing", "sync", "lease", "schedule_end", "checkpoint"}


def test_null_and_absent_are_two_things(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl", "me")
    metrics.write(step_event(mfu=None))
    metrics.write(step_event(data=(3, 4), loss=float("inf")))
    metrics.write(events.Lease(gained=(1,), lost=(), round=2))
    metrics.write(round_event())
    metrics.close()
    first, second, lease, committed = written(tmp_path / "metrics.jsonl")
    assert first["mfu"] is None
    assert "data" not in first
    assert (second["data"], second["loss"]) == ([3, 4], None)
    assert lease["round"] == 2
    assert committed["eval_loss"] is None


@pytest.mark.parametrize(
    "change",
    [{"loss": "low"}, {"step": None}, {"unknown": 1}, {"event": "steps"}, {"data": None}],
    ids=lambda change: str(next(iter(change))),
)
def test_the_schema_refuses_other_lines(change: dict[str, Any]) -> None:
    line = {"event": "step", "time": 1.5, "peer_id": "me", **step_event(1).to_dict(), "data": [1]}
    validator = Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
    assert validator.is_valid(line)
    assert not validator.is_valid({**line, **change})
