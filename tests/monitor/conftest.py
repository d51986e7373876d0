"""Fixtures of the monitor's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.served_monitor import Served, a_swarm


@pytest.fixture
def served() -> Iterator[Served]:
    """The web server of a monitor that sees four peers after three rounds."""
    with Served(a_swarm()) as running:
        yield running
