"""What the parts of the machine share: whom this peer follows, what became of leaders, and which group is closed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable

from spes_swarm.base.errors import ProtocolError, RoundError
from spes_swarm.protocol.meeting.attempt import Attempt, LeaderTimeouts, Memory
from spes_swarm.protocol.meeting.outputs import Answer, Output
from spes_swarm.protocol.meeting.view import View
from spes_swarm.protocol.rounds.statement import Group

_MAX_SPENT = 64


class State:
    """What the parts of the machine share.

    Attributes:
        now: the time, in seconds.
        view: what this peer knows of the others now.
        attempt: this peer's, at the round that it wants to commit.
        memory: of earlier attempts at the same round.
        spent: ids of groups whose exchange has failed here. To hold it again would be to sign other results of it.
        closed: the newest closed group known here.
        closed_at: since when.
        giver: who passed it on.
        leader: who led this peer to it.
        outputs: what is to be done.
        decisions: the reasons, one sentence each.
    """

    def __init__(
        self,
        window_s: float,
        exchange_s: float,
        form: Callable[[int, Iterable[bytes]], Group],
        leaves_out: Callable[[str], bool],
    ) -> None:
        self.window_s, self.exchange_s, self.form, self.leaves_out = window_s, exchange_s, form, leaves_out
        self.now = 0.0
        self.view = View("", "", 0)
        self.attempt: Attempt | None = None
        self.memory = Memory(0, LeaderTimeouts(window_s))
        self.spent: deque[bytes] = deque(maxlen=_MAX_SPENT)
        self.closed: Group | None = None
        self.closed_at = 0.0
        self.giver = self.leader = ""
        self.outputs: list[Output] = []
        self.decisions: list[str] = []

    def say(self, number: int, decision: str) -> None:
        """Notes a decision about a round."""
        self.decisions.append(f"round {number}: {decision}")

    def known(self, number: int) -> Memory:
        """What is remembered of attempts at a round; of other rounds than the last that this peer tried, nothing."""
        return self.memory if self.memory.round == number else Memory(number, LeaderTimeouts(self.window_s))

    def leader_in(self, number: int) -> str:
        """Whom this peer follows in a round, maybe itself; empty: nobody."""
        return self.attempt.leader if self.attempt is not None and self.attempt.round == number else ""

    def stands_aside(self, number: int) -> bool:
        """Returns True if groups that this peer led have failed twice, so that the others turn to the next leader."""
        return self.view.me in self.known(number).failed()

    def closed_in(self, number: int) -> Group | None:
        """The group of a round, if it is the newest that is known."""
        return self.closed if self.closed is not None and self.closed.round == number else None

    def give_up(self, number: int, error: RoundError) -> None:
        """Ends this peer's attempt at a round."""
        if self.attempt is not None and self.attempt.round == number:
            self.say(number, f"gives up: {error}")
            self.attempt.outcome = error

    # Groups.

    def close(self, group: Group, giver: str) -> None:
        """Takes a group, unless a later one is known."""
        if self.closed is None or group.round >= self.closed.round:
            source = "" if giver == self.view.me else f" from {giver}"
            self.say(group.round, f"closes the group of {len(group.members)}{source}")
            self.closed, self.closed_at, self.giver = group, self.now, giver

    def adopt(self, answer: Answer, number: int, giver: str, absent: Collection[str] = ()) -> None:
        """Accepts a closed group, unless its giver has given two that failed.

        One without this peer, or from another peer than the leader, must include most of the electorate not `absent`:
        any peer can form a small group. If most of them have a place in a second group, the first has failed.
        """
        me, closed, sealed, known = self.view.me, self.closed_in(number), answer.get("group"), self.known(number)
        if sealed is None or known.failed_groups[giver] > 1 or (closed is not None and closed.index_of(me) is not None):
            return
        if not (isinstance(sealed, list) and all(isinstance(item, bytes) for item in sealed)):
            raise ProtocolError("malformed", "a group is a list of signed statements")
        group = self.form(number, sealed)
        with_me = group.index_of(me) is not None
        if (closed is not None and not with_me) or group.id in self.spent:
            return
        if self.view.are_majority((member.peer_id for member in group.members), absent):
            self.close(group, giver)
        elif with_me and closed is None and self.attempt is not None and self.leader_in(number) == giver:
            if self.view.defers:  # it trusts its initial peers, and strangers could outnumber them
                self.close(group, giver)
            else:
                self.attempt.offered = self.attempt.offered or (group, self.now)

    def spend(self, group: Group) -> None:
        """Marks a group whose exchange failed here: another attempt at the round needs another group.

        A leader may give different groups to different members, which then all fail; after the second, it is passed
        over. An honest leader stands aside then, too, or it would go on without its members.
        """
        known = self.known(group.round)
        self.spent.append(group.id)
        known.note_failed_group(self.giver, self.leader)
        if self.closed is not None and self.closed.id == group.id:
            self.closed = None
