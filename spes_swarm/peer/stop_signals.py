"""SIGINT, SIGTERM and SIGHUP ask a peer to leave, which must take effect within seconds however busy the machine is.

SIGHUP comes when the terminal is closed; a peer that was started with `nohup` ignores it.

A peer that trains leaves gracefully, between two steps. A peer that is still joining has nothing to lose. It may be
importing torch, tokenising a corpus or building a model, each of which takes minutes on a machine without a free CPU,
so the first signal interrupts it immediately.

Python runs a handler only between two of its own instructions. While the main thread waits inside a library, such as
torch for other ranks, a second thread therefore ends the process.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from spes_swarm.base.arguments import end_while_torch_is_imported, stop_signals
from spes_swarm.base.errors import LeftEarlyError

_STUCK_S = 5.0  # until a signal that has not been handled ends the process
_POLL_S = 0.1
_HANDLED = 0  # no signal has this number
STOPPED = "stopped immediately; what is kept is the last checkpoint, if there is one"


class _Interrupted(KeyboardInterrupt):
    """A KeyboardInterrupt, which libraries do not catch."""


class StopSignals:
    """Handles these signals.

    Attributes:
        requested: set by the first signal.
        early_code: exit code of a process that was stopped while it was joining.
    """

    def __init__(self) -> None:
        self.requested = threading.Event()
        self.early_code = 0
        self._handled_at = -math.inf  # monotonic time
        self._interrupts = False
        self._sent: socket.socket | None = None  # gets the number of each signal, and _HANDLED when it is handled

    def install(self) -> None:
        """Installs the handlers, and the thread that ends a process whose main thread is stuck; call this in the main
        thread of a process that does nothing else.
        """
        received, self._sent = socket.socketpair()
        self._sent.setblocking(False)
        signal.set_wakeup_fd(self._sent.fileno(), warn_on_full_buffer=False)
        self._set_handlers()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is a log, in which it asks for a report
        threading.Thread(target=self._watch, args=(received,), name="spes-signals", daemon=True).start()
        sys.unraisablehook = self._send_again

    def _send_again(self, unraisable: Any) -> None:
        """Python drops an interrupt that arrives in a destructor or in a callback of the garbage collector."""
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            sys.__unraisablehook__(unraisable)
            return
        if isinstance(unraisable.exc_value, _Interrupted):
            self.requested.clear()
        threading.Timer(_POLL_S, os.kill, [os.getpid(), signal.SIGINT]).start()

    def _set_handlers(self) -> None:
        for number in stop_signals():
            signal.signal(number, self._handle)

    def _watch(self, received: socket.socket) -> None:
        """Receives each signal when it arrives, even if the main thread does not.

        A signal has been handled if _HANDLED comes after it: this thread may get a processor only seconds later, so
        times alone would not do. Rarely, _HANDLED comes just before it, since any thread may receive the signal.
        """
        waiting: list[int] = []
        deadline = math.inf
        while True:
            received.settimeout(_POLL_S if deadline < math.inf else None)
            looked = time.monotonic()
            try:
                byte = received.recv(1)
            except TimeoutError:
                if looked >= deadline:
                    self._end_if_stuck(waiting)
                    deadline = math.inf
                continue
            if not byte:
                return
            number = byte[0]
            if number == _HANDLED:
                waiting.clear()
                deadline = math.inf
            elif number in stop_signals() and time.monotonic() - self._handled_at > _POLL_S:
                waiting.append(number)  # SIGUSR1 asks for a report; see base/log.py
                if len(waiting) <= 2:
                    deadline = time.monotonic() + _STUCK_S

    def _end_if_stuck(self, waiting: Sequence[int]) -> None:
        """Ends the process if signals that wait for the main thread ask for it."""
        if self._interrupts:  # there is nothing to lose
            os._exit(self.early_code)
        if waiting[-1] == signal.SIGINT and (len(waiting) > 1 or self.requested.is_set()):
            print(f"join: {STOPPED}", file=sys.stderr, flush=True)
            os._exit(130)

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Installs the handlers, and afterwards those that were there before.

        Raises:
            ValueError: not in the main thread.
        """
        before = {number: signal.getsignal(number) for number in stop_signals()}
        self._set_handlers()
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
        self._handled_at = time.monotonic()
        if self._sent is not None:
            with suppress(OSError):
                self._sent.send(bytes([_HANDLED]))
        again = self.requested.is_set()
        self.requested.set()
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not again and self._interrupts:
            end_while_torch_is_imported(self.early_code)
            raise _Interrupted
