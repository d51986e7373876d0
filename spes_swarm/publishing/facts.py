"""What a publication says about its run beyond the reference: from a file, or from the event log of a peer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spes_swarm.base.errors import DataError
from spes_swarm.base.schema_error import first_complaint
from spes_swarm.publishing.publication import LossPoint

_MAX_RESULTS_BYTES = 8 << 20
_MAX_NAME_CHARS = 200
_MARK = '"round"'  # lines without it are of other events

_Count = Annotated[int, Field(ge=0, lt=1 << 62)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class NamedTokens(_Strict):
    """A contributor who has agreed to be named."""

    name: Annotated[str, Field(max_length=_MAX_NAME_CHARS)]
    tokens: _Count


class Results(_Strict):
    """What is known of a run; the content of the file of `--results`."""

    tokens: _Count | None = None  # trained on by all peers together
    peers: _Count | None = None  # that held the newest round
    history: list[LossPoint] = []
    contributors: list[NamedTokens] = []


def read_results(path: Path) -> Results:
    """Reads the file of `--results`.

    Raises:
        DataError: it cannot be read or used.
    """
    try:
        if path.stat().st_size > _MAX_RESULTS_BYTES:
            raise DataError("--results: the file is too large")
        return Results.model_validate_json(path.read_bytes())
    except OSError as exc:
        raise DataError(f"--results: {exc.strerror}") from exc
    except ValidationError as exc:
        raise DataError(f"--results: {first_complaint(exc)}") from exc


def results_of_metrics(path: Path, round_number: int) -> Results:
    """What a peer's own `metrics.jsonl` tells up to a round: its losses on held-out text, and who was there.

    Lines that cannot be read are passed over, and so is a file that is not there: nothing depends on it.
    """
    points: dict[int, LossPoint] = {}
    peers: int | None = None
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                event = _round_event(line)
                if event is None or not 0 <= event["round"] <= round_number:
                    continue
                number, loss, count = event["round"], event.get("eval_loss"), event.get("peers")
                if isinstance(loss, float) and 0 <= loss < float("inf"):
                    tokens = event.get("swarm_tokens")
                    known = type(tokens) is int and tokens >= 0
                    stderr = event.get("eval_loss_stderr")
                    points[number] = LossPoint(
                        round=number,
                        tokens=tokens if known else None,
                        loss=loss,
                        stderr=stderr if isinstance(stderr, float) and 0 <= stderr < float("inf") else None,
                    )
                if number == round_number and isinstance(count, int) and count >= 0:
                    peers = count
    except OSError:
        return Results()
    return Results(peers=peers, history=[points[number] for number in sorted(points)])


def _round_event(line: str) -> dict[str, Any] | None:
    if _MARK not in line:
        return None
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_round = isinstance(event, dict) and event.get("event") == "round" and type(event.get("round")) is int
    return event if is_round else None
