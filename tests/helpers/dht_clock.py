"""The swarm's time in the hivemind of this process, for a while."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from spes_swarm.network.link.clock import SwarmClock
from spes_swarm.network.transport.hivemind_changes import use_clock


@contextmanager
def in_hivemind(own: SwarmClock) -> Iterator[None]:
    """Gives the clock to hivemind, in this process and for a while."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "hivemind" and hasattr(module, "get_dht_time"):
                patch.setattr(module, "get_dht_time", time.time)  # and back to what it was in the end
        use_clock(own.now)
        yield
