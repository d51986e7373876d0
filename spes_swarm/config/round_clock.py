"""How many inner steps each round has: a pure function of the run's settings and the number of the round.

All peers count the progress of the run in inner steps of committed rounds. Learning rate, merges and the end of the
schedule follow this count, so it must not depend on how many steps a peer has really done.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from spes_swarm.config.run import RunConfig


@dataclass(frozen=True)
class RoundClock:
    """Converts between rounds and inner steps of the run."""

    inner_steps: int  # H of the first rounds
    # (step, H), ascending: the rounds that begin at or after this step have H inner steps.
    later: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, run: RunConfig) -> Self:
        """The clock of a run."""
        return cls(run.round.inner_steps, run.round.inner_steps_later)

    @cached_property
    def _stages(self) -> list[tuple[int, int, int]]:
        """(rounds committed, inner steps done by then, H from then on), ascending, one for each change of H."""
        stages = [(0, 0, self.inner_steps)]
        for from_step, inner_steps in self.later:
            rounds, steps, current = stages[-1]
            more = max(0, -(-(from_step - steps) // current))  # a round is not cut short
            stages.append((rounds + more, steps + more * current, inner_steps))
        return stages

    def step_of(self, round_number: int) -> int:
        """The inner steps of the run that are done once this round is committed."""
        rounds, steps, inner_steps = self._stage(round_number)
        return steps + (round_number - rounds) * inner_steps

    def inner_steps_after(self, round_number: int) -> int:
        """H of the round that follows this one: the local steps that each peer does for it, on average."""
        return self._stage(round_number)[2]

    def round_at(self, step: int) -> int:
        """The first round whose commit completes this many inner steps."""
        if step <= 0:
            return 0
        rounds, steps, inner_steps = self._stages[bisect_right(self._stages, step - 1, key=lambda s: s[1]) - 1]
        return rounds - (steps - step) // inner_steps

    def _stage(self, round_number: int) -> tuple[int, int, int]:
        # Stages that are skipped by a long round begin with the same round; the last of them counts.
        return self._stages[bisect_right(self._stages, round_number, key=lambda s: s[0]) - 1]
