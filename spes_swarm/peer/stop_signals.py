"""SIGINT and SIGTERM: the wish to leave, which has to be obeyed within seconds whatever the machine is busy with.

A peer that trains leaves in order, between two steps. One that is still joining has nothing to lose: it may be
importing torch, tokenising a corpus or building a model, each of which takes minutes on a machine without a free
processor, so the first signal interrupts whatever it is at.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from spes_swarm.base.errors import LeftEarlyError


class _Interrupted(KeyboardInterrupt):
    """Like Ctrl-C without a handler, which libraries let pass."""


class StopSignals:
    """What the two signals do.

    Attributes:
        told: set with the first of them.
    """

    def __init__(self) -> None:
        self.told = threading.Event()
        self._interrupts = False

    def install(self) -> None:
        """Handles both signals from now on; in the main thread."""
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """The first signal ends what is done inside; in the main thread.

        Raises:
            LeftEarlyError: told to stop, inside or before.
        """
        try:
            self._interrupts = True
            if self.told.is_set():
                raise LeftEarlyError("told to stop while joining")
            yield
        except _Interrupted:
            raise LeftEarlyError("told to stop while joining") from None
        finally:
            self._interrupts = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        again = self.told.is_set()
        self.told.set()
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not again and self._interrupts:
            raise _Interrupted
