"""An event loop with a virtual clock: waiting takes no real time, so the load of the machine does not matter."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Sleepless(selectors.DefaultSelector):
    """Moves the clock on where the loop would sleep."""

    now_s = 0.0
    limit_s = math.inf

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "everybody waits for an event that nobody will set"
            self.now_s += timeout
            if self.now_s > self.limit_s:
                limit_s, self.limit_s = self.limit_s, math.inf  # closing the loop may take time
                raise TimeoutError(f"not done after {limit_s:g} s of virtual time")
        return events


def run_at_once(main: Coroutine[Any, Any, T], limit_s: float) -> T:
    """Runs a coroutine that uses neither threads nor sockets.

    Raises:
        TimeoutError: it takes more than `limit_s` of its own time. (asyncio.wait_for would not do: it can lose a
            cancellation that comes at the same time as a result, which is common on this clock.)
    """
    clock = _Sleepless()
    clock.limit_s = limit_s
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now_s  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)
