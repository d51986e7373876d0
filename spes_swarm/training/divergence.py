"""What a peer does when its loss is not a number any more: it leaves the step out, then begins again, then gives up.

A single overflow is passed over, as mixed-precision trainers do. If it goes on, the live weights are beyond repair, and
the swarm's reference, which never takes a value that is not finite, is the place to begin again. A peer that gets no
further that way has settings that cannot work, and says so instead of burning power for months.
"""

from __future__ import annotations

from spes_swarm.base.errors import DivergenceError

_STEPS = 5  # in a row without a finite loss, after which the live weights are given up
_RESTARTS = 3  # without a round between them that needed none


class DivergenceGuard:
    """Counts steps whose loss or gradients are not finite."""

    def __init__(self) -> None:
        self._steps = 0
        self._restarts = 0
        self._restarted = False  # since the last commit

    def stepped(self) -> None:
        """Notes a step that went well."""
        self._steps = 0

    def record_bad_step(self) -> bool:
        """Notes a step that did not; whether the peer should begin again from the reference.

        Raises:
            DivergenceError: it has done so several times, and no round went well between them.
        """
        self._steps += 1
        if self._steps < _STEPS:
            return False
        self.restart()
        return True

    def restart(self) -> None:
        """Notes that the live weights cannot be used.

        Raises:
            DivergenceError: as `record_bad_step`.
        """
        self._steps = 0
        self._restarts += 1
        self._restarted = True
        if self._restarts > _RESTARTS:
            raise DivergenceError(
                f"training diverges: the loss was no finite number again after {_RESTARTS} new beginnings from the "
                "swarm's reference. If this is your run, found it again with a lower training.learning_rate; if "
                "the others train well, check this machine's memory and GPU. The last checkpoint was left as it was"
            )

    def committed(self) -> None:
        """Notes a commit; a whole round without a new beginning shows that the peer gets somewhere."""
        if not self._restarted:
            self._restarts = 0
        self._restarted = False
