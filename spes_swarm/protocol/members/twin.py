"""Notices that a second process uses this peer's identity, as when its directory was copied to another machine.

Both then sign records with the same key, and each of them reads records of its own peer that it has not written. A
record of an earlier session also does not come from this process, and other nodes may return several of them. So only
records that must have been written after this session began count, and only once a second, newer one has been read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from spes_swarm.base.errors import ProtocolError

TWIN: Final = "identity"  # the kind of the fault
_MAX_WRITTEN = 256
_MARGIN_S = 3.0  # by which the swarm's time may differ between two sessions
_REPEAT_S = 60.0


@dataclass
class TwinWatch:
    """Compares the expirations of records of one kind; all times are the swarm's."""

    lifetime_s: float  # of the records
    _since: float = field(default=math.inf, init=False)  # expiration of a record written when this session began
    _written: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_WRITTEN), init=False)
    _foreign: float | None = field(default=None, init=False)  # the newest expiration of another process's record
    _silent_until: float = field(default=-math.inf, init=False)

    def wrote(self, expires: float, now: float) -> None:
        """Notes a record of this process."""
        if not self._written:
            self._since = now + self.lifetime_s + _MARGIN_S
        self._written.append(expires)

    def read(self, expires: float, now: float) -> bool:
        """Returns True if another process is at work, at most once a minute; `expires` is of a record of this peer."""
        if expires < self._since or expires in self._written:
            return False
        if self._foreign is not None and expires <= self._foreign:
            return False
        is_first, self._foreign = self._foreign is None, expires
        if is_first or now < self._silent_until:
            return False
        self._silent_until = now + _REPEAT_S
        return True


def twin_fault(me: str, own: Sequence[str], seen: Sequence[str]) -> ProtocolError:
    """The fault to report: this process has the addresses `own`, and other peers are connected to those `seen`."""
    return ProtocolError(
        TWIN,
        f"two processes use the identity of this peer, {me}, and rounds lose parts; this one has "
        f"{', '.join(own) or 'no address'}, and other peers are connected to {', '.join(seen) or 'unknown'}: "
        "stop one of them; to run both, give it another --output-dir, without --identity",
    )
