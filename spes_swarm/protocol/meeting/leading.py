"""The leader's side: the rounds that others come to, and the polls that wait for their groups.

Whether or not this peer attempts a round, it gathers for those that poll it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spes_swarm.base.errors import ProtocolError, RoundError
from spes_swarm.protocol.meeting.gathering import BEHIND, IDLE, POLL_S, Calling, Gathering
from spes_swarm.protocol.meeting.outputs import Answer, Call, Called, Fault, Reply
from spes_swarm.protocol.meeting.state import State
from spes_swarm.protocol.members.reputation import Neighbour

# How often a leader waits for most of the electorate; by then, those that followed another leader have passed it over.
_MOST_WAITS = 3


@dataclass(slots=True)
class _Pending:
    """A poll that has not been answered yet."""

    peer: str
    round: int
    sealed: bytes
    until: float
    gathering: Gathering | None = None  # that it has come to


class Leading:
    """The gatherings at one peer, and the polls that wait for them.

    Attributes:
        gatherings: by round.
    """

    def __init__(self, state: State) -> None:
        self.gatherings: dict[int, Gathering] = {}
        self._state = state
        self._pending: dict[int, _Pending] = {}
        self._polls_count_from = 0.0

    @property
    def busy(self) -> bool:
        """True while somebody waits here."""
        return bool(self.gatherings or self._pending)

    def gathering(self, number: int) -> Gathering:
        """The gathering of a round, which begins if there is none."""
        return self.gatherings.setdefault(number, Gathering(self._state.window_s, self._polls_count_from))

    def note_sleep(self, now: float) -> None:
        """Notes that this peer has not run for a while: the polls that it gets at first may be old."""
        self._polls_count_from = now + POLL_S / 2
        for gathering in self.gatherings.values():
            gathering.note_sleep(now, self._polls_count_from)

    def is_followed_by_most(self, gathering: Gathering) -> bool:
        """Returns True if most of all poll this peer, and it does not know of a better leader."""
        view, followers = self._state.view, gathering.present(self._state.now).keys() - {self._state.view.me}
        return gathering.redirect is None and not view.defers and view.are_majority(followers)

    def redirects_to(self, number: int) -> str | None:
        """The better leader to which this peer sends others. A gathering ends if that one has failed here, or left."""
        gathering, known, view = self.gatherings.get(number), self._state.known(number), self._state.view
        if gathering is None or (leader := gathering.redirect) is None:
            return None
        if leader in known.failed() or not view.may_lead(leader):
            self.drop(number, f"{leader}, to whom it sends others, has failed or left")
            return None
        return leader

    def drop(self, number: int, why: str) -> None:
        """Ends a gathering."""
        del self.gatherings[number]
        self._state.say(number, f"drops its gathering: {why}")

    def enqueue(self, key: int, peer: str, number: int, sealed: bytes) -> None:
        """Keeps a poll until there is an answer for the follower."""
        self._pending[key] = _Pending(peer, number, sealed, self._state.now + POLL_S)

    def step(self) -> None:
        """Lets in who polls, calls who is missing, and closes groups."""
        state = self._state
        for poll in self._pending.values():
            self._let_in(poll)
        for number, gathering in list(self.gatherings.items()):
            if number < state.view.target and not state.leader_in(number):
                self.drop(number, "it is over")
            elif self.redirects_to(number) is None and number in self.gatherings and state.closed_in(number) is None:
                # One follower that is early would otherwise have this peer tell the others that it is at that round.
                if number <= state.view.target or gathering.opened is not None:
                    self._call(number, gathering)
                self._close(number, gathering)

    def answer(self) -> None:
        """Answers the polls that have an answer by now."""
        for key, poll in list(self._pending.items()):
            if (answer := self._answer_to(poll)) is not None:
                del self._pending[key]
                self._state.outputs.append(Reply(key, answer))

    def _outcome(self, number: int) -> Answer | None:
        """The answer to all who ask for a round that has been closed here or is over."""
        group, over = self._state.closed_in(number), number < self._state.view.target
        if group is not None:
            return {"group": list(group.sealed), "over": over}
        return {"over": True} if over else None

    def call_answered(self, call: Call, answer: Answer | ProtocolError | None) -> None:
        """A missing peer has answered its call; see Meeting."""
        gathering = self.gatherings.get(call.round)
        calling = gathering.calls.get(call.peer) if gathering is not None else None
        if gathering is None or calling is None or calling.due < math.inf:
            return
        calling.due = self._state.now + POLL_S / 2
        try:
            if isinstance(answer, ProtocolError):
                raise answer
            if answer is not None:
                self._hear(call.peer, call.round, gathering, answer)
                calling.failures = 0
                return
        except ProtocolError as exc:
            self._state.outputs.append(Fault(call.peer, exc))
        calling.failures += 1
        if calling.failures == 2:
            self._lose(call.round, gathering, call.peer, "does not answer")

    def _let_in(self, poll: _Pending) -> None:
        """Adds a poll to the gathering of its round, if there is one or it may begin one."""
        number, state = poll.round, self._state
        if poll.gathering is not None or self._outcome(number) is not None or state.stands_aside(number):
            return
        # Strangers may only join. One that is early is held: a round may begin and be closed between two polls.
        if number in self.gatherings or (poll.peer in state.view.electorate() and not state.view.defers):
            poll.gathering = self.gathering(number)
            if poll.gathering.redirect == poll.peer:  # it follows this peer, so it does not lead
                poll.gathering.redirect = None
            if poll.gathering.redirect is None:
                poll.gathering.add(poll.peer, poll.sealed, state.now)

    def _call(self, number: int, gathering: Gathering) -> None:
        state = self._state
        for peer in self._missing(gathering):
            calling, is_me = gathering.calls.setdefault(peer.peer_id, Calling(state.now)), peer.peer_id == state.view.me
            if state.now >= calling.due:
                calling.due = state.now + POLL_S / 2 if is_me else math.inf
                state.outputs.append(Called(number) if is_me else Call(peer.peer_id, number))

    def _missing(self, gathering: Gathering) -> list[Neighbour]:
        """Those that may come, maybe this peer."""
        view, present = self._state.view, gathering.present(self._state.now)
        peers = Neighbour(view.me, view.reachable), *view.neighbours
        return [peer for peer in peers if peer.peer_id not in present.keys() | gathering.lost]

    def _close(self, number: int, gathering: Gathering) -> None:
        """Closes the group when no other peer is awaited any more, or drops the gathering."""
        state, view, now = self._state, self._state.view, self._state.now
        present = gathering.present(now)
        # Do most of the electorate, of those that come or answer, say that the round is over?
        if view.move_median(gathering.past, gathering.lost.difference(gathering.past, present)):
            why = f"most say that round {number} is over"
            self.drop(number, why)
            state.give_up(number, RoundError(why))  # alone, it would fork the reference
            return
        # Otherwise a hostile follower that is early could have it closed before the others come.
        if gathering.opened is None and (view.me in present or view.outnumber_liars(present)):
            gathering.opened = now
        known, missing = state.known(number), self._missing(gathering)
        late_until = known.timeouts.passed_over + gathering.window_s
        if not present or any(
            gathering.awaits(peer, now, late_until if self._is_late(peer, number, gathering) else 0.0)
            for peer in missing
        ):
            return
        # Those that are called and train on are away. But a group of a few gives a moment to all.
        away = gathering.away(now, idle=gathering.has_waited(now, 0.0), elsewhere=known.waited_for_most > 0)
        if known.waited_for_most < _MOST_WAITS and not view.are_majority(present, away):
            if gathering.has_waited(now, gathering.window_s):
                why = f"most others are not at round {number}"
                self.drop(number, why)
                if state.leader_in(number) == view.me:
                    known.end_in_vain()
                    known.waited_for_most += 1  # before its next attempt, this peer finds out where most are
                    state.give_up(number, RoundError(why))
            return
        if not view.neighbours and view.is_blind:
            return
        sealed = [each for peer, each in present.items() if not state.leaves_out(peer)]
        try:
            state.close(state.form(number, sealed), view.me)
        except ProtocolError as exc:  # one of them may take part no longer
            self.drop(number, f"its statements make no group: {exc}")

    def _is_late(self, peer: Neighbour, number: int, gathering: Gathering) -> bool:
        """Returns True if a peer follows a leader that has failed here, or if it is this one, which follows another.

        It comes within a window of when all have passed that leader over. Otherwise a hostile leader could fail one
        peer only, and that peer would commit the round alone.
        """
        if peer.peer_id == self._state.view.me:
            return bool(self._state.leader_in(number))
        failed = self._state.known(number).failed()
        return peer.in_electorate and peer.peer_id not in failed and gathering.reported.get(peer.peer_id) in failed

    def _hear(self, peer: str, number: int, gathering: Gathering, answer: Answer) -> None:
        """Hears what a missing peer answers."""
        state, view = self._state, self._state.view
        if gathering.redirect is not None or state.closed_in(number) is not None:
            return
        if peer in view.electorate():
            state.adopt(answer, number, peer, absent=gathering.lost)
        leader, target = answer.get("leader"), answer.get("target")
        gathering.answered_at[peer] = state.now
        if isinstance(target, int) and target > number:
            gathering.past.add(peer)
            self._lose(number, gathering, peer, f"says that the round is over; its next one is {target}")
        elif isinstance(leader, str) and (leader == view.me or view.may_lead(leader)):
            gathering.reported[peer] = leader
            agreed = {other for other, what in gathering.reported.items() if what == leader}
            together = len(agreed) > 1 and view.move_median(agreed, gathering.lost)
            leads = leader not in gathering.present(state.now) and leader != view.me
            failed = leader in state.known(number).failed()
            has_most = view.are_majority(gathering.present(state.now))  # or one liar could send it to and fro
            if leads and not failed and (together or (view.is_better(leader, number) and not has_most)):
                state.known(number).return_to(leader)
                gathering.redirect = leader
                why = "most follow it" if together else f"{peer} follows it, and it ranks better"
                state.say(number, f"sends others to {leader}: {why}")
        else:
            gathering.reported[peer] = IDLE if target is None and leader is None else BEHIND

    def _lose(self, number: int, gathering: Gathering, peer: str, why: str) -> None:
        gathering.lost.add(peer)
        gathering.reported.pop(peer, None)
        self._state.say(number, f"does not wait for {peer}: it {why}")

    def _answer_to(self, poll: _Pending) -> Answer | None:
        state = self._state
        outcome, late, defers = self._outcome(poll.round), state.now >= poll.until, state.view.defers
        if outcome is not None:
            return outcome
        if poll.gathering is None:
            if leader := state.leader_in(poll.round):
                return {"leader": leader, "defers": defers}
            return {"early": True, "defers": defers} if late or defers else None
        if self.gatherings.get(poll.round) is not poll.gathering:
            return {}
        if poll.gathering.redirect is not None:
            return {"leader": poll.gathering.redirect}
        return {} if late else None
