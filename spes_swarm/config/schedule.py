"""The learning-rate schedule over the swarm's progress, and what happens at its end."""

from __future__ import annotations

import math
from collections.abc import Callable

from spes_swarm.config.round_clock import RoundClock
from spes_swarm.config.run import RunConfig, TrainingConfig
from spes_swarm.metrics import events


def learning_rate(step: float, training: TrainingConfig) -> float:
    """Linear warm-up to the peak, then half a cosine down to `min_learning_rate_ratio` of it, and no further.

    `step` counts the inner steps of all committed rounds, and of this one so far. At step 0 the rate is already above
    `warmup_start_ratio` of the peak, by one step.
    """
    if step < training.warmup_steps:
        start = training.warmup_start_ratio * training.learning_rate
        return start + (training.learning_rate - start) * (step + 1) / training.warmup_steps
    progress = (step - training.warmup_steps) / max(1, training.total_steps - training.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    floor = training.min_learning_rate_ratio
    return training.learning_rate * (floor + (1 - floor) * cosine)


class ScheduleEnd:
    """The end of the schedule of a run, and what happens after it."""

    def __init__(self, run: RunConfig) -> None:
        self._training = run.training
        self._clock = RoundClock.of(run)
        self._reported = False
        # The round whose commit completes the schedule.
        self.round = self._clock.round_at(run.training.total_steps)

    @property
    def last_round(self) -> int | None:
        """The last round of the run; None if it continues for as long as it has peers."""
        return self._clock.last_round

    def ends_run(self, round_number: int) -> bool:
        """Returns True if the run is over once this round is committed."""
        return self.last_round is not None and round_number >= self.last_round

    def report_if_reached(
        self, round_number: int, write: Callable[[events.Event], None], say: Callable[[str], None]
    ) -> None:
        """Reports the end of the schedule once, and what the user can do then."""
        if self._reported or round_number < self.round:
            return
        self._reported = True
        training = self._training
        steps = self._clock.step_of(round_number)
        write(
            events.ScheduleEnd(
                round=round_number, steps=steps, total_steps=training.total_steps, at_end=training.at_end
            )
        )
        if self.last_round is not None:
            say(f"the schedule is over: {self._steps_done}; the run ends with round {round_number}")
            return
        lowest = training.learning_rate * training.min_learning_rate_ratio
        say(
            f"the schedule is over: {self._steps_done}. Training continues at the minimum learning rate ({lowest:g}); "
            "to finish, stop with Ctrl-C and export the model; to train it further, found a run from the export with "
            "--initial-weights"
        )

    def why_over(self, run_id: str) -> str:
        """Returns the message for a peer that joins a run that has ended."""
        return (
            f"run {run_id} is over: {self._steps_done}, and it ended with round {self.round}; export the model from "
            "the output directory of a peer, or found a run from an export with --initial-weights"
        )

    @property
    def _steps_done(self) -> str:
        return f"all {self._training.total_steps:,} steps of training.total_steps are done"
