"""Starts local peers from a process that has already imported everything.

Importing torch, transformers and hivemind takes four seconds of a core, and much more if peers share two cores: it
would dominate the measured time of a join. A peer forked after the imports is otherwise the same: a separate process
that runs `spes_swarm.join.main`.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from scripts.testing.local_network import enter_namespace
from spes_swarm import join
from spes_swarm.base.arguments import end_program

Main = Callable[[list[str]], int]  # a module-level function: the server finds it by its name

_PRELOADED = ["spes_swarm.peer.session", "transformers.models.olmoe.modeling_olmoe"]


class ForkedPeer:
    """A process of the fork server as a local_peer.PeerProcess."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code; negative for a signal, None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """See PeerProcess."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """See PeerProcess."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("join", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, sig: int) -> None:
        """See PeerProcess."""
        if self._process.exitcode is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """See PeerProcess."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Starts peers, in a network namespace if given; a `launch` argument of LocalPeer.

    `main` may be a `functools.partial`. The environment is the caller's at the time of the start, unless given;
    variables that modules read at import (huggingface_hub reads HF_ENDPOINT) keep the server's values.
    """

    def __init__(
        self, namespace: str | None = None, *, main: Main = join.main, environment: Mapping[str, str] | None = None
    ) -> None:
        self._namespace = namespace
        self._main = main
        self._environment = environment

    def __call__(self, arguments: Sequence[str], log: Path) -> ForkedPeer:
        """Like local_peer.launch_join, without the time for imports."""
        environment = dict(os.environ if self._environment is None else self._environment)
        process = server_context().Process(
            target=_run, args=(self._main, list(arguments), str(log), environment, self._namespace)
        )
        process.start()
        return ForkedPeer(process)


def server_context() -> ForkServerContext:
    """Returns the context of the processes that the server forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _run(main: Main, arguments: list[str], log: str, environment: dict[str, str], namespace: str | None) -> None:
    gc.freeze()  # a full collection would visit all that the server has imported, and so copy its pages
    if namespace is not None:
        enter_namespace(namespace)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # cached by the server; this environment may name another
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    end_program(main(arguments))
