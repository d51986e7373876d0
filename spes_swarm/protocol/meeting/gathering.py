"""A round that is being gathered: who has come, who leads it, and for how long the others are awaited."""

from __future__ import annotations

from dataclasses import dataclass, field

from spes_swarm.protocol.members.reputation import Neighbour

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
# always so slow does not wait for ever. A leader gives those as long that may come although the window is over.
SLEPT_S, _RETURN_S, _MAX_SLEEPS = 2.5, 2 * POLL_S, 2

# What a peer may report that was called: that it follows nobody, or neither that nor whom it follows, since it is at an
# earlier round or does not know the caller; otherwise whom it follows. No peer has these ids.
IDLE, BEHIND = "idle", "behind"


@dataclass(slots=True)
class Calling:
    """Calls to one missing peer."""

    due: float  # math.inf: it has not answered yet
    failures: int = 0  # in a row


@dataclass(slots=True)
class Gathering:
    """What a leader knows while it gathers a round; times are the machine's."""

    window_s: float
    polls_count_from: float = 0.0
    opened: float | None = None  # the window begins when the leader is here, or more than may be hostile
    sealed: dict[str, bytes] = field(default_factory=dict)  # the signed statements
    last_poll: dict[str, float] = field(default_factory=dict)
    calls: dict[str, Calling] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)  # peers that cannot be reached, or do not come
    past: set[str] = field(default_factory=set)  # peers that report that this round is over
    reported: dict[str, str] = field(default_factory=dict)  # by peer that was called: its leader, or one of the above
    answered_at: dict[str, float] = field(default_factory=dict)  # when they did
    redirect: str | None = None  # a better leader
    _sleeps: int = 0
    _awaits_all_until: float = 0.0

    def describe(self, now: float) -> str:
        """What the leader knows, for the log."""
        return (
            f"open since {self.opened}, at {now}, here {sorted(self.present(now))}, lost {sorted(self.lost)}, "
            f"reported {self.reported}, past it {sorted(self.past)}, redirects to {self.redirect}"
        )

    def note_sleep(self, now: float, polls_count_from: float) -> None:
        """Waits longer for the others, since the leader has not run for a while."""
        if self._sleeps < _MAX_SLEEPS:
            self._sleeps += 1
            self.polls_count_from, self._awaits_all_until = polls_count_from, now + _RETURN_S

    def add(self, peer_id: str, sealed: bytes, now: float) -> None:
        """Notes a poll of a peer, with its statement."""
        self.sealed[peer_id] = sealed
        self.last_poll[peer_id] = now
        self.lost.discard(peer_id)
        self.reported.pop(peer_id, None)
        self.calls.pop(peer_id, None)

    def present(self, now: float) -> dict[str, bytes]:
        """Returns the statements of the peers that still poll."""
        oldest = max(now - FRESH_S, self.polls_count_from)
        return {peer: sealed for peer, sealed in self.sealed.items() if self.last_poll[peer] >= oldest}

    def away(self, now: float, idle: bool = False, elsewhere: bool = False) -> set[str]:
        """Returns who is not about to come: who does not answer, who follows nobody, who is at another round.

        The second and the third if `idle` and `elsewhere`.
        """
        what = (IDLE,) * idle + (BEHIND,) * elsewhere
        said = {peer for peer, answer in self.reported.items() if answer in what}
        return (self.lost if elsewhere else self.lost - self.past) | (said - self.present(now).keys())

    def has_waited(self, now: float, seconds: float) -> bool:
        """Returns True once the window has been open for so long and _RETURN_S more."""
        return self.opened is not None and now >= self.opened + seconds + _RETURN_S

    def answers(self, since: float) -> dict[str, str]:
        """Returns what the peers have reported since then."""
        return {peer: what for peer, what in self.reported.items() if self.answered_at[peer] >= since}

    def awaits(self, peer: Neighbour, now: float, late_until: float) -> bool:
        """Returns True while this gathering waits for a peer; `late_until`: at least until then."""
        if self.opened is None:
            return True
        limit_s = min(peer.wait_s, self.window_s)
        if limit_s < self.window_s:  # it has missed rounds
            late_until = 0.0
        return now < max(self._awaits_all_until, self.opened + limit_s, late_until)
