"""What the thread makes of signals that the main thread does not handle."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from spes_swarm.peer import stop_signals
from spes_swarm.peer.stop_signals import StopSignals
from tests.helpers.repository import ROOT

_ASKED_EARLY = """
import signal, threading
from pathlib import Path
from spes_swarm.base import log
from spes_swarm.peer.stop_signals import StopSignals

StopSignals().install()
signal.raise_signal(signal.SIGUSR1)
reported = threading.Event()
log.context.report = reported.set
with log.writing(Path("/dev/null"), "info", "trainer"):
    signal.raise_signal(signal.SIGUSR1)
    reported.wait()
signal.raise_signal(signal.SIGUSR1)
"""


@pytest.mark.parametrize(("number", "exits"), [(signal.SIGTERM, [7]), (signal.SIGUSR1, [])], ids=["stop", "report"])
def test_a_peer_that_is_stuck_while_joining_ends_at_a_stop_and_not_at_a_request_for_a_report(
    monkeypatch: pytest.MonkeyPatch, number: int, exits: list[int]
) -> None:
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        sent.close()

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(stop_signals, "_STUCK_S", 0.0)
    signals = StopSignals()
    signals.early_code = 7
    sent, received = socket.socketpair()
    with received, sent:
        sent.send(bytes([number]))
        if not exits:
            sent.close()
        with signals.interruptible():
            signals._watch(received)
    assert codes == exits


def test_a_request_for_a_report_ends_no_peer_that_has_no_log_yet_or_any_more() -> None:
    done = subprocess.run([sys.executable, "-c", _ASKED_EARLY], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
