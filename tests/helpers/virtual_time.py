"""An event loop whose time passes at once: whatever waits, waits no real time, and no load of the machine matters."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Sleepless(selectors.DefaultSelector):
    """Moves the clock on where the loop would sleep."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "everybody waits for an event that nobody will set"
            self.now_s += timeout
        return events


def run_at_once(main: Coroutine[Any, Any, T], limit_s: float) -> T:
    """Runs a coroutine that uses neither threads nor sockets.

    Raises:
        TimeoutError: it takes more than `limit_s` of its own time.
    """
    clock = _Sleepless()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now_s  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(asyncio.wait_for(main, limit_s))
