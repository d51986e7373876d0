"""The trainer's side of the pipe to the network process."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from spes_swarm.base.errors import NetworkProcessError
from spes_swarm.metrics import events
from spes_swarm.network.process import run_network_process
from spes_swarm.port.commands import Called, Commands, Notification, Port
from spes_swarm.port.messages import Command, Reply, SwarmView

_BEAT_S = 1.0
_MAX_UNSENT = 4096  # commands queued for a process that does not read them; a trainer sends about ten a second
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class NetworkClient(Port):
    """Starts the network process and sends it commands.

    Must be created before CUDA is initialised and in the main thread: the process is forked, and it dies with the
    thread that forked it.

    The reader thread calls `on_event` with each event for the metrics.
    """

    def __init__(self, identity_path: Path, on_event: Callable[[events.Event], None]) -> None:
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
        # A separate thread writes: the pipe to a process that is stopped or starved of CPU fills up, and a blocked
        # write would keep the main thread from handling signals.
        self._unsent: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()  # None ends the writer
        self._lock = threading.Lock()
        self._dead = False
        self._view: SwarmView | None = None
        self._called_round = 0
        self._reader = threading.Thread(target=self._read_forever, name="spes-network-reader", daemon=True)
        self._reader.start()
        threading.Thread(target=self._write_forever, name="spes-network-writer", daemon=True).start()
        threading.Thread(target=self._beat_forever, name="spes-heartbeat", daemon=True).start()
        # At exit, multiprocessing would otherwise wait for this child, which ignores its SIGTERM.
        atexit.register(self._process.kill)

    @property
    def pid(self) -> int:
        """Process id of the network process."""
        assert self._process.pid is not None
        return self._process.pid

    def _read_forever(self) -> None:
        try:
            while True:
                message: Reply | Notification = self._pipe.recv()
                if not isinstance(message, Reply):
                    self._take(message)
                    continue
                with self._lock:
                    future = self._pending.pop(message.number, None)
                if future is None:
                    continue
                if message.error is None:
                    future.set_result(message.result)
                else:
                    future.set_exception(message.error)
        except (EOFError, OSError):
            pass  # the end of the pipe
        finally:  # also at an unexpected error, which the thread reports: no further message is read
            with self._lock:
                self._dead = True
                pending, self._pending = self._pending, {}
            for future in pending.values():
                future.set_exception(NetworkProcessError("the network process has ended"))

    def _write_forever(self) -> None:
        with contextlib.suppress(OSError):  # the reader handles the end of the process
            while (message := self._unsent.get()) is not None:
                self._pipe.send_bytes(message)

    def _beat_forever(self) -> None:
        with contextlib.suppress(NetworkProcessError):
            while not self._dead:
                if self._unsent.empty():  # heartbeats must not pile up while the process does not read
                    self.submit(Commands.beat)
                time.sleep(_BEAT_S)

    def _take(self, notification: Notification) -> None:
        if isinstance(notification, SwarmView):
            self._install_view(notification)
        elif isinstance(notification, Called):
            self._called_round = max(self._called_round, notification.round)
        else:
            self._on_event(notification)

    def _install_view(self, view: SwarmView) -> None:
        with self._lock:
            if self._view is None or view.at >= self._view.at:
                self._view = view

    @property
    def view(self) -> SwarmView | None:
        """See Port."""
        return self._view

    @property
    def called_round(self) -> int:
        """See Port."""
        return self._called_round

    def submit(
        self,
        command: Callable[Concatenate[Commands, _Args], Coroutine[Any, Any, _Result]],
        /,
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> Future[_Result]:
        """See Port."""
        future: Future[_Result] = Future()
        number = next(self._numbers)
        message = ForkingPickler.dumps(Command(number, command.__name__, args, kwargs))
        with self._lock:
            if self._dead:
                raise NetworkProcessError("the network process has ended")
            if self._unsent.qsize() >= _MAX_UNSENT:
                raise NetworkProcessError("the network process does not read its commands")
            self._pending[number] = future
            self._unsent.put(message)
        return future

    def ask(
        self,
        command: Callable[Concatenate[Commands, _Args], Coroutine[Any, Any, _Result]],
        wait_s: float | None,
        /,
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> _Result:
        """See Port."""
        try:
            return self.submit(command, *args, **kwargs).result(wait_s)
        except TimeoutError as exc:
            raise no_answer(command.__name__) from exc

    def stop(self, timeout_s: float = 10.0) -> None:
        """Leaves the swarm and ends the process, by force after `timeout_s`."""
        try:
            self.ask(Commands.stop, timeout_s)
        except NetworkProcessError:
            pass  # already gone, or stuck: it is ended below
        self._process.join(2.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        atexit.unregister(self._process.kill)
        self._unsent.put(None)
        self._reader.join()  # it sees the end of the pipe
        self._pipe.close()


def no_answer(command: str) -> NetworkProcessError:
    """Returns the error for a command that was not answered in time."""
    return NetworkProcessError(f"the network process did not answer `{command}`")


def _child(trainers_end: Connection, pipe: Connection, identity_path: Path, trainer_pid: int) -> None:
    trainers_end.close()  # otherwise, this process would never notice that the trainer has exited
    try:
        run_network_process(pipe, identity_path, trainer_pid)
    except Exception:
        logging.getLogger(__name__).exception("this ends the network process")
        raise SystemExit(1) from None  # multiprocessing would print the traceback
