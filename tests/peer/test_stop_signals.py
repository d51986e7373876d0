"""What the thread makes of signals that the main thread does not handle."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from spes_swarm.peer import stop_signals
from spes_swarm.peer.stop_signals import StopSignals


@pytest.mark.parametrize(("number", "exits"), [(signal.SIGTERM, [7]), (signal.SIGUSR1, [])], ids=["stop", "report"])
def test_a_peer_that_is_stuck_while_joining_ends_at_a_stop_and_not_at_a_request_for_a_report(
    monkeypatch: pytest.MonkeyPatch, number: int, exits: list[int]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(stop_signals, "_STUCK_S", 0.0)
    signals = StopSignals()
    signals.early_code = 7
    sent, received = socket.socketpair()
    with received:
        with sent:
            sent.send(bytes([number]))
        with signals.interruptible():
            signals._watch(received)
    assert codes == exits
