"""The threads that compute what an exchange encodes, checks, averages and commits.

A part takes milliseconds and a commit seconds, and the event loop has to answer calls, the DHT and other members
meanwhile. numpy and BLAKE3 release the interpreter's lock, so it can while threads compute. Three rules:

- Work on a few values is done at once, on the event loop: to hand it over would take longer.
- A task that is cancelled ends only when its piece of work has ended, so nothing changes behind the back of whoever
  goes on.
- A piece of work that must not be abandoned, such as a commit, cannot be cancelled once it has been handed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import ParamSpec, TypeVar

_NUM_THREADS, _MAX_THREADS = 2, 8  # more would wait for the daemon, or for each other
_FEW = 1 << 14  # values on which any work takes less than a millisecond
_Args = ParamSpec("_Args")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Workers:
    """A few threads. What is raised in them is raised where the result is awaited."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._threads = ThreadPoolExecutor(min(num_threads or _NUM_THREADS, _MAX_THREADS), "spes-exchange")

    async def compute(
        self, num_values: int, work: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs
    ) -> _Result:
        """Does work on so many values: on the event loop if they are few, otherwise in a thread."""
        if num_values > _FEW:
            return await self.compute_in_thread(work, *args, **kwargs)
        await asyncio.sleep(0)  # between pieces, others have their turn
        return work(*args, **kwargs)

    async def compute_in_thread(
        self, work: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs
    ) -> _Result:
        """Does work that may take long. If this is cancelled, it ends when the work has."""
        done = self._hand_over(work, *args, **kwargs)
        try:
            return await asyncio.shield(done)
        finally:
            while not done.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([done])

    async def compute_uncancellably(
        self, work: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs
    ) -> _Result:
        """Does work in a thread and returns its result, even if the task is cancelled meanwhile; it goes on then."""
        done = self._hand_over(work, *args, **kwargs)
        while not done.done():
            try:
                await asyncio.wait([done])
            except asyncio.CancelledError:
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
        return done.result()

    async def compute_ahead(
        self, items: Sequence[_Item], num_values: Callable[[_Item], int], work: Callable[[_Item], _Result]
    ) -> AsyncGenerator[_Result]:
        """Yields the result for each item, in order, and computes it in a thread while the one before is being used.

        `num_values`: on how many values the work on an item is; asked when the work on the one before has ended.
        """
        upcoming: asyncio.Future[_Result] | None = None
        try:
            for item, after in zip_longest(items, items[1:]):
                result = await (upcoming or self.compute(num_values(item), work, item))
                upcoming = None
                if after is not None and num_values(after) > _FEW:
                    upcoming = asyncio.ensure_future(self.compute_in_thread(work, after))
                yield result
        finally:
            if upcoming is not None:
                upcoming.cancel()
                await asyncio.wait([upcoming])

    def _hand_over(
        self, work: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs
    ) -> asyncio.Future[_Result]:
        return asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **kwargs))
