"""The record that a peer keeps of four others, and exchanges with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from spes_swarm.protocol.rounds.conduct import Conduct, Delivery

SLACK_S = 0.25
OTHERS = ("a", "b", "c", "d")
TIMES: dict[str, Any] = {"usual_s": 0.1, "slack_s": SLACK_S, "passed_s": 2.0}


def delivery(contributed_s: float, elements: int = 1_000_000, share: float = 1.0) -> Delivery:
    return Delivery(elements, share, num_bytes=2 * elements * share, contributed_s=contributed_s)


def among(others: Iterable[str] = OTHERS) -> Conduct:
    """The record of a peer that exchanges with these."""
    conduct = Conduct()
    conduct.begin(others)
    return conduct


def exchange(
    conduct: Conduct, number: int, pushed_s: dict[str, float], results_s: dict[str, float] | None = None
) -> None:
    conduct.exchanged(
        number,
        {peer: delivery(seconds) for peer, seconds in pushed_s.items()},
        results_s or {},
        trusted=OTHERS,
        **TIMES,
    )


def in_time(**changes: float) -> dict[str, float]:
    return dict.fromkeys(OTHERS, 0.1) | changes
