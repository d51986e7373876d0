"""A round that is being gathered: who has come, and for how long the others are awaited."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from spes_swarm.base.changes import Changes
from spes_swarm.protocol.members.standing import Neighbour
from spes_swarm.protocol.rounds.statement import Member

# A follower polls its leader at least this often. One that is silent for a second more than three times that is gone.
POLL_S = 1.0
# A leader closes the group when the window is over; one that takes this much longer is passed over. On a machine with
# many more runnable processes than cores, honest leaders have been seen two seconds late.
LEADER_GRACE_S = 4 * POLL_S


def now() -> float:
    """Returns the time of the event loop, in seconds."""
    return asyncio.get_running_loop().time()


@dataclass(slots=True)
class Gathering:
    """A leader's state while it gathers a round."""

    window_s: float
    sealed: dict[str, bytes] = field(default_factory=dict)  # the signed statements
    last_poll: dict[str, float] = field(default_factory=dict)
    opened: float = field(default_factory=now)
    lost: set[str] = field(default_factory=set)  # peers that cannot be reached, or do not come
    past: set[str] = field(default_factory=set)  # peers that report that this round is over
    elsewhere: set[str] = field(default_factory=set)  # peers that wait for a leader that has failed here
    redirect: str | None = None
    changed: Changes = field(default_factory=Changes)

    def add(self, member: Member, sealed: bytes) -> None:
        """Notes a poll of a peer, with its statement."""
        if self.sealed.get(member.peer_id) != sealed:
            self.sealed[member.peer_id] = sealed
            self.changed.notify()
        self.lost.discard(member.peer_id)
        self.last_poll[member.peer_id] = now()

    def awaits(self, peer: Neighbour) -> bool:
        """Returns True while this gathering waits for a peer.

        One that waits for another leader passes that over in its turn, and comes. A hostile leader that fails one peer
        only would otherwise have that one commit the round alone.
        """
        limit_s = min(peer.patience_s, self.window_s)
        if peer.peer_id in self.elsewhere and limit_s == self.window_s:
            limit_s = 2 * self.window_s + LEADER_GRACE_S
        return now() - self.opened < limit_s

    def present(self) -> list[bytes]:
        """Returns the statements of the peers that still poll."""
        oldest = now() - 3 * POLL_S - 1.0
        return [sealed for peer, sealed in self.sealed.items() if self.last_poll[peer] >= oldest]
