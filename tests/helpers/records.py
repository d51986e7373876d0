"""Records as peers publish them about themselves."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from spes_swarm.protocol.members.records import Lease, Progress
from spes_swarm.protocol.members.round_metrics import PeerMetrics, RoundMetrics

# Those of rounds would be in the record of rounds, which tests of the monitor derive from here.
_METRICS = {field.name for carrier in (PeerMetrics, RoundMetrics) for field in fields(carrier)}


def lease(expires: float, **changes: Any) -> Lease:
    """A lease on two experts; `changes` replace fields."""
    return Lease(**{"expires": expires, "experts": [0, 3], "since_round": 7, **changes})


def progress_of(expires: float, **claims: Any) -> Progress:
    """A record of a reachable peer with these fields and metrics."""
    measured = {name: claims.pop(name) for name in _METRICS & claims.keys()}
    telemetry = {name: value for name, value in measured.items() if value is not None}
    fields: dict[str, Any] = {"name": "", "reachable": True, "telemetry": telemetry}
    if "dead_experts" in telemetry:  # it has judged its experts
        fields["dead"] = []
    return Progress(**{"expires": expires, **fields, **claims})


def progress(expires: float = 1.0, **changes: Any) -> Progress:
    """A record of a peer that trains but has no tokens yet since its last commit; `changes` replace fields."""
    fields: dict[str, Any] = {
        "state": "training",
        "round": 3,
        "digest": b"\1" * 32,
        "step": 1,
        "tokens": 0,
        "tokens_per_step": 128,
        "tokens_per_second": 10.0,
        "experts": [0],
    }
    return progress_of(expires, **{**fields, **changes})
