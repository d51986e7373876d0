"""Handles a NaN or infinite loss: the peer skips the step, then restarts from the reference, then gives up.

A single overflow is skipped, as in mixed-precision training. If it persists, the live weights are beyond repair, and
the peer restarts from the swarm's reference, which never contains a NaN or inf. If restarts do not help, the settings
cannot work, and the peer reports that instead of wasting power for months.
"""

from __future__ import annotations

from spes_swarm.base.errors import DivergenceError

_STEPS = 5  # consecutive steps with a NaN or infinite loss or gradient, after which the live weights are given up
_RESTARTS = 3  # restarts without a restart-free round between them


class DivergenceGuard:
    """Counts steps whose loss or gradients are NaN or infinite, and restarts."""

    def __init__(self) -> None:
        self._steps = 0
        self._restarts = 0
        self._restarted = False  # since the last commit

    def stepped(self) -> None:
        """Records a step with finite loss and gradients."""
        self._steps = 0

    def record_bad_step(self) -> bool:
        """Records a step with a NaN or infinite loss or gradient. Returns True if the peer should restart.

        Raises:
            DivergenceError: the peer has restarted several times, without a restart-free round in between.
        """
        self._steps += 1
        if self._steps < _STEPS:
            return False
        self.restart()
        return True

    def restart(self) -> None:
        """Records a restart from the reference, because the live weights are unusable.

        Raises:
            DivergenceError: as `record_bad_step`.
        """
        self._steps = 0
        self._restarts += 1
        self._restarted = True
        if self._restarts > _RESTARTS:
            raise DivergenceError(
                f"training diverges: the loss is NaN or infinite again after {_RESTARTS} restarts from the swarm's "
                "reference. If this is your run, start a new one with a lower training.learning_rate; if the other "
                "peers train well, check this machine's memory and GPU. The last checkpoint is unchanged"
            )

    def committed(self) -> None:
        """Records a commit; a round without a restart resets the count of restarts."""
        if not self._restarted:
            self._restarts = 0
        self._restarted = False
