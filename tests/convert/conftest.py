"""Commands that run in the process of the tests."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from spes_swarm.upcycle import main


@pytest.fixture
def command() -> Iterator[Callable[[list[str]], int]]:
    """The command of upcycling; its handler of SIGTERM does not outlive the test."""
    handler = signal.getsignal(signal.SIGTERM)
    yield main
    signal.signal(signal.SIGTERM, handler)
