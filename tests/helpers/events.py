"""Events of the metrics with plausible values, and the schema that all of them fit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from scripts.events_reference import SCHEMA
from spes_swarm.metrics import events


@cache
def validators() -> dict[str, Draft202012Validator]:
    """A validator for each event, by name."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return {name: Draft202012Validator(definition) for name, definition in schema["$defs"].items()}


def check_events(lines: Iterable[Mapping[str, Any]]) -> set[str]:
    """Checks lines of a metrics.jsonl against the schema, one for each event and set of fields; returns their names.

    Raises:
        jsonschema.ValidationError: one does not fit.
    """
    samples = {(line["event"], frozenset(line)): line for line in lines}
    for (name, _), line in samples.items():
        validators()[name].validate(line)
    return {name for name, _ in samples}


def step_event(step: int = 1, **changes: Any) -> events.Step:
    """A local step."""
    fields: dict[str, Any] = {
        "round": 0,
        "loss": 5.5,
        "tokens": 128,
        "tokens_per_second": 10.0,
        "teraflops": 0.5,
        "mfu": None,
        "lr": 0.1,
    }
    return events.Step(step=step, **{**fields, **changes})


def round_event(number: int = 1, **changes: Any) -> events.Round:
    """A committed round, without losses and traffic."""
    fields: dict[str, Any] = {
        "peers": 3,
        "experts_covered": 8,
        "swarm_tokens": 1000,
        "group_seconds": 0.25,
        "exchange_seconds": 0.5,
        "apply_seconds": 0.1,
        "evaluate_seconds": 0.0,
        "parts_total": 4,
        "parts_missing": 0,
        "digest": "ab" * 32,
        "experts_held": (0,),
        "merge_alpha": None,
    }
    return events.Round(round=number, **{**fields, **changes})


def join_event(run_id: str = "run-1") -> events.Join:
    """The end of joining."""
    return events.Join(run_id=run_id, experts=(0,), round=0, maddrs=(), seconds=1.0, ranks=1, kernel="torch")
