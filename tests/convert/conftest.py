"""Commands that run in the process of the tests."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from spes_swarm.upcycle import main


@pytest.fixture
def command() -> Iterator[Callable[[list[str]], int]]:
    """The command of upcycling; its handlers of signals do not outlive the test."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield main
    for number, handler in handlers.items():
        signal.signal(number, handler)
