"""A peer's attempt to get into the group of a round, what it remembers of earlier ones, and the polls that it holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from spes_swarm.base.errors import RoundError
from spes_swarm.protocol.meeting.gathering import Gathering, Patience
from spes_swarm.protocol.rounds.statement import Group, Statement


@dataclass(slots=True)
class Attempt:
    """This peer's way into the group of a round."""

    statement: Statement
    sealed: bytes
    deadline: float
    leader: str = ""  # idle if there is none; this peer: it leads; another one: it follows
    until: float = 0.0  # it follows its leader
    redirects: int = 0
    poll_at: float = 0.0
    asked: float = 0.0  # when its leader was polled last
    polls: bool = False  # it has not answered yet
    heard: bool = False  # a leader has answered: it would have known of a later group than the one known here
    number: int = 0  # of its last poll
    offered: tuple[Group, float] | None = None  # by its leader, without most of the voices; and when
    outcome: Group | RoundError | None = None

    @property
    def round(self) -> int:
        """The round that it is for."""
        return self.statement.round


# What became of a leader: it failed; it did not answer, and is followed again if it calls, once per round; it reported
# the round as over; it came back to the round after that, which is believed once per round.
FAILED, SILENT, PAST, RETURNED = "failed", "silent", "past", "returned"


@dataclass(slots=True)
class Memory:
    """What a peer remembers of its earlier attempts at a round."""

    round: int
    patience: Patience
    leaders: dict[str, str] = field(default_factory=dict)  # what became of leaders; one of the above
    retried: bool = False  # a leader that did not answer is followed again
    spent: set[bytes] = field(default_factory=set)  # ids of groups whose exchange failed
    spoiled: Counter[str] = field(default_factory=Counter)  # by these peers: failed groups
    left_out_since: float | None = None  # by groups of this round

    def failed(self) -> set[str]:
        """Leaders that this peer follows no longer."""
        return {leader for leader, what in self.leaders.items() if what in (FAILED, SILENT)}

    def passed_over(self) -> set[str]:
        """These, and those for which the round is over."""
        return {leader for leader, what in self.leaders.items() if what != RETURNED}

    def forgive(self) -> None:
        """Forgets what leaders did."""
        self.leaders.clear()
        self.spoiled.clear()
        self.retried = False


@dataclass(slots=True)
class Held:
    """A poll that has not been answered yet."""

    peer: str
    round: int
    sealed: bytes
    until: float
    gathering: Gathering | None = None  # that it has come to
