"""Records as peers publish them about themselves."""

from __future__ import annotations

from typing import Any

from spes_swarm.protocol.members.records import Lease, Progress


def lease(expires: float, **changes: Any) -> Lease:
    """A lease on two experts; `changes` replace fields."""
    return Lease(**{"expires": expires, "experts": [0, 3], "since_round": 7, **changes})


def progress(expires: float = 1.0, **changes: Any) -> Progress:
    """A record of a peer that trains but has no tokens yet since its last commit; `changes` replace fields."""
    fields: dict[str, Any] = {
        "name": "",
        "state": "training",
        "reachable": True,
        "round": 3,
        "digest": b"\1" * 32,
        "step": 1,
        "tokens": 0,
        "tokens_per_step": 128,
        "tokens_per_second": 10.0,
        "loss": None,
        "experts": [0],
        "round_seconds": 0.0,
        "bytes_sent": 0,
        "bytes_received": 0,
    }
    return Progress(**{"expires": expires, **fields, **changes})
