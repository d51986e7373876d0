"""How fast this peer gives its reference away: all transfers together share one limit, and rounds come first.

Pure arithmetic on a clock: whoever wants to send books its bytes, and is told how long it has to wait for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Of the upload bandwidth that the user has declared. Between rounds there is only a little else to send.
BETWEEN_ROUNDS_SHARE = 0.8
# While a round's exchange is under way. Not zero: where rounds follow each other closely, newcomers must get in, too.
DURING_ROUNDS_SHARE = 0.1
# Where nothing is declared, transfers are limited during rounds only, and this is what their share is taken of.
ASSUMED_MBPS = 100.0
# Below this, newcomers would take a donor for dead.
MIN_BYTES_PER_S = 16 * 1024.0
BURST_BYTES = 64 * 1024


class RateLimit:
    """Lets bytes pass in the order in which they were booked (a token bucket whose rate may change at any time).

    Args:
        bytes_per_s: None lets everything pass at once.
        clock: monotonic seconds.
    """

    def __init__(self, bytes_per_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rate = bytes_per_s
        self._at = clock()
        # Positions on one line, in bytes: how far it may have flowed by now, and how far it is booked.
        self._flowed = float(BURST_BYTES)
        self._booked = 0.0

    def set_rate(self, bytes_per_s: float | None) -> None:
        """Changes the rate, also for what has been booked and waits."""
        self._advance()
        self._rate = bytes_per_s

    def book(self, num_bytes: int) -> float:
        """Takes a place behind all others; returns it, for `wait_s`. After a pause BURST_BYTES pass at once."""
        self._advance()
        self._booked = max(self._booked, self._flowed - BURST_BYTES) + num_bytes
        return self._booked

    def wait_s(self, place: float) -> float:
        """How long a place has to wait from now on, at the present rate; 0: its bytes may be sent."""
        self._advance()
        if self._rate is None:
            return 0.0
        return max(0.0, (place - self._flowed) / self._rate)

    def _advance(self) -> None:
        now = self._clock()
        if self._rate is None:
            self._flowed = max(self._flowed, self._booked)
        else:
            self._flowed += self._rate * (now - self._at)
        self._at = now


class TransferLimit(RateLimit):
    """The limit on all that a donor sends to newcomers.

    Args:
        upload_mbps: declared upload bandwidth in Mbit/s, None where none was declared.
    """

    def __init__(self, upload_mbps: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._between_rounds = None if upload_mbps is None else _bytes_per_s(BETWEEN_ROUNDS_SHARE * upload_mbps)
        self._during_rounds = _bytes_per_s(DURING_ROUNDS_SHARE * (upload_mbps or ASSUMED_MBPS))
        self._num_rounds = 0
        super().__init__(self._between_rounds, clock)

    @property
    def yields(self) -> bool:
        """True if a round's exchange is under way here."""
        return self._num_rounds > 0

    @contextmanager
    def round_under_way(self) -> Iterator[None]:
        """While this is open, transfers have only the smaller share."""
        self._num_rounds += 1
        self.set_rate(self._during_rounds)
        try:
            yield
        finally:
            self._num_rounds -= 1
            if not self._num_rounds:
                self.set_rate(self._between_rounds)


def _bytes_per_s(mbps: float) -> float:
    return max(mbps * 1e6 / 8, MIN_BYTES_PER_S)
