"""Decides which of several volunteers publishes: a pure function of their signed records.

No volunteer is trusted to publish. The first in line publishes a round when it is due. When the round is overdue, the
next ones check the target itself, each some time after the one before. If two publish at once, nothing is lost: both
write the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

from blake3 import blake3

from spes_swarm.protocol.members.records import Volunteer

# Periods for which the next in line waits for a volunteer that announces an upload.
_PATIENCE_PERIODS = 2


def target_digest(run_id: str, target: str) -> bytes:
    """Identifies a target in the records of its volunteers without disclosing it."""
    return blake3(f"{run_id}\0{target}".encode()).digest(16)


def line_of(volunteers: Mapping[str, Volunteer], target: bytes) -> list[str]:
    """The volunteers for one target in the order in which they publish: those already publishing, then by hash."""

    def order(peer: str) -> tuple[bool, bytes]:
        return not volunteers[peer].publishing, blake3(target + peer.encode()).digest()

    return sorted((peer for peer, volunteer in volunteers.items() if volunteer.target == target), key=order)


def periods_to_wait(volunteers: Mapping[str, Volunteer], target: bytes, me: str) -> int:
    """Returns how many periods overdue a round must be for `me` to publish it; 0 for the first in line.

    If `volunteers` does not contain `me` yet, it counts as if it did.
    """
    known = dict(volunteers)
    if me not in known:
        known[me] = Volunteer(expires=1.0, target=target, publishing=False)
    line = line_of(known, target)
    others_at_it = known[line[0]].publishing and line[0] != me
    return line.index(me) + (_PATIENCE_PERIODS if others_at_it else 0)
