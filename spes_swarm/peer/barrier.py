"""The barrier before the first step of peers that are to start together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from spes_swarm.port.messages import SwarmView

_BARRIER_S = 120.0  # limit while all peers are present; some may wait for more peers than this one does
_ABSENCE_S = 20.0  # limit once a peer has left or failed
_POLL_S = 0.1


def await_training(
    view: Callable[[], SwarmView], others: int, stop: threading.Event, now: Callable[[], float] = time.monotonic
) -> None:
    """Waits until the other peers train, so that no peer starts before all have seen each other.

    This takes about a second, or half a minute if they are connected through a relay on a busy machine.
    """
    begun = all_there = now()
    while not stop.is_set() and now() < min(begun + _BARRIER_S, all_there + _ABSENCE_S):
        seen = view()
        if seen.num_training >= others:
            return
        if seen.num_ready >= others:
            all_there = now()
        stop.wait(_POLL_S)
