"""Reads one unit of a data set ahead of training, on its own thread, and retries after a failure.

A failed read is retried from the next example, with growing pauses, for as long as the caller waits. Content that
cannot be decoded is no failure, but an example that cannot be used (see rows.py).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from spes_swarm.base.errors import DataError, DataStoppedError
from spes_swarm.data.streaming.dataset import Example
from spes_swarm.data.streaming.rows import one_line
from spes_swarm.data.tokenizer import TokenArray

_AHEAD = 64  # examples read ahead
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_POLL_S = 0.1


class Prepare(Protocol):
    """Tokenises examples; see preparing.py."""

    @property
    def skipped(self) -> str:
        """The unusable examples so far, by kind; empty if there are none."""

    def __call__(self, value: Any) -> TokenArray | None:
        """Returns the tokens of an example's value; None if it cannot be used."""


class Units(Protocol):
    """A data set; see dataset.py."""

    name: str

    def read(self, unit: int, part: int = 0, number: int = 0) -> Iterator[Example]:
        """See `StreamedDataset`."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """An example that has been read, with its tokens."""

    example: Example
    tokens: TokenArray | None
    is_prepared: bool  # False: it was not wanted, so it was not tokenised


class Reader:
    """Reads the examples of a unit from a given point; `next` returns them in order.

    Args:
        units: the data set.
        unit: which unit.
        part: the first part.
        number: the first example in that part.
        prepare: tokenises an example; called on the reader's thread.
        wanted: takes a part and number; returns True if that example is to be tokenised.
    """

    def __init__(
        self, units: Units, unit: int, part: int, number: int, prepare: Prepare, wanted: Callable[[int, int], bool]
    ) -> None:
        self._units = units
        self._unit = unit
        self._prepare = prepare
        self._wanted = wanted
        self._items: queue.Queue[Prepared | None] = queue.Queue(_AHEAD)
        self._closed = threading.Event()
        self.has_read_all = False  # the thread has ended, and the remaining examples are in memory
        self.failure: str | None = None  # why reading fails now
        self._thread = threading.Thread(target=self._run, args=(part, number), name="data", daemon=True)
        self._thread.start()

    def next(self, timeout_s: float, stop: threading.Event) -> Prepared | None:
        """Returns the next example; None, once, at the end of the unit.

        Raises:
            DataStoppedError: `stop` was set.
            DataError: no example arrived within `timeout_s`.
        """
        waited = 0.0
        while True:
            try:
                return self._items.get(timeout=_POLL_S)
            except queue.Empty:
                waited += _POLL_S
                if stop.is_set():
                    raise DataStoppedError(f"stopped while waiting for {self._units.name}") from None
                if waited >= timeout_s:
                    why = self.failure or "no answer"
                    raise DataError(
                        f"{self._units.name} could not be read for {timeout_s:.0f} seconds ({why}): the same command "
                        "resumes when it can be read again"
                    ) from None

    def close(self, wait_s: float = 0.0) -> None:
        """Stops the thread; waits up to `wait_s` for it to end."""
        self._closed.set()
        self._thread.join(wait_s)

    def _run(self, part: int, number: int) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._closed.is_set():
            try:
                for example in self._units.read(self._unit, part, number):
                    self.failure, pause_s = None, _FIRST_PAUSE_S
                    part, number = example.part, example.number + 1
                    wanted = self._wanted(example.part, example.number)
                    tokens = self._prepare(example.value) if wanted else None
                    if not self._put(Prepared(example, tokens, wanted)):
                        return
                if self._put(None):
                    self.has_read_all = True
                return
            except Exception as exc:  # datasets, its file systems and the Hub's client each raise their own types
                self.failure = one_line(exc)
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _put(self, item: Prepared | None) -> bool:
        """Returns False if the reader was closed."""
        while not self._closed.is_set():
            try:
                self._items.put(item, timeout=_POLL_S)
                return True
            except queue.Full:
                pass
        return False
