"""Forms the group of each round: one group per round, even if peers die meanwhile. A pure machine, one at each peer.

The best-ranked live peer leads (see view.py): it gathers the signed statements, calls the peers that are missing, and
closes the group when all have come or the window is over (for peers that still follow a leader that has failed here,
after two windows and a few seconds; each further leader that fails adds a window). A peer that gets no answer from a
leader turns to the next in rank. Once per round, it turns back to each such leader when it calls: one that was frozen
would otherwise close a second group. A leader that learns of a better one sends its followers there. Every peer that
has the closed group passes it on, so a leader that dies while it announces the group does not split it.

No peer is assumed to be honest. How long a leader waits for a peer depends on that peer's history. A leader that does
not close the group in time, sends its followers in circles, or whose groups have failed twice is passed over; the first
to pass it over waits for the peers that still follow it. A group that leaves this peer out is accepted only if it
includes most of the electorate, and only for as long as its exchange may take. A claim that the swarm is further on
counts only if enough of the electorate makes it to move the median of their records.

A newcomer defers to the initial peers: it follows them, and leads no round before its first commit. Peers that know it
from earlier rounds may rank it first; it says that it defers, and they turn to the next. Peers that defer themselves
keep following it. A leader that has lost its duties is passed over at once.

The state of an attempt: idle -> leading or following(leader) -> closed, or given up. What it knows is in `state`, the
leader's side in `leading`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from spes_swarm.base.errors import NoLeaderError, ProtocolError, RoundError
from spes_swarm.protocol.meeting.attempt import Attempt, Fate, LeaderTimeouts, Memory
from spes_swarm.protocol.meeting.gathering import BEHIND, IDLE, POLL_S, SLEPT_S
from spes_swarm.protocol.meeting.leading import Leading
from spes_swarm.protocol.meeting.outputs import Ahead, Answer, Call, Called, Fault, Output, Poll, Stall
from spes_swarm.protocol.meeting.state import State
from spes_swarm.protocol.meeting.view import View
from spes_swarm.protocol.rounds.statement import Group, Statement

TICK_S = POLL_S / 4
_MAX_REDIRECTS = 3
# For how long a follower that is offered a group of a few waits for others that answer its calls but have not come.
_MINORITY_S = 2 * POLL_S


class Meeting:
    """The machine of one run.

    Before each input, `at` gives it the time and what this peer knows then; after it, `advance` what follows.
    """

    def __init__(
        self,
        window_s: float,
        exchange_s: float,
        form: Callable[[int, Iterable[bytes]], Group],
        leaves_out: Callable[[str], bool],
    ) -> None:
        """`window_s`: how long a leader waits for live peers that have not come yet, unless they follow another one.

        `exchange_s`: what the exchange of a group takes at most. `form` verifies statements and makes them a group, or
        raises ProtocolError. `leaves_out`: a group that is closed here does not include a peer, which only owes.
        """
        self._state = State(window_s, exchange_s, form, leaves_out)
        self._leading = Leading(self._state)
        self._ahead: dict[str, int] = {}  # by peer: the newest round beyond the next one that it calls for

    # What it does.

    @property
    def busy(self) -> bool:
        """True while it is to advance each TICK_S; otherwise, each second will do."""
        return self._leading.busy or self.joining

    @property
    def joining(self) -> bool:
        """True while this peer waits for the group of a round."""
        return self._state.attempt is not None

    @property
    def outcome(self) -> Group | RoundError | None:
        """What has become of this peer's attempt."""
        return self._state.attempt.outcome if self._state.attempt is not None else None

    @property
    def leader(self) -> str:
        """Who led this peer to its newest group."""
        return self._state.leader

    def advance(self) -> tuple[list[Output], list[str]]:
        """Inputs have come, or TICK_S has passed: returns what is to be done, and why, one sentence a decision."""
        self._advance_attempt()
        self._leading.step()
        self._advance_attempt()  # a group may have been closed
        self._leading.answer()
        state = self._state
        outputs, decisions, state.outputs, state.decisions = state.outputs, state.decisions, [], []
        return outputs, decisions

    def describe(self) -> Iterator[str]:
        """Lines for the log."""
        state = self._state
        if state.attempt is not None:
            yield f"round {state.attempt.round}: follows {state.attempt.leader or 'nobody'}"
        yield f"leaders {state.memory.leaders}, ahead {self._ahead}"
        for number, gathering in self._leading.gatherings.items():
            yield f"gathers round {number}: {gathering.describe(state.now)}"

    # Inputs.

    def at(self, now: float, view: View) -> Meeting:
        """Notes the time, in seconds, and what this peer knows of the others; returns itself.

        Without an input for more than SLEPT_S, this peer counts as one that did not run.
        """
        if self._state.view.me and now - self._state.now > SLEPT_S:
            self._leading.note_sleep(now)
        self._state.now, self._state.view = max(now, self._state.now), view
        return self

    def join(self, sealed: bytes, statement: Statement) -> None:
        """This peer wants to be in the group of a round, with this statement."""
        state = self._state
        state.memory = state.known(statement.round)
        state.attempt = Attempt(statement, sealed, state.now, state.now + 2 * state.window_s + 20.0)

    def leave(self) -> None:
        """Ends this peer's attempt, whatever has become of it."""
        if (attempt := self._state.attempt) is not None:
            self._state.attempt = None
            for number in [number for number in self._leading.gatherings if number <= attempt.round]:
                self._leading.drop(number, "this peer's attempt has ended")

    def polled(self, key: int, peer: str, round_number: int, sealed: bytes) -> None:
        """A peer submits its statement, or polls again; `Reply` with this key follows.

        Raises:
            ProtocolError: (`round`) the round is too far ahead.
        """
        view = self._state.view
        if round_number > view.target + 1:
            raise ProtocolError("round", f"round {round_number} is far ahead of {view.target}")
        if round_number > view.target and peer in view.electorate():
            self._note_ahead(peer, round_number)
        self._leading.enqueue(key, peer, round_number, sealed)

    def called(self, peer: str, round_number: int) -> Answer:
        """A leader calls this peer to a round. Returns the answer.

        Raises:
            ProtocolError: (`round`) a stranger calls for a round that is not near.
        """
        state, target = self._state, self._state.view.target
        if (group := state.closed_in(round_number)) is not None:
            return {"group": list(group.sealed), "target": target}
        is_stranger = peer not in state.view.electorate()  # its record may not be here yet, so this alone is no fault
        if is_stranger and not 0 <= round_number <= target + 1:
            raise ProtocolError("round", f"a stranger called for round {round_number}; the next one is {target}")
        if round_number == target + 1 and not is_stranger:
            self._note_ahead(peer, round_number)
        if round_number != target:
            return {"target": target}
        if not is_stranger:
            self._reinstate(peer, round_number)
            state.outputs.append(Called(round_number))
            self._advance_attempt()  # it may turn to the caller
        if leader := state.leader_in(round_number):
            return {"leader": leader}
        return {"target": target} if is_stranger else {}

    def poll_answered(self, poll: Poll, answer: Answer | ProtocolError | None) -> None:
        """A leader has answered a poll, or broken the protocol; None: it did not answer."""
        attempt = self._state.attempt
        if attempt is not None and attempt.poll is poll:
            attempt.poll = None
            if answer is None:
                self._pass_over(attempt, "does not answer", Fate.SILENT)
            else:
                self._hear(attempt, poll, answer)
        elif attempt is not None and attempt.round == poll.round and answer is not None:
            self._adopts(answer, poll)  # a leader that it has turned away from may have closed a group with it

    def call_answered(self, call: Call, answer: Answer | ProtocolError | None) -> None:
        """The same of a missing peer that was called."""
        self._leading.call_answered(call, answer)

    def spend(self, group: Group) -> None:
        """The exchange of a group has failed here."""
        self._state.spend(group)

    def reset(self) -> None:
        """Forgets groups and claims, since this peer has adopted the reference of others, at whatever round."""
        number = self._state.attempt.round if self._state.attempt is not None else 0
        memory = Memory(number, LeaderTimeouts(self._state.window_s))
        self._state.closed, self._state.memory, self._ahead = None, memory, {}
        for number in list(self._leading.gatherings):
            self._leading.drop(number, "the reference is another one")

    # This peer's attempt.

    def _advance_attempt(self) -> None:
        state, attempt = self._state, self._state.attempt
        if attempt is None or attempt.outcome is not None:
            return
        number, me = attempt.round, state.view.me
        if not attempt.leader and not self._choose_leader(attempt):
            return
        better, gathering = self._leading.redirects_to(number), self._leading.gatherings.get(number)
        if attempt.leader == me and better is not None:
            self._turn_to(attempt, better)
        elif attempt.leader != me and gathering is not None and self._leading.is_followed_by_most(gathering):
            state.say(number, f"leads instead of following {attempt.leader}: most others follow this peer")
            self._turn_to(attempt, me)
        group = state.closed_in(number)
        if group is not None and (attempt.heard or attempt.leader == me or group.index_of(me) is not None):
            state.leader = state.giver if attempt.leader == me else attempt.leader
            if not self._awaits_followers(group):
                self._enter(attempt, group)
        elif state.now >= attempt.deadline:
            if attempt.redirects or attempt.offered is not None:
                state.memory.note(attempt.leader, Fate.FAILED)
            state.give_up(number, RoundError(f"no group formed for round {number}"))
        elif attempt.leader == me:
            self._leading.gathering(number).add(me, attempt.sealed, state.now)
        elif attempt.offered is not None:
            self._check_minority(attempt, *attempt.offered)
        elif attempt.poll is None and state.now >= attempt.poll_at:
            # One that is answered at once is not repeated at once: an honest leader holds it for a while.
            attempt.poll, attempt.poll_at = Poll(attempt.leader, number, attempt.sealed), state.now + TICK_S
            state.outputs.append(attempt.poll)

    def _choose_leader(self, attempt: Attempt) -> bool:
        """Turns to the best leader; returns False if there is none."""
        state, known, number, view = self._state, self._state.memory, attempt.round, self._state.view
        while (leader := view.best_leader(number, known.passed_over())) is not None and leader in view.without_duty:
            if view.best_leader(number, {*known.passed_over(), leader}) is None:
                break
            known.timeouts.turn_to(leader, state.now)  # and pass it over as if it had failed: not all may know of it
            known.note(leader, Fate.FAILED)
            state.say(number, f"passes over {leader}: it has no duty")
        if leader is not None:
            state.say(number, "leads" if leader == view.me else f"follows {leader}: it ranks best")
            self._turn_to(attempt, leader)
            return True
        became, failed = set(known.leaders.values()), {Fate.FAILED, Fate.EARLY, Fate.LATE}
        error = NoLeaderError if became & failed and became <= failed | {Fate.PAST} else RoundError
        known.leaders.clear()
        known.failed_groups.clear()
        state.give_up(number, error("no peer that could lead the round is reachable"))
        return False

    def _turn_to(self, attempt: Attempt, leader: str, redirects: int = 0) -> None:
        now, known = self._state.now, self._state.memory
        attempt.leader, attempt.redirects, attempt.poll, attempt.poll_at = leader, redirects, None, now
        attempt.offered = None
        if leader != self._state.view.me:
            attempt.until = known.timeouts.turn_to(leader, now, again=known.leaders.get(leader) == Fate.BACK)

    def _pass_over(self, attempt: Attempt, why: str, what: Fate = Fate.FAILED) -> None:
        self._state.say(attempt.round, f"passes over {attempt.leader}: it {why}")
        self._state.memory.note(attempt.leader, what)
        attempt.leader, attempt.poll, attempt.offered = "", None, None

    def _adopts(self, answer: Answer | ProtocolError, poll: Poll) -> bool:
        """Accepts the group in an answer, if there is one; returns False if the answer breaks the protocol."""
        try:
            if isinstance(answer, ProtocolError):
                raise answer
            self._state.adopt(answer, poll.round, poll.leader)
        except ProtocolError as exc:
            self._state.outputs.append(Fault(poll.leader, exc))
            return False
        return True

    def _hear(self, attempt: Attempt, poll: Poll, answer: Answer | ProtocolError) -> None:
        """Hears what the leader of this peer says."""
        state, leader, number, known = self._state, attempt.leader, attempt.round, self._state.memory
        if not self._adopts(answer, poll) or isinstance(answer, ProtocolError):
            self._pass_over(attempt, "breaks the protocol")
            return
        attempt.heard = True
        if state.closed_in(number) is not None or attempt.offered is not None:
            return
        redirect = answer.get("leader")
        refused = isinstance(redirect, str) and self._refuses(redirect, number)
        if answer.get("over"):
            known.note(leader, Fate.PAST)  # unless the records confirm it, the next attempt goes to another leader
            state.give_up(number, RoundError(f"round {number} is over"))
        elif refused or (answer.get("defers") and not state.view.defers):
            self._pass_over(attempt, "does not lead")  # without it, the next best candidate may be this peer
        elif answer.get("early"):
            if state.now > attempt.until:
                if leader in state.view.electorate() and not state.view.defers:  # it had been told that this peer has
                    state.outputs.append(Stall(leader, number))
                known.note(leader, Fate.EARLY)
                state.give_up(number, RoundError(f"the other peers have not started round {number}"))
        elif state.now > attempt.until or attempt.redirects > _MAX_REDIRECTS:
            state.outputs.append(Fault(leader, ProtocolError("leader", f"did not close the group of round {number}")))
            if not attempt.redirects:  # otherwise it may be due to those who redirected this peer
                state.outputs.append(Stall(leader, number))
            self._pass_over(attempt, "did not close the group in time", Fate.LATE)
        elif isinstance(redirect, str) and redirect not in known.failed() | {leader} and state.view.may_lead(redirect):
            known.return_to(redirect)
            state.say(number, f"follows {redirect}: {leader} does")
            self._turn_to(attempt, redirect, attempt.redirects + 1)

    def _refuses(self, redirect: str, number: int) -> bool:
        """Returns True if this peer rejects a redirect and its sender. If it may lead, it only goes up in rank."""
        view = self._state.view
        leads = view.reachable and not view.defers and not self._state.stands_aside(number)
        goes_down = view.may_lead(redirect) and view.ranks_before(view.me, redirect, number)
        return redirect == view.me or (leads and goes_down)

    def _reinstate(self, leader: str, number: int) -> None:
        """Follows a leader again that did not answer, or had not begun."""
        state = self._state
        if state.known(number).bring_back(leader):
            state.say(number, f"follows {leader} again: it called")
            gathering = self._leading.gatherings.get(number)
            if gathering is not None and gathering.redirect is None and state.view.is_better(leader, number):
                gathering.redirect = leader

    def _awaits_followers(self, group: Group) -> bool:
        """Returns True while the followers of this peer wait for others, since they got a group of a few from it."""
        state, others = self._state, {member.peer_id for member in group.members} - {self._state.view.me}
        few = bool(others) and not state.view.are_majority({*others, state.view.me})
        return few and state.giver == state.view.me and state.now < state.closed_at + _MINORITY_S

    def _check_minority(self, attempt: Attempt, group: Group, since: float) -> None:
        """Takes a group of a few from the leader unless the others come: it may have left them out."""
        state, members = self._state, {member.peer_id for member in group.members}
        gathering = self._leading.gathering(attempt.round)
        gathering.redirect = None  # or it would call nobody
        # An honest leader does not wait for those that have missed rounds.
        unawaited = {n.peer_id for n in state.view.neighbours if n.wait_s < state.window_s}
        answers = gathering.answers(since)  # since the leader had closed the group
        trained = {peer for peer, what in answers.items() if what == IDLE}
        on_their_way = {peer for peer, what in answers.items() if what not in (IDLE, BEHIND)}
        on_their_way |= {peer for peer, at in gathering.last_poll.items() if at >= since}
        coming = on_their_way - members - unawaited
        waited = state.now >= max(since + _MINORITY_S, attempt.began + state.window_s)
        if state.view.outnumber_liars(coming):
            if state.view.outnumber_liars(p for p in coming if gathering.reported.get(p) == attempt.leader):
                state.outputs.append(Stall(attempt.leader, attempt.round))
            self._pass_over(attempt, f"leaves out {sorted(coming)}, who are on their way")
        elif state.view.are_majority(
            members, (gathering.away(state.now) | unawaited | (trained if waited else set())) - members
        ):
            state.close(group, attempt.leader)

    def _enter(self, attempt: Attempt, group: Group) -> None:
        """Checks that the group includes this peer with its experts, reference and key; fewer tokens will do."""
        index, new = group.index_of(self._state.view.me), attempt.statement
        if index is not None:
            old = group.members[index].statement
            if all(getattr(old, name) == getattr(new, name) for name in ("held", "versions", "digests", "certificate")):
                self._start_afresh()
                attempt.outcome = group
                return
        self._leave_to_others(group)
        how = "without this peer" if index is None else "with an outdated statement of this peer"
        self._state.give_up(attempt.round, RoundError(f"round {attempt.round} began {how}"))

    def _leave_to_others(self, group: Group) -> None:
        """Marks a group that this peer cannot enter as spent, once it has had the time that an exchange may take.

        Until then its members may be about to commit the round, and another group would fork the reference. This peer
        would normally not be here if they had: it would have seen so in the records, and fetched their reference.
        """
        state, known = self._state, self._state.memory
        if known.left_out_since is None:
            known.left_out_since = state.now
        elif state.now - known.left_out_since > state.window_s + state.exchange_s:
            self._start_afresh()
            state.spend(group)

    def _start_afresh(self) -> None:
        known = self._state.memory
        known.left_out_since, known.timeouts = None, LeaderTimeouts(self._state.window_s)

    def _note_ahead(self, peer: str, number: int) -> None:
        """Notes a call for the round after the next one; see the top of this file."""
        view = self._state.view
        self._ahead[peer] = number
        if view.move_median(other for other, claimed in self._ahead.items() if claimed >= number):
            self._state.outputs.append(Ahead(number))
