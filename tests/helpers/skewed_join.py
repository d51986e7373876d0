"""A peer on a machine whose clock is wrong."""

from __future__ import annotations

import time
from functools import partial

from scripts.testing.forked_peer import ForkServer
from spes_swarm.join import main
from spes_swarm.network.link import clock


def launch_skewed(seconds: float) -> ForkServer:
    """Starts `join` with a clock that is ahead by so many seconds (negative: behind)."""
    return ForkServer(main=partial(_skewed_main, seconds))


def _skewed_main(ahead_s: float, arguments: list[str]) -> int:
    # Before the network process is forked, which reads its wall clock here and nowhere else.
    clock.wall_clock = lambda: time.time() + ahead_s
    return main(arguments)
