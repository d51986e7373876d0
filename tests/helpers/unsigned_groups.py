"""Groups with unsigned statements: plans and ownership depend only on what the statements say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spes_swarm.protocol.bitmap import num_bitmap_bytes
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.rounds.statement import Group, Member, Statement

ROUND = 9
MAX_PART = 64  # elements; most blocks of small_layout() have several parts


def member(name: str, layout: Layout, **changes: Any) -> Member:
    """A member that has trained, with the same base as the others; `changes` replace fields of its statement."""
    held = changes.pop("held", [])
    num_blocks = len(layout.blocks)
    fields: dict[str, Any] = {
        "round": ROUND,
        "held": held,
        "tokens": 100,
        "routed": [10] * len(held),
        "rms": [0.01] * (1 + len(held)),
        "usual_rms": [0.0, 0.0],
        "vouched": b"",
        "bandwidth_mbps": 100.0,
        "reachable": True,
        "versions": [5] * num_blocks,
        "digests": [b"\5" * 32] * num_blocks,
        "commits": [],
        "marks": b"",
        "room": len(held),
        "fixed": False,
        "leaving": False,
        "leased": bytes(num_bitmap_bytes(num_blocks - 1)),
        "certificate": b"",
    }
    return Member(name, Statement(**{**fields, **changes}))


def group(members: Sequence[Member]) -> Group:
    """The group of these members in ROUND."""
    ordered = tuple(sorted(members, key=lambda m: m.peer_id))
    return Group("run", ROUND, ordered, ())
