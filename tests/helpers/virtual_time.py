"""An event loop with a virtual clock: waiting takes no real time, so the load of the machine does not matter."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_PLACE = ContextVar("_PLACE", default="")


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


def at(place: str) -> Context:
    """Returns the context of the tasks of a place; see `freeze`."""
    context = copy_context()
    context.run(_PLACE.set, place)
    return context


async def freeze(place: str, seconds: float) -> None:
    """Holds back all that happens at a place for a while, as if its process had been stopped."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _Loop)
    held_back = loop.held_back[place] = []
    await asyncio.sleep(seconds)
    del loop.held_back[place]
    for context, callback, args in held_back:
        loop.call_soon(callback, *args, context=context)


class _Loop(asyncio.SelectorEventLoop):
    """See `freeze`."""

    def __init__(self, clock: _Sleepless) -> None:
        super().__init__(clock)
        self._clock = clock
        self.held_back: dict[str, list[tuple[Context, Callable[..., object], tuple[Any, ...]]]] = {}

    def time(self) -> float:
        return self._clock.now_s

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon(self._run_unless_frozen, callback, args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, self._run_unless_frozen, callback, args, context=context)

    def _run_unless_frozen(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        if (held_back := self.held_back.get(_PLACE.get())) is not None:
            held_back.append((copy_context(), callback, args))
        else:
            callback(*args)


def run_at_once(main: Coroutine[Any, Any, T], limit_s: float) -> T:
    """Runs a coroutine that uses neither threads nor sockets.

    Raises:
        TimeoutError: it takes more than `limit_s` of its own time. (asyncio.wait_for would not do: it can lose a
            cancellation that comes at the same time as a result, which is common on this clock.)
    """
    clock = _Sleepless()
    clock.limit_s = limit_s
    with asyncio.Runner(loop_factory=lambda: _Loop(clock)) as runner:
        return runner.run(main)
