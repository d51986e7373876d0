"""Who publishes when several peers can: a pure function of the volunteers' signed records.

Nobody is trusted to be at it. The first in line publishes a round when it is due; the next ones look at the place
itself when it is overdue, each a while later than the one before. If two publish at once, nothing is lost: a round's
weights are the same bytes from everybody.
"""

from __future__ import annotations

from collections.abc import Mapping

from blake3 import blake3

from spes_swarm.protocol.members.records import Volunteer

# A volunteer that says it is uploading is given so many periods before the next in line takes over.
_PATIENCE_PERIODS = 2


def target_digest(run_id: str, target: str) -> bytes:
    """What a record says of the place: equal for all who publish there, and not the place itself."""
    return blake3(f"{run_id}\0{target}".encode()).digest(16)


def line_of(volunteers: Mapping[str, Volunteer], target: bytes) -> list[str]:
    """The volunteers for one place, in the order in which they publish: who is at it already, then by a hash."""

    def order(peer: str) -> tuple[bool, bytes]:
        return not volunteers[peer].publishing, blake3(target + peer.encode()).digest()

    return sorted((peer for peer, volunteer in volunteers.items() if volunteer.target == target), key=order)


def periods_to_wait(volunteers: Mapping[str, Volunteer], target: bytes, me: str) -> int:
    """How many periods a round may be overdue before it is for `me` to publish it; 0 for the first in line.

    A volunteer whose own record is not among the others' yet counts as if it were.
    """
    known = dict(volunteers)
    if me not in known:
        known[me] = Volunteer(expires=1.0, target=target, publishing=False)
    line = line_of(known, target)
    others_at_it = known[line[0]].publishing and line[0] != me
    return line.index(me) + (_PATIENCE_PERIODS if others_at_it else 0)
