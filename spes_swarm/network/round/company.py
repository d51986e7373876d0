"""Waits for other peers before a round, where a round without them would fork the reference or train alone."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from spes_swarm.network.link.clock import steady_clock
from spes_swarm.protocol.members.roster import Roster

_PAUSE_S = 0.5
_BEGIN_S = 10.0  # how long a peer's first round waits for peers that are about to train


@dataclass(eq=False)
class Company:
    """Knows when records were read last, and waits for others."""

    roster: Roster
    progress_ttl_s: float  # lifetime of a progress record
    refresh: Callable[[], Awaitable[None]]  # reads records again
    read_at: float = field(default=-math.inf, init=False)  # by the steady clock, when records were read last
    _look_until: float = field(default=-math.inf, init=False)  # until when a round waits for others
    _noticed: float | None = field(default=None, init=False)  # the last reading, if it was noticed to be long ago
    _has_begun: bool = field(default=False, init=False)  # whether a round of this peer has begun

    def note_read(self) -> None:
        """Notes that records have been read."""
        before, self.read_at = self.read_at, steady_clock()
        if self.progress_ttl_s / 2 < self.read_at - before < math.inf:  # renewed each fifth of their lifetime
            self._look_until = self.read_at + self.progress_ttl_s

    @property
    def is_blind(self) -> bool:
        """True while this process may have slept for so long that all records that it knew have expired.

        A round alone would then fork the reference.
        """
        now = steady_clock()
        if now - self.read_at > self.progress_ttl_s / 2 and self._noticed != self.read_at:  # nothing was read since
            self._noticed, self._look_until = self.read_at, now + self.progress_ttl_s
        return now < self._look_until

    async def find_again(self) -> None:
        """Waits for another peer's record while this process is blind."""
        while not self.roster.present() and self.is_blind:
            await self.refresh()
            await asyncio.sleep(_PAUSE_S)

    async def await_beginners(self) -> None:
        """Waits, before this peer's first round, for others that wait for company, if no round has been committed yet.

        They begin when this peer has appeared. Whoever commits the first round without them knows only its members from
        then on, and they know only theirs: two swarms that never become one.
        """
        if self._has_begun:
            return
        deadline = time.monotonic() + _BEGIN_S
        while time.monotonic() < deadline:
            others = [view.progress for view in self.roster.answering()]
            if any(other.round for other in others) or all(other.state != "waiting" for other in others):
                break
            await asyncio.sleep(_PAUSE_S)
            await self.refresh()
        self._has_begun = True
