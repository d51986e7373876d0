"""Starts local peers from a process that has everything imported already.

Importing torch, transformers and hivemind takes four seconds of a core, and much more where peers share two: it would
be most of what is measured when a peer joins. A peer that is forked after the imports is otherwise the same, a process
of its own that runs `spes_swarm.join.main`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from spes_swarm import join
from spes_swarm.testing.local_network import enter_namespace

Main = Callable[[list[str]], int]  # a function of a module: the server finds it by its name

_PRELOADED = ["spes_swarm.peer.session", "transformers.models.olmoe.modeling_olmoe"]


class ForkedPeer:
    """A process of the fork server with the interface of subprocess.Popen; see local_peer.PeerProcess."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal, None while it runs."""
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
    """Starts peers; what LocalPeer takes as `launch`.

    Args:
        namespace: of the network (see local_network.py) in which they live; None for the machine's own.
        main: what they run with their arguments, for the exit code; may be a `functools.partial`.
        environment: theirs; None for that of the caller at the moment of the start. What modules read from the
            environment when they are imported (huggingface_hub reads HF_ENDPOINT) stays as it is in the server.
    """

    def __init__(
        self, namespace: str | None = None, *, main: Main = join.main, environment: Mapping[str, str] | None = None
    ) -> None:
        self._namespace = namespace
        self._main = main
        self._environment = environment

    def __call__(self, arguments: Sequence[str], log: Path) -> ForkedPeer:
        """Like local_peer.launch_join, without the imports."""
        environment = dict(os.environ if self._environment is None else self._environment)
        process = _context().Process(
            target=_run, args=(self._main, list(arguments), str(log), environment, self._namespace)
        )
        process.start()
        return ForkedPeer(process)


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _run(main: Main, arguments: list[str], log: str, environment: dict[str, str], namespace: str | None) -> None:
    if namespace is not None:
        enter_namespace(namespace)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the server's; this environment may name another
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    sys.exit(main(arguments))
