"""A trace of a trainer's steps: what it names, in which order, and what is left of it when the peer leaves."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.helpers.lone_trainer import LoneTrainer, run_config

# torch 2.11 says so of every recording, although the only cycle is written before that.
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")

IN_A_STEP = ["spes/data", "spes/forward", "spes/backward", "spes/optimiser"]
IN_A_ROUND = ["spes/contribution", "spes/exchange", "spes/commit"]


TRACE = "trace.json.gz"


def train(directory: Path, changes: Mapping[str, Any] = MappingProxyType({}), **settings: Any) -> LoneTrainer:
    """A round has two steps; the first three steps of a peer are not recorded."""
    peer = LoneTrainer(directory, run_config(round={"inner_steps": 2, **changes}), **settings)
    peer.trainer.run()
    peer.close()
    return peer


def spans_of(path: Path) -> list[dict[str, Any]]:
    """The named spans of a trace in the order of time."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = [event for event in events if str(event.get("name")).startswith("spes/")]
    assert all(event["ph"] == "X" and event["dur"] > 0 for event in named)  # complete
    return sorted(named, key=lambda event: float(event["ts"]))


def test_a_trace_has_the_steps_asked_for_and_the_rounds_among_them(tmp_path: Path) -> None:
    peer = train(tmp_path, profile_steps=3, max_rounds=4)
    names = [event["name"] for event in spans_of(tmp_path / TRACE)]
    assert names == [*IN_A_STEP, *IN_A_ROUND, *IN_A_STEP, *IN_A_STEP, *IN_A_ROUND]
    assert peer.said == [f"the recorded steps are in {tmp_path / TRACE}; open it in https://ui.perfetto.dev"]


def test_the_exchange_of_a_round_that_overlaps_has_the_steps_meanwhile(tmp_path: Path) -> None:
    train(tmp_path, {"overlap": True}, profile_steps=3, max_rounds=5)
    spans = spans_of(tmp_path / TRACE)
    exchange = next(event for event in spans if event["name"] == "spes/exchange")
    end = exchange["ts"] + exchange["dur"]
    assert "spes/forward" in [event["name"] for event in spans if exchange["ts"] < event["ts"] < end]


def test_a_peer_that_leaves_writes_what_it_has(tmp_path: Path) -> None:
    peer = train(tmp_path, profile_steps=100, max_rounds=2)
    names = [event["name"] for event in spans_of(tmp_path / TRACE)]
    assert names == [*IN_A_STEP, *IN_A_ROUND]
    assert len(peer.said) == 1


def test_a_trace_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / TRACE).mkdir()
    peer = train(tmp_path, profile_steps=1, max_rounds=3)
    assert peer.said[0].startswith("the trace cannot be written: ")
    assert len(peer.events("round")) == 3


def test_nothing_is_recorded_unless_asked_for(tmp_path: Path) -> None:
    peer = train(tmp_path, max_rounds=3)
    assert peer.said == []
    assert not (tmp_path / TRACE).exists()
