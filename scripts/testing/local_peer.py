"""Peers on this machine as child processes, for the demo, experiments and tests.

A peer is observed through its metrics and stopped by pid. Every wait is for an event and has a deadline.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, Self

import psutil

from spes_swarm.base.errors import SwarmError

_POLL_S = 0.05
PATIENCE_S = 600.0  # for events that will come, however busy the machine; no measurement depends on it
Event = dict[str, Any]


class PeerProcess(Protocol):
    """The interface of a started process; subprocess.Popen has it."""

    @property
    def pid(self) -> int:
        """Its process id."""

    @property
    def returncode(self) -> int | None:
        """Its exit code; negative for a signal, None while it runs."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits until it ends and returns the exit code; raises subprocess.TimeoutExpired."""

    def send_signal(self, sig: int) -> None:
        """Sends a signal to this process only."""

    def kill(self) -> None:
        """Sends SIGKILL to this process only."""


def launch_join(arguments: Sequence[str], log: Path) -> PeerProcess:
    """Starts `python -m spes_swarm.join` with its output appended to `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "spes_swarm.join", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


class LocalPeerError(SwarmError):
    """A local peer did not do what it was expected to; the message ends with its last output."""


class LocalPeer:
    """One `python -m spes_swarm.join` with all processes that it starts."""

    def __init__(
        self,
        output_dir: Path,
        arguments: Sequence[str],
        launch: Callable[[Sequence[str], Path], PeerProcess] = launch_join,
    ) -> None:
        self.output_dir = output_dir
        self.arguments = [str(argument) for argument in arguments]
        output_dir.mkdir(parents=True, exist_ok=True)
        self.log = output_dir / "console.log"
        # An earlier process may have used the directory: only what this one writes counts.
        self._metrics_start = self._metrics_path.stat().st_size if self._metrics_path.exists() else 0
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self._metrics_read = self._metrics_start
        self._events: list[Event] = []
        self._events_end = self._metrics_start  # position up to which these were read
        self.process = launch(["--output-dir", str(output_dir), *self.arguments], self.log)

    @property
    def _metrics_path(self) -> Path:
        return self.output_dir / "metrics.jsonl"

    def _written_since(self, position: int) -> bytes:
        """The complete lines of its metrics from a position on; an empty line ends the output of an earlier process."""
        if not self._metrics_path.exists():
            return b""
        with self._metrics_path.open("rb") as file:
            file.seek(position)
            # In one read: line by line, a line that is still being written would be read as two.
            written = file.read()
        return written[: written.rfind(b"\n") + 1]

    def events(self, kind: str | None = None) -> list[Event]:
        """Events that this process has written to its metrics so far, all or of one kind."""
        written = self._written_since(self._events_end)
        self._events += [json.loads(line) for line in written.splitlines() if line]
        self._events_end += len(written)
        return [event for event in self._events if kind in (None, event["event"])]

    def new_events(self) -> list[Event]:
        """Events that this process has written since the last call; cheap enough to follow it for hours."""
        written = self._written_since(self._metrics_read)
        self._metrics_read += len(written)
        return [json.loads(line) for line in written.splitlines() if line]

    def rounds(self) -> dict[int, Event]:
        """Committed rounds by number."""
        return {event["round"]: event for event in self.events("round")}

    def wait_for(
        self, kind: str, condition: Callable[[Event], bool] = lambda event: True, timeout_s: float = PATIENCE_S
    ) -> Event:
        """Waits for an event that satisfies `condition`.

        Raises:
            LocalPeerError: there is none before the deadline, or before the peer ends.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.process.poll() is not None  # checked before reading, so that its last events are not missed
            for event in self.events(kind):
                if condition(event):
                    return event
            if ended or time.monotonic() > deadline:
                why = f"the peer ended with code {self.process.returncode}" if ended else f"after {timeout_s:.0f} s"
                raise LocalPeerError(f"no matching {kind!r} event: {why}\n{self.tail()}")
            time.sleep(_POLL_S)

    def wait_for_round(self, number: int, timeout_s: float = PATIENCE_S) -> Event:
        """Waits until a round of at least that number is committed."""
        return self.wait_for("round", lambda event: event["round"] >= number, timeout_s)

    def text(self) -> str:
        """The output of this process so far."""
        if not self.log.exists():
            return ""
        return self.log.read_bytes()[self._log_start :].decode(errors="replace")

    def wait_for_text(self, pattern: str, timeout_s: float = PATIENCE_S) -> re.Match[str]:
        """Waits until its output has a match for `pattern`, in which `.` matches line ends, too.

        Raises:
            LocalPeerError: there is none before the deadline, or before the peer ends.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.process.poll() is not None
            if (found := re.search(pattern, self.text(), re.DOTALL)) is not None:
                return found
            if ended or time.monotonic() > deadline:
                why = f"the peer ended with code {self.process.returncode}" if ended else f"after {timeout_s:.0f} s"
                raise LocalPeerError(f"nothing in its output matches {pattern!r}: {why}\n{self.tail()}")
            time.sleep(_POLL_S)

    def tail(self) -> str:
        """The end of its output, and its last faults."""
        text = self.text()
        faults = self.events("fault")[-10:]
        return f"--- {self.output_dir.name}:\n{text[-3000:]}\nfaults: {faults}"

    def address(self, timeout_s: float = PATIENCE_S, host: str = "127.0.0.1") -> str:
        """An address of this peer for others on the machine; `host` is its IP address if it is in a namespace.

        Raises:
            LocalPeerError: it has not announced an address on that host.
        """
        listening = self.wait_for("listening", timeout_s=timeout_s)
        for maddr in listening["maddrs"]:
            if maddr.startswith(f"/ip4/{host}/"):
                return str(maddr)
        raise LocalPeerError(f"it does not listen on {host}, only on {listening['maddrs']}\n{self.tail()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        """Kills it and all processes that it has started."""
        self.signal_tree(signal.SIGKILL)
        if self.process.poll() is None:
            self.process.wait(PATIENCE_S)

    def tree(self) -> list[psutil.Process]:
        """The main process and all that it has started; empty once it has ended, as its pid may be reused."""
        if self.process.poll() is not None:
            return []
        try:
            main = psutil.Process(self.process.pid)
            return [main, *main.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def signal_tree(self, number: int) -> None:
        """Sends a signal to the main process and all that it has started."""
        for process in self.tree():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> list[psutil.Process]:
        """Sends SIGKILL to the main process only, as the kernel's OOM killer does; returns its former tree."""
        tree = self.tree()
        self.process.kill()
        self.process.wait(PATIENCE_S)
        return tree

    def terminate(self, timeout_s: float = PATIENCE_S) -> int:
        """Sends SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Waits until it ends by itself; returns the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise LocalPeerError(f"the peer did not end within {timeout_s:.0f} s\n{self.tail()}") from None
