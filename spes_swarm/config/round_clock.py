"""How long each round is and what it synchronises: a pure function of the run's settings and the number of the round.

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
    """Converts between rounds and inner steps of the run, and tells which rounds synchronise the experts."""

    inner_steps: int  # H of the first rounds
    # (step, H), ascending: the rounds that begin at or after this step have H inner steps.
    later: tuple[tuple[int, int], ...] = ()
    expert_every: int = 1
    total_steps: int | None = None  # of a run that ends with them

    @classmethod
    def of(cls, run: RunConfig) -> Self:
        """The clock of a run."""
        config, training = run.round, run.training
        return cls(
            config.inner_steps,
            config.inner_steps_later,
            config.expert_every,
            training.total_steps if training.at_end == "stop" else None,
        )

    @cached_property
    def last_round(self) -> int | None:
        """The last round of the run; None if it continues for as long as it has peers."""
        return None if self.total_steps is None else self.round_at(self.total_steps)

    def synchronises_experts(self, round_number: int) -> bool:
        """Returns True if all experts take part in this round; the shared layers do in every round.

        The last round of a run leaves no work behind.
        """
        return round_number % self.expert_every == 0 or round_number == self.last_round

    def last_expert_round(self, round_number: int) -> int:
        """The newest round up to this one in which all experts took part; 0 if there was none."""
        return (
            round_number
            if self.synchronises_experts(round_number)
            else round_number // self.expert_every * self.expert_every
        )

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
