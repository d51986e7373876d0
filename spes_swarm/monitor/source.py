"""The usual StateSource: holds the newest state and history, and wakes those who wait for the next."""

from __future__ import annotations

from collections.abc import Sequence

from spes_swarm.base.changes import Changes
from spes_swarm.monitor.state import HistoryPoint, SwarmState


class HeldState:
    """A StateSource whose contents are set by its owner, in the event loop of those who wait."""

    def __init__(self, state: SwarmState, history: Sequence[HistoryPoint] = ()) -> None:
        self._state = state
        self._history = list(history)
        self._changed = Changes()

    def state(self) -> SwarmState:
        """See StateSource."""
        return self._state

    def history(self) -> list[HistoryPoint]:
        """See StateSource."""
        return list(self._history)

    async def wait_for_change(self, timeout_s: float) -> None:
        """See StateSource."""
        await self._changed.wait(timeout_s)

    def update(self, state: SwarmState, history: Sequence[HistoryPoint]) -> None:
        """Replaces what is known, and wakes everybody."""
        self._state, self._history = state, list(history)
        self._changed.notify()
