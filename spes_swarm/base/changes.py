"""An event that recurs: each time, it wakes the tasks that wait for the next one."""

from __future__ import annotations

import asyncio


class Changes:
    """Wakes all tasks that wait for the next change; a change before the wait does not count."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wakes all waiting tasks."""
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the next change; returns True if it came within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._next.wait()
        except TimeoutError:
            return False
        return True
