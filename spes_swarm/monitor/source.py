"""The default StateSource: holds the latest state and history, and wakes waiters when they change."""

from __future__ import annotations

from collections.abc import Sequence

from spes_swarm.base.changes import Changes
from spes_swarm.monitor.state import HistoryPoint, SwarmState


class HeldState:
    """A StateSource whose owner sets its contents, in the same event loop as its waiters."""

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
        """Replaces state and history, and wakes all waiters."""
        self._state, self._history = state, list(history)
        self._changed.notify()
