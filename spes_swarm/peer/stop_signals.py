"""SIGINT and SIGTERM ask a peer to leave, which must take effect within seconds however busy the machine is.

A peer that trains leaves in order, between two steps. A peer that is still joining has nothing to lose. It may be
importing torch, tokenising a corpus or building a model, each of which takes minutes on a machine without a free CPU,
so the first signal interrupts it immediately.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from spes_swarm.base.errors import LeftEarlyError

_HANDLED = (signal.SIGINT, signal.SIGTERM)


class _Interrupted(KeyboardInterrupt):
    """A KeyboardInterrupt, which libraries do not catch."""


class StopSignals:
    """Handles both signals."""

    def __init__(self) -> None:
        self.requested = threading.Event()  # set by the first signal
        self._interrupts = False

    def install(self) -> None:
        """Installs the handlers; call this in the main thread."""
        for number in _HANDLED:
            signal.signal(number, self._handle)

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Installs the handlers, and afterwards those that were there before.

        Raises:
            ValueError: not in the main thread.
        """
        before = {number: signal.getsignal(number) for number in _HANDLED}
        self.install()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """The first signal interrupts the code inside; use this in the main thread.

        Raises:
            LeftEarlyError: a signal arrived, inside or before.
        """
        try:
            self._interrupts = True
            if self.requested.is_set():
                raise LeftEarlyError("stopped while joining")
            yield
        except _Interrupted:
            raise LeftEarlyError("stopped while joining") from None
        finally:
            self._interrupts = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        again = self.requested.is_set()
        self.requested.set()
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not again and self._interrupts:
            raise _Interrupted
