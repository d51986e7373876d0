"""Telemetry: numbers that peers report for monitors, and on which no decision of a peer depends.

They travel as name -> number, so a new metric changes no schema: it is declared once, as a field of `PeerMetrics` or
`RoundFigures` (round_metrics.py). Readers ignore names that they do not know, and known ones with impossible values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from math import isfinite
from typing import Annotated, Any, Final, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from spes_swarm.protocol.members.round_metrics import PeerMetrics, RoundFigures

MAX_METRICS: Final = 64

MetricName = Annotated[str, Field(pattern="^[a-z][a-z0-9_]{0,39}$")]
Number = int | Annotated[float, Field(allow_inf_nan=False)]

Carrier = TypeVar("Carrier", PeerMetrics, RoundFigures)


def telemetry_of(metrics: PeerMetrics) -> dict[str, int | float]:
    """The known metrics of a dataclass."""
    return {name: value for name, value in asdict(metrics).items() if value is not None and isfinite(value)}


def read_telemetry(carrier: type[Carrier], values: Mapping[str, object]) -> Carrier:
    """The metrics of a dataclass, as reported; those that are not, or have an impossible value, have their default."""
    reader = _reader(carrier)  # type: ignore[arg-type]  # a class is hashable, whatever its instances are
    try:
        metrics: Carrier = reader.validate_python(values)
    except ValidationError as exc:
        wrong = {error["loc"][0] for error in exc.errors()}
        metrics = reader.validate_python({name: value for name, value in values.items() if name not in wrong})
    return metrics


@cache
def _reader(carrier: type) -> TypeAdapter[Any]:
    return TypeAdapter(carrier)
