"""The trainer's side of the pipe to the network process."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from spes_swarm.errors import NetworkProcessError
from spes_swarm.network import run_network_process
from spes_swarm.service_messages import SwarmView

_BEAT_S = 1.0
_MAX_UNSENT = 4096  # commands that may wait for a process that reads none; a trainer sends about ten a second
EventHandler = Callable[[str, dict[str, Any]], None]


class NetworkClient:
    """Starts the network process and sends it commands.

    Must be created before CUDA is initialised and in the main thread: the process is forked, and it dies with the
    thread that forked it.

    `on_event` is told, in a thread of its own, about faults of other peers (`fault`), about each group that this peer
    is in (`group`) and how far a download is (`sync_progress`), with the fields of the metric of that name.

    Attributes:
        view: the newest news about the others, None before the first.
        called_round: the newest round that a leader has called for, 0 before the first.
    """

    def __init__(self, identity_path: Path, on_event: EventHandler) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe(duplex=True)
        self._process = context.Process(
            target=_child, args=(self._pipe, theirs, identity_path, os.getpid()), name="spes-network", daemon=True
        )
        self._process.start()
        theirs.close()
        self._on_event = on_event
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        # A thread of its own writes: a pipe to a process that is stopped, or gets no processor, fills up, and whoever
        # wrote to it would wait for ever, deaf to signals.
        self._unsent: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._dead = False
        self.view: SwarmView | None = None
        self.called_round = 0
        self._reader = threading.Thread(target=self._read_forever, name="spes-network-reader", daemon=True)
        self._reader.start()
        threading.Thread(target=self._write_forever, name="spes-network-writer", daemon=True).start()
        threading.Thread(target=self._beat_forever, name="spes-heartbeat", daemon=True).start()
        # However this process ends: multiprocessing would wait for a child that ignores its SIGTERM.
        atexit.register(self._process.kill)

    @property
    def pid(self) -> int:
        """Process id of the network process."""
        assert self._process.pid is not None
        return self._process.pid

    def _read_forever(self) -> None:
        try:
            while True:
                kind, *rest = self._pipe.recv()
                if kind == "reply":
                    number, succeeded, value = rest
                    with self._lock:
                        future = self._pending.pop(number, None)
                    if future is not None and succeeded:
                        future.set_result(value)
                    elif future is not None:
                        future.set_exception(value)
                else:
                    self._take_event(*rest)
        except Exception:  # the end of the pipe, or a message that cannot be read: either way nothing more will come
            with self._lock:
                self._dead = True
                pending, self._pending = self._pending, {}
            for future in pending.values():
                future.set_exception(NetworkProcessError("the network process has ended"))

    def _write_forever(self) -> None:
        with contextlib.suppress(OSError):  # the reader notices the end of the process, too
            while True:
                self._pipe.send_bytes(self._unsent.get())

    def _beat_forever(self) -> None:
        with contextlib.suppress(NetworkProcessError):
            while True:
                if self._unsent.empty():  # otherwise something is on its way in any case
                    self.submit("beat")
                time.sleep(_BEAT_S)

    def _take_event(self, name: str, value: Any) -> None:
        if name == "view":
            self.view = value
        elif name == "called":
            self.called_round = max(self.called_round, value)
        else:
            self._on_event(name, value)

    def submit(self, command: str, /, **arguments: Any) -> Future[Any]:
        """Sends a command, without ever waiting; the future carries its result or exception.

        Raises:
            NetworkProcessError: the process is not there any more, or has read no command for long.
        """
        future: Future[Any] = Future()
        number = next(self._numbers)
        message = ForkingPickler.dumps((number, command, arguments))
        with self._lock:
            if self._dead:
                raise NetworkProcessError("the network process has ended")
            if self._unsent.qsize() >= _MAX_UNSENT:
                raise NetworkProcessError("the network process does not read its commands")
            self._pending[number] = future
            self._unsent.put(message)
        return future

    def ask(self, command: str, wait_s: float | None = None, /, **arguments: Any) -> Any:
        """Sends a command and waits for its result.

        Raises:
            NetworkProcessError: the process ended, or did not answer within `wait_s`.
            Exception: whatever the command raised there.
        """
        try:
            return self.submit(command, **arguments).result(wait_s)
        except TimeoutError as exc:
            raise NetworkProcessError(f"the network process did not answer `{command}`") from exc

    def stop(self, timeout_s: float = 10.0) -> None:
        """Leaves the swarm and ends the process; after `timeout_s` by force."""
        try:
            self.ask("stop", timeout_s)
        except NetworkProcessError:
            pass  # it is gone already, or stuck; either way it is ended below
        self._process.join(2.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _child(trainers_end: Connection, pipe: Connection, identity_path: Path, trainer_pid: int) -> None:
    trainers_end.close()  # or this process would never see that the trainer is gone
    run_network_process(pipe, identity_path, trainer_pid)
