"""Limits how fast this peer sends its reference to others: all transfers share one limit, and rounds come first. Also
limits how much each of them may fetch.

Pure arithmetic on a clock: a sender books its bytes and asks how long it has to wait.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Share of the declared upload bandwidth between rounds, when there is little else to send.
BETWEEN_ROUNDS_SHARE = 0.8
# Share during a round's exchange. Not zero: newcomers must get in even if rounds follow each other closely.
DURING_ROUNDS_SHARE = 0.1
# Without a declared bandwidth, transfers are limited during rounds only, to their share of this.
ASSUMED_MBPS = 100.0
# At a lower rate, newcomers would take a donor for dead.
MIN_BYTES_PER_S = 16 * 1024.0
BURST_BYTES = 64 * 1024
MAX_TAKERS = 4096  # with a budget; the one that has taken nothing for longest is forgotten first


class RateLimit:
    """A token bucket whose rate (None: no limit) may change at any time; bytes pass in the order in which they are
    booked.
    """

    def __init__(self, bytes_per_s: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rate = bytes_per_s
        self._at = clock()
        # Positions in one stream of bytes: how far it may have been sent by now, and how far it is booked.
        self._flowed = float(BURST_BYTES)
        self._booked = 0.0

    def set_rate(self, bytes_per_s: float | None) -> None:
        """Changes the rate, also for bytes that are already booked."""
        self._advance()
        self._rate = bytes_per_s

    def book(self, num_bytes: int) -> float:
        """Books bytes behind all others; returns their place, for `wait_s`. After a pause BURST_BYTES pass at once."""
        self._advance()
        self._booked = max(self._booked, self._flowed - BURST_BYTES) + num_bytes
        return self._booked

    def wait_s(self, place: float) -> float:
        """Returns how long a place has to wait at the current rate; 0 if its bytes may be sent."""
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


class Budgets:
    """A budget of bytes for each of any number of takers, which refills at a constant rate within `refill_s`."""

    def __init__(self, num_bytes: int, refill_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_bytes = num_bytes
        self._bytes_per_s = num_bytes / refill_s
        self._clock = clock
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()  # bytes, and when; the latest last

    def allows(self, taker: str, num_bytes: int) -> bool:
        """Returns True if what is left of a taker's budget suffices for these bytes."""
        return self._spent_now(taker) + num_bytes <= self._num_bytes

    def spend(self, taker: str, num_bytes: int) -> None:
        """Takes bytes from a taker's budget."""
        self._spent[taker] = self._spent_now(taker) + num_bytes, self._clock()
        self._spent.move_to_end(taker)
        while len(self._spent) > MAX_TAKERS:
            self._spent.popitem(last=False)

    def _spent_now(self, taker: str) -> float:
        spent, at = self._spent.get(taker, (0.0, 0.0))
        return max(0.0, spent - self._bytes_per_s * (self._clock() - at))


class TransferLimit(RateLimit):
    """The limit on everything that a donor sends to newcomers; `upload_mbps` is what its user has declared."""

    def __init__(self, upload_mbps: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._between_rounds = None if upload_mbps is None else _bytes_per_s(BETWEEN_ROUNDS_SHARE * upload_mbps)
        self._during_rounds = _bytes_per_s(DURING_ROUNDS_SHARE * (upload_mbps or ASSUMED_MBPS))
        self._num_rounds = 0
        super().__init__(self._between_rounds, clock)

    @property
    def yields(self) -> bool:
        """True during a round's exchange."""
        return self._num_rounds > 0

    @contextmanager
    def round_under_way(self) -> Iterator[None]:
        """Limits transfers to the smaller share within the context."""
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
