"""A round that is being gathered: who has come, who leads it, and for how long the others are awaited."""

from __future__ import annotations

from dataclasses import dataclass, field

from spes_swarm.protocol.members.standing import Neighbour

# A follower polls its leader at least this often. One that is silent for a second more than three times that is gone.
POLL_S = 1.0
FRESH_S = 3 * POLL_S + 1.0
CALL_TIMEOUT_S = 2.5
POLL_TIMEOUT_S = POLL_S + CALL_TIMEOUT_S
# A leader closes the group when the window is over; one that takes this much longer is passed over. On a machine with
# many more runnable processes than cores, honest leaders have been seen two seconds late.
LEADER_GRACE_S = 4 * POLL_S
# A peer that has not run for SLEPT_S (its process was stopped, its machine slept) has been passed over, or is about to
# be. As a leader it waits for the others for another _RETURN_S, which LEADER_GRACE_S includes; but a machine that is
# always so slow does not wait for ever.
SLEPT_S, _RETURN_S, _MAX_SLEEPS = 2.5, 2 * POLL_S, 2


# What a peer that was called may say instead of whom it follows: it follows nobody, or it has yet to come so far.
IDLE, BEHIND = "idle", "behind"


@dataclass(slots=True)
class Calling:
    """Calls to one missing peer."""

    due: float
    busy: bool = False  # it has not answered yet
    failures: int = 0  # in a row


@dataclass(slots=True)
class Gathering:
    """What a leader knows while it gathers a round; times are the machine's."""

    window_s: float
    opened: float | None = None  # the window begins when the leader or most of the voices are here
    sealed: dict[str, bytes] = field(default_factory=dict)  # the signed statements
    last_poll: dict[str, float] = field(default_factory=dict)
    calls: dict[str, Calling] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)  # peers that cannot be reached, or do not come
    past: set[str] = field(default_factory=set)  # peers that report that this round is over
    said: dict[str, str] = field(default_factory=dict)  # by peer that was called: its leader, or one of the above
    redirect: str | None = None  # a better leader
    looks: bool | None = None  # for others, since it knows of none; False: it has
    _sleeps: int = 0
    _awaits_all_until: float = 0.0

    def describe(self, now: float) -> str:
        """What the leader knows, for the log."""
        return (
            f"open for {now - (self.opened or now):.1f} s, here {sorted(self.present(now))}, lost {sorted(self.lost)}, "
            f"said {self.said}, past it {sorted(self.past)}, redirects to {self.redirect}"
        )

    def slept(self, now: float) -> None:
        """Waits longer for the others, since this peer has not run for a while."""
        if self._sleeps < _MAX_SLEEPS:
            self._sleeps += 1
            self._awaits_all_until = now + _RETURN_S

    def add(self, peer_id: str, sealed: bytes, now: float) -> None:
        """Notes a poll of a peer, with its statement."""
        self.sealed[peer_id] = sealed
        self.last_poll[peer_id] = now
        self.lost.discard(peer_id)
        self.said[peer_id] = BEHIND

    def present(self, now: float) -> dict[str, bytes]:
        """Returns the statements of the peers that still poll."""
        return {peer: sealed for peer, sealed in self.sealed.items() if self.last_poll[peer] >= now - FRESH_S}

    def away(self, answers_count: bool) -> set[str]:
        """Returns who is not about to come: who does not answer and, if their answers count, who follows nobody."""
        idle = {peer for peer, what in self.said.items() if what == IDLE} if answers_count else set()
        return (self.lost - self.past) | idle

    def coming(self) -> set[str]:
        """Returns who has said that it is on its way to the round, here or elsewhere."""
        return {peer for peer, what in self.said.items() if what != IDLE}

    def awaits(self, peer: Neighbour, now: float, passed_over: float) -> bool:
        """Returns True while this gathering waits for a peer.

        `passed_over`: when all who followed the leader that failed here have passed it over, too. They then come within
        a window. Otherwise a hostile leader could fail one peer only, and that peer would commit the round alone.
        """
        if self.opened is None:
            return True
        limit_s = min(peer.patience_s, self.window_s)
        until = max(self._awaits_all_until, self.opened + limit_s)
        if self.said.get(peer.peer_id, IDLE) not in (IDLE, BEHIND) and limit_s >= self.window_s:
            until = max(until, passed_over + self.window_s)
        return now < until


class Patience:
    """Until when a peer follows each leader of a round; a leader may wait for those who still follow the one before."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self.passed_over = 0.0  # when all who follow the leader followed last have passed it over
        self._leader = ""
        self._until: dict[str, float] = {}
        self._back: set[str] = set()

    def turn_to(self, leader: str, now: float) -> float:
        """Returns until when to follow a leader. Each further one gets a window more."""
        if leader != self._leader:
            self._leader = leader
            if leader in self._back:
                self._extend(leader, now)
            else:
                self._set(leader, max(now, self.passed_over) + self._window_s + LEADER_GRACE_S + POLL_TIMEOUT_S)
        return self.passed_over - POLL_TIMEOUT_S

    def return_to(self, leader: str, now: float) -> None:
        """Notes that a leader which did not answer is followed again: no window more, or it could divide the others."""
        self._back.add(leader)
        if leader == self._leader:
            self._extend(leader, now)

    def _extend(self, leader: str, now: float) -> None:
        self._set(leader, max(self._until.get(leader, 0.0), now + LEADER_GRACE_S + POLL_TIMEOUT_S))

    def _set(self, leader: str, until: float) -> None:
        self.passed_over = self._until[leader] = until
