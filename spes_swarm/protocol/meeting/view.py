"""What one peer knows of the others at one moment: whose claims about a round count, and who may lead it.

Only members of the electorate, whose claims count (see reputation.py), lead rounds, call for a round or start to gather
one. The peers of a round rank each other by a hash of (run, round, peer id).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from blake3 import blake3

from spes_swarm.protocol.members.reputation import Neighbour


def rank(run_id: str, round_number: int, peer_id: str) -> bytes:
    """Rank of a candidate for leading a round; the smallest leads."""
    return blake3(f"{run_id}|{round_number}|{peer_id}".encode()).digest()


@dataclass(frozen=True, slots=True)
class View:
    """What one peer knows at one moment."""

    run_id: str
    me: str
    target: int  # the round that this peer wants to commit next
    neighbours: tuple[Neighbour, ...] = ()  # the other peers that a round may currently include
    reachable: bool = True  # others can connect to this peer; otherwise it leads no rounds
    defers: bool = False  # this peer leaves it to others to lead rounds
    without_duty: frozenset[str] = frozenset()  # who leads only if nobody else can, maybe this peer
    is_blind: bool = False  # this peer may have slept and lost sight of the others

    def electorate(self) -> set[str]:
        """The other peers whose claims count here. A peer that defers has no members yet, so it counts all of them."""
        return {n.peer_id for n in self.neighbours if n.in_electorate or self.defers}

    def best_leader(self, round_number: int, failed: Collection[str]) -> str | None:
        """Returns the best-ranked peer that may lead a round and has not failed."""
        able = [n for n in self.neighbours if n.reachable and n.peer_id not in failed]
        candidates = [n.peer_id for n in able if n.in_electorate]
        if self.defers:
            candidates = candidates or [n.peer_id for n in able]
        elif self.reachable and self.me not in failed:
            candidates.append(self.me)
        return min(candidates, key=lambda peer: rank(self.run_id, round_number, peer), default=None)

    def is_better(self, leader: str, round_number: int) -> bool:
        """Returns True if a peer may lead a round and ranks before this one."""
        able = {n.peer_id for n in self.neighbours if n.reachable and n.in_electorate}
        return leader in able and self.ranks_before(leader, self.me, round_number)

    def ranks_before(self, leader: str, other: str, round_number: int) -> bool:
        """Returns True if a peer ranks before another one."""
        return rank(self.run_id, round_number, leader) < rank(self.run_id, round_number, other)

    def may_lead(self, peer_id: str) -> bool:
        """Returns True if a peer is live and can be connected to."""
        return any(n.peer_id == peer_id and n.reachable for n in self.neighbours)

    def move_median(self, peers: Iterable[str], absent: Collection[str] = ()) -> bool:
        """Returns True if these are enough of the electorate not `absent` to move the median of their claims."""
        electorate = self.electorate().difference(absent)
        return len(electorate.intersection(peers)) > len(electorate) // 2

    def are_majority(self, peers: Iterable[str], absent: Collection[str] = ()) -> bool:
        """Returns True if these are most of the electorate not `absent`; unless it defers, this peer belongs to it."""
        electorate = self.electorate().difference(absent) | (set() if self.defers else {self.me})
        return 2 * len(electorate.intersection(peers)) > len(electorate)

    def outnumber_liars(self, peers: Iterable[str]) -> bool:
        """Returns True if these are more of the electorate than may be hostile."""
        return 4 * len(self.electorate().intersection(peers)) > len(self.electorate()) + 1
