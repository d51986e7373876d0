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
    for event, context in held_back:
        loop.call_soon(event, context=context)


def skip(seconds: float) -> None:
    """Moves the clock on, as work that takes so long would."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _Loop)
    loop.clock.now_s += seconds


class _Event:
    """A callback, which is held back while its place is frozen."""

    handle: asyncio.Handle

    def __init__(self, loop: _Loop, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.loop = loop
        self.callback = callback
        self.args = args

    def __call__(self) -> None:
        if (held_back := self.loop.held_back.get(_PLACE.get())) is not None:
            held_back.append((self, copy_context()))
        elif not self.handle.cancelled():  # while it was held back
            self.callback(*self.args)


class _Loop(asyncio.SelectorEventLoop):
    """See `freeze`."""

    def __init__(self, clock: _Sleepless) -> None:
        super().__init__(clock)
        self.clock = clock
        self.held_back: dict[str, list[tuple[_Event, Context]]] = {}

    def time(self) -> float:
        return self.clock.now_s

    def run_in_executor(self, executor: object, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Runs it at once: a thread would take real time, while the clock moves on."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as exc:
            future.set_exception(exc)
        return future

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        event = _Event(self, callback, args)
        event.handle = handle = super().call_soon(event, context=context)
        return handle

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        event = _Event(self, callback, args)
        event.handle = handle = super().call_at(when, event, context=context)
        return handle


def run_at_once(main: Coroutine[Any, Any, T], limit_s: float) -> T:
    """Runs a coroutine that uses no sockets; what it gives to threads is done at once.

    Raises:
        TimeoutError: it takes more than `limit_s` of its own time. (asyncio.wait_for would not do: it can lose a
            cancellation that comes at the same time as a result, which is common on this clock.)
    """
    clock = _Sleepless()
    clock.limit_s = limit_s
    with asyncio.Runner(loop_factory=lambda: _Loop(clock)) as runner:
        return runner.run(main)
