"""What a peer has done since the last commit, and how much of that the round under way has taken.

A round contributes what was done until it began; steps taken while it is under way belong to the next one.

Shape: E experts.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

CountArray = npt.NDArray[np.int64]


class LocalWork:
    """Counts steps, tokens, tokens routed to each expert, and losses since the last commit.

    Attributes:
        steps: optimiser steps.
        tokens: that were trained on.
        routed_E: how many of them were routed to each expert, over all layers.
    """

    def __init__(self, num_experts: int) -> None:
        self.steps = 0
        self.tokens = 0
        self.routed_E: CountArray = np.zeros(num_experts, dtype=np.int64)
        self._losses: list[float] = []
        self._taken: tuple[int, int, CountArray, int] | None = None

    def add_step(self, tokens: int, routed_E: CountArray, loss: float) -> None:
        """Adds one step."""
        self.steps += 1
        self.tokens += tokens
        self.routed_E += routed_E
        self._losses.append(loss)

    def restore(self, steps: int, tokens: int, routed: Iterable[int]) -> None:
        """Goes on from a checkpoint, which holds no losses."""
        self.steps, self.tokens = steps, tokens
        self.routed_E[:] = list(routed)

    def contribute(self) -> None:
        """Notes that the round that begins takes all that was done until now."""
        self._taken = self.steps, self.tokens, self.routed_E.copy(), len(self._losses)

    def commit(self) -> float | None:
        """Takes off what the last round took; returns the mean loss of those steps, None if none is known."""
        assert self._taken is not None
        steps, tokens, routed_E, num_losses = self._taken
        self._taken = None
        losses, self._losses = self._losses[:num_losses], self._losses[num_losses:]
        self.steps -= steps
        self.tokens -= tokens
        self.routed_E -= routed_E
        return sum(losses) / len(losses) if losses else None

    def forget_experts(self, experts: Iterable[int]) -> None:
        """Drops the routed tokens of experts that change hands: as a foreign expert's they have trained nothing."""
        self.routed_E[list(experts)] = 0

    def discard(self) -> None:
        """Drops everything: the live weights were put back to the reference."""
        self.steps = self.tokens = 0
        self.routed_E[:] = 0
        self._losses, self._taken = [], None
