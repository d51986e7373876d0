"""Limits on shares of an average, as pure functions of its weights.

All members derive the same weights, to the last bit: sums are rounded alike in all versions of Python.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

Weights = list[tuple[int, float]]
"""Members with their weights."""


def within_shares(weights: Weights, share: Mapping[int, float]) -> Weights:
    """Lowers the weights of members that may have at most some `share` of an average.

    If all who contribute are so limited that no average fulfils all limits, their limits are their weights.
    """
    limited: set[int] = set()
    while True:
        free = math.fsum(weight for i, weight in weights if i not in limited)
        total = free / (1 - math.fsum(share[i] for i in sorted(limited))) if free else 0.0
        more = {i for i, weight in weights if share[i] < 1 and i not in limited and weight > share[i] * total}
        if not more:
            return [(i, share[i] * (total or 1.0) if i in limited else weight) for i, weight in weights]
        limited |= more


def within_share_together(weights: Weights, limited: Collection[int], share: float) -> Weights:
    """Lowers the weights of the `limited` members so that they have at most some share of an average together.

    If nobody else contributes, nothing changes.
    """
    others = math.fsum(weight for i, weight in weights if i not in limited)
    theirs = math.fsum(weight for i, weight in weights if i in limited)
    most = share / (1 - share) * others if share < 1 else math.inf
    if not 0 < most < theirs:
        return weights
    return [(i, weight * (most / theirs) if i in limited else weight) for i, weight in weights]
