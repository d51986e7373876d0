"""For how long a peer follows the leaders of a round that do not close the group."""

from __future__ import annotations

from spes_swarm.network.round.gathering import LEADER_GRACE_S, POLL_TIMEOUT_S, now


class Patience:
    """Until when a peer follows each leader of a round; a leader may wait for those who still follow the one before."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self.clear()

    def clear(self) -> None:
        """Forgets all leaders."""
        self.passed_over = 0.0  # when all who follow the leader followed last have passed it over
        self._leader = ""
        self._until: dict[str, float] = {}
        self._back: set[str] = set()

    def turn_to(self, leader: str) -> float:
        """Returns until when to follow a leader. Each further one gets a window more."""
        if leader != self._leader:
            self._leader = leader
            if leader in self._back:
                self._extend(leader)
            else:
                self._set(leader, max(now(), self.passed_over) + self._window_s + LEADER_GRACE_S + POLL_TIMEOUT_S)
        return self.passed_over - POLL_TIMEOUT_S

    def return_to(self, leader: str) -> None:
        """Notes that a leader which did not answer is followed again: no window more, or it could divide the others."""
        self._back.add(leader)
        if leader == self._leader:
            self._extend(leader)

    def _extend(self, leader: str) -> None:
        self._set(leader, max(self._until.get(leader, 0.0), now() + LEADER_GRACE_S + POLL_TIMEOUT_S))

    def _set(self, leader: str, until: float) -> None:
        self.passed_over = self._until[leader] = until
