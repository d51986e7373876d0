"""A peer's work since the last commit, and how much of it a round takes.

A round contributes the work done before it began; steps taken while it runs belong to the next one. Work on experts
that a round does not synchronise waits for one that does.

Shape: E experts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CountArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TakenWork:
    """The work that a round takes: all that was done before it began."""

    steps: int
    tokens: int
    routed_E: CountArray
    num_losses: int


class LocalWork:
    """Counts steps, tokens and losses since the last commit, and tokens routed to each expert since it took part."""

    def __init__(self, num_experts: int) -> None:
        self.steps = 0  # optimiser steps
        self.tokens = 0  # tokens trained on
        # Routed copies of tokens per expert, summed over layers.
        self.routed_E: CountArray = np.zeros(num_experts, dtype=np.int64)
        self._losses: list[float] = []

    def add_step(self, tokens: int, routed_E: CountArray, loss: float) -> None:
        """Adds one step."""
        self.steps += 1
        self.tokens += tokens
        self.routed_E += routed_E
        self._losses.append(loss)

    def is_left(self, held: Collection[int]) -> bool:
        """Returns True if there were steps since the last commit, or tokens for a held expert since it took part."""
        return self.steps > 0 or bool(self.routed_E[list(held)].any())

    def restore(self, steps: int, tokens: int, routed: Iterable[int]) -> None:
        """Restores the counts from a checkpoint, which holds no losses."""
        self.steps, self.tokens = steps, tokens
        self.routed_E[:] = list(routed)

    def contribute(self) -> TakenWork:
        """Returns all work so far, which the round that begins takes; it counts here until that is committed."""
        return TakenWork(self.steps, self.tokens, self.routed_E.copy(), len(self._losses))

    def commit(self, taken: TakenWork, deferred: Collection[int] = ()) -> float | None:
        """Subtracts the work that a round has taken; returns the mean loss of its steps, None if unknown.

        Tokens routed to the `deferred` experts still count: the round has not synchronised them.
        """
        losses, self._losses = self._losses[: taken.num_losses], self._losses[taken.num_losses :]
        self.steps -= taken.steps
        self.tokens -= taken.tokens
        routed_E = taken.routed_E.copy()
        routed_E[list(deferred)] = 0
        self.routed_E -= routed_E
        return sum(losses) / len(losses) if losses else None

    def take_back(self, experts: Iterable[int]) -> None:
        """Drops the work since the last commit, with which these experts have gone back to before it."""
        self.steps = self.tokens = 0
        self.routed_E[list(experts)] = 0
        self._losses = []

    def forget_experts(self, experts: Iterable[int]) -> None:
        """Zeroes the counts of experts that change hands: tokens routed to a foreign expert have not trained it."""
        self.routed_E[list(experts)] = 0

    def discard(self) -> None:
        """Drops all work, because the live weights were reset to the reference."""
        self.steps = self.tokens = 0
        self.routed_E[:] = 0
        self._losses = []


def finite_or_none(value: float | None) -> float | None:
    """Returns the value, or None if it is not finite: records hold finite numbers only."""
    return value if value is not None and math.isfinite(value) else None
