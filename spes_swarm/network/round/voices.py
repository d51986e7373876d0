"""Who may lead a round, and whose claims about it count: the voices (see standing.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeGuard

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.round.gathering import rank
from spes_swarm.protocol.members.standing import Neighbour


@dataclass(frozen=True)
class Voices:
    """The voices among the other peers of a run, as they are at each call."""

    run_id: str
    peer_id: str  # this peer
    live_peers: Callable[[], Collection[Neighbour]]
    defers: Callable[[], bool]
    without_duty: Callable[[], Collection[str]]

    def others(self) -> set[str]:
        """The other peers whose claims count here; all of them for a peer that defers, which has no members yet."""
        defers = self.defers()
        return {n.peer_id for n in self.live_peers() if n.has_voice or defers}

    def best_leader(self, round_number: int, failed: Collection[str], reachable: bool) -> str | None:
        """Returns the best-ranked peer that may lead a round and has not failed.

        `reachable`: others can connect to this peer.
        """
        able = [n for n in self.live_peers() if n.reachable and n.peer_id not in failed]
        candidates = [n.peer_id for n in able if n.has_voice]
        if self.defers():
            candidates = candidates or [n.peer_id for n in able]
        elif reachable and self.peer_id not in failed:
            candidates.append(self.peer_id)
        return min(candidates, key=lambda peer: rank(self.run_id, round_number, peer), default=None)

    def relieves(
        self, leader: str | None, round_number: int, failed: Collection[str], reachable: bool
    ) -> TypeGuard[str]:
        """Returns True if a leader has no duty, and another one can lead."""
        if leader is None or leader not in self.without_duty():
            return False
        return self.best_leader(round_number, {*failed, leader}, reachable) is not None

    def is_better(self, leader: str, round_number: int) -> bool:
        """Returns True if a peer may lead a round and ranks before this one."""
        able = {n.peer_id for n in self.live_peers() if n.reachable and n.has_voice}
        return leader in able and self.ranks_before(leader, self.peer_id, round_number)

    def ranks_before(self, leader: str, other: str, round_number: int) -> bool:
        """Returns True if a peer ranks before another one."""
        return rank(self.run_id, round_number, leader) < rank(self.run_id, round_number, other)

    def may_lead(self, peer_id: str) -> bool:
        """Returns True if a peer is live and can be connected to."""
        return any(n.peer_id == peer_id and n.reachable for n in self.live_peers())

    def are_most(self, peers: Iterable[str], absent: Collection[str] = ()) -> bool:
        """Returns True if these are enough of the voices not `absent` to move the median of their claims."""
        voices = self.others().difference(absent)
        return len(voices.intersection(peers)) > len(voices) // 2

    def are_majority(self, peers: Iterable[str], absent: Collection[str]) -> bool:
        """Returns True if these are most of the voices not `absent`; this peer is a voice, too, unless it defers."""
        voices = self.others().difference(absent) | (set() if self.defers() else {self.peer_id})
        return 2 * len(voices.intersection(peers)) > len(voices)


def requested_round(request: dict[str, Any], run_id: str) -> int:
    """Returns the round that a request of another peer is about.

    Raises:
        ProtocolError: (`run`) it is about another run, or about no round.
    """
    round_number = request.get("round")
    if request.get("run") != run_id or type(round_number) is not int:  # a bool is an int, too
        raise ProtocolError("run", "the call is for another run, or has no round")
    return round_number
