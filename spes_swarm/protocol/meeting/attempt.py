"""A peer's attempt to get into the group of a round, and what it remembers of earlier ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from spes_swarm.base.errors import RoundError
from spes_swarm.protocol.meeting.gathering import LEADER_GRACE_S, POLL_TIMEOUT_S
from spes_swarm.protocol.meeting.outputs import Poll
from spes_swarm.protocol.rounds.statement import Group, Statement


@dataclass(slots=True)
class Attempt:
    """This peer's way into the group of a round."""

    statement: Statement
    sealed: bytes
    began: float
    deadline: float
    leader: str = ""  # idle if there is none; this peer: it leads; another one: it follows
    until: float = 0.0  # it follows its leader
    redirects: int = 0
    poll: Poll | None = None  # that its leader has not answered yet
    poll_at: float = 0.0  # the next one
    heard: bool = False  # a leader has answered: it would have known of a later group than the one known here
    offered: tuple[Group, float] | None = None  # by its leader, without most of the electorate; and when
    outcome: Group | RoundError | None = None

    @property
    def round(self) -> int:
        """The round that it is for."""
        return self.statement.round


class Fate(StrEnum):
    """What became of a leader. One that has not FAILED may be followed once more in the round."""

    FAILED = "failed"
    SILENT = "silent"  # it did not answer; it is followed again if it calls
    EARLY = "early"  # it had not begun the round; it is followed again if it calls
    BACK = "back"  # it has called, after one of these two
    PAST = "past"  # it reported the round as over; it is followed again if others follow it
    RETURNED = "returned"  # others follow it, after this
    LATE = "late"  # it did not close the group in time; it is followed again after an attempt of this peer to lead


class LeaderTimeouts:
    """Until when a peer follows each leader of a round; a leader may wait for those who still follow the one before."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self.passed_over = 0.0  # when all who follow the leader followed last have passed it over
        self._leader = ""
        self._until: dict[str, float] = {}

    def turn_to(self, leader: str, now: float, again: bool = False) -> float:
        """Returns until when to follow a leader. Each further one gets a window more.

        `again`: it did not answer, and has come back. It gets no window more, or it could divide the others.
        """
        if again:
            until = max(self._until.get(leader, 0.0), now + LEADER_GRACE_S + POLL_TIMEOUT_S)
            self.passed_over = self._until[leader] = until
        elif leader != self._leader:
            until = max(now, self.passed_over) + self._window_s + LEADER_GRACE_S + POLL_TIMEOUT_S
            self.passed_over = self._until[leader] = until
        self._leader = leader
        return self.passed_over - POLL_TIMEOUT_S


@dataclass(slots=True)
class Memory:
    """What a peer remembers of its earlier attempts at a round."""

    round: int
    timeouts: LeaderTimeouts
    leaders: dict[str, Fate] = field(default_factory=dict)
    failed_groups: Counter[str] = field(default_factory=Counter)  # by these peers: failed groups
    left_out_since: float | None = None  # by groups of this round
    waited_for_most: int = 0  # attempts to lead that have ended since most others were elsewhere

    def failed(self) -> set[str]:
        """Leaders that this peer follows no longer."""
        return self.passed_over() - {leader for leader, what in self.leaders.items() if what is Fate.PAST}

    def passed_over(self) -> set[str]:
        """These, and those for which the round is over."""
        return {leader for leader, what in self.leaders.items() if what not in (Fate.BACK, Fate.RETURNED)}

    def note_failed_group(self, giver: str, leader: str) -> None:
        """Notes a group that failed: who passed it on, and who led this peer to it."""
        self.failed_groups.update({giver, leader})
        if self.failed_groups[leader] > 1:
            self.leaders[leader] = Fate.FAILED

    def bring_back(self, leader: str) -> bool:
        """Has this peer follow a leader again that did not answer, or had not begun; returns False for others."""
        comes_back = self.leaders.get(leader) in (Fate.SILENT, Fate.EARLY)
        if comes_back:
            self.leaders[leader] = Fate.BACK
        return comes_back

    def end_in_vain(self) -> None:
        """Forgets which leaders were late: this peer, which led instead, has found too few others."""
        self.leaders = {leader: what for leader, what in self.leaders.items() if what != Fate.LATE}

    def return_to(self, leader: str) -> None:
        """The same for one that has reported the round as over."""
        if self.leaders.get(leader) == Fate.PAST:
            self.leaders[leader] = Fate.RETURNED

    def note(self, leader: str, what: Fate) -> None:
        """Notes what became of a leader. One that has come back once has failed for good."""
        self.leaders[leader] = Fate.FAILED if self.leaders.get(leader) in (Fate.BACK, Fate.RETURNED) else what
