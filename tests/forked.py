"""Starts peers from a process that has everything imported already.

Importing torch, transformers and hivemind takes four seconds of a core, most of a test's time. A peer that is forked
after the imports is otherwise the same: a process of its own that runs `spes_swarm.join.main`. (Tests of the command
line start it as users do.)
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["spes_swarm.session", "transformers.models.olmoe.modeling_olmoe"])


class ForkedPeer:
    """A process of the fork server with the interface of subprocess.Popen."""

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
        os.kill(self.pid, sig)

    def kill(self) -> None:
        """See PeerProcess."""
        self.send_signal(signal.SIGKILL)


def launch_forked(arguments: Sequence[str], log: Path) -> ForkedPeer:
    """Like spes_swarm.local_peer.launch_join, without the imports."""
    process = _CONTEXT.Process(target=_join, args=(list(arguments), str(log), dict(os.environ)))
    process.start()
    return ForkedPeer(process)


def _join(arguments: list[str], log: str, environment: dict[str, str]) -> None:
    from spes_swarm.join import main

    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    sys.exit(main(arguments))
