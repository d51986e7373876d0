"""Forms the group of each round: one group per round, even if peers die meanwhile. A pure machine, one at each peer.

The best-ranked live peer leads (see view.py): it gathers the signed statements, calls the peers that are missing, and
closes the group when all have come or the window is over (for peers that still follow a leader that has failed here,
after two windows and a few seconds; each further leader that fails adds a window). A peer that gets no answer from a
leader turns to the next in rank. Once per round, it turns back to such a leader when it calls: one that was frozen
would otherwise close a second group. A leader that learns of a better one sends its followers there. Every peer that
has the closed group passes it on, so a leader that dies while it announces the group does not split it.

No peer is assumed to be honest. How long a leader waits for a peer depends on that peer's history. A leader that does
not close the group in time, sends its followers in circles, or whose groups have failed twice is passed over; the first
to pass it over waits for the peers that still follow it. A group that leaves this peer out is accepted only if it
includes most of the voices, and only for as long as its exchange may take. A claim that the swarm is a round further on
counts only if enough voices make it to move the median of their records.

A newcomer defers to the initial peers: it follows them, and leads no round before its first commit. Peers that know it
from earlier rounds may rank it first; it says that it defers, and they turn to the next. Peers that defer themselves
keep following it. A leader that has lost its duties is passed over at once.

The state of an attempt: idle -> leading or following(leader) -> closed, or given up. Whether or not this peer attempts
a round, it gathers for those that poll it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from spes_swarm.base.errors import NoLeaderError, ProtocolError, RoundError
from spes_swarm.protocol.meeting.attempt import FAILED, PAST, RETURNED, SILENT, Attempt, Held, Memory
from spes_swarm.protocol.meeting.gathering import BEHIND, IDLE, POLL_S, SLEPT_S, Calling, Gathering, Patience
from spes_swarm.protocol.meeting.outputs import Ahead, Answer, Call, Called, Fault, Look, Output, Poll, Reply, Stall
from spes_swarm.protocol.meeting.view import View
from spes_swarm.protocol.members.standing import Neighbour
from spes_swarm.protocol.rounds.statement import Group, Statement

TICK_S = POLL_S / 4
_MAX_REDIRECTS, _MAX_ROUND_GATHERINGS = 3, 4
# For how long a follower that is offered a group of a few waits for others that answer its calls but have not come.
_DOUBT_S = 2 * POLL_S


class Meeting:
    """The machine of one run. Before each input, `at` gives it the time and what this peer knows then.

    Attributes:
        outputs: what is to be done after an input, for its caller to take away.
        decisions: the reasons, one sentence each, likewise.
        closed: the newest closed group known here.
        leader: who led this peer to it.
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
        self._window_s, self._exchange_s, self._form, self._leaves_out = window_s, exchange_s, form, leaves_out
        self.outputs: list[Output] = []
        self.decisions: list[str] = []
        self.closed: Group | None = None
        self.leader = ""
        self._giver = ""  # who passed on the newest group
        self._now = 0.0
        self._view = View("", "", 0)
        self._attempt: Attempt | None = None
        self._memory = Memory(0, Patience(window_s))
        self._gatherings: dict[int, Gathering] = {}
        self._held: dict[int, Held] = {}
        self._ahead: dict[str, int] = {}  # by live peer: the newest round beyond the next one that it calls for

    # What it does.

    @property
    def busy(self) -> bool:
        """True while it is to be told the time, each TICK_S."""
        return bool(self._gatherings or self._held or self._attempt)

    @property
    def outcome(self) -> Group | RoundError | None:
        """What has become of this peer's attempt."""
        return self._attempt.outcome if self._attempt is not None else None

    @property
    def attempts(self) -> bool:
        """True while this peer waits for the group of a round."""
        return self._attempt is not None

    def describe(self) -> Iterator[str]:
        """Lines for the log."""
        known = self._memory
        if self._attempt is not None:
            yield f"round {self._attempt.round}: follows {self._attempt.leader or 'nobody'}"
        yield f"leaders {known.leaders}, ahead {self._ahead}"
        yield from (f"gathers round {number}: {it.describe(self._now)}" for number, it in self._gatherings.items())

    # Inputs.

    def at(self, now: float, view: View) -> Meeting:
        """Notes the time, in seconds, and what this peer knows of the others; returns itself."""
        if self.busy and now - self._now > SLEPT_S:
            for gathering in self._gatherings.values():
                gathering.slept(now)
        self._now, self._view = now, view
        return self

    def tick(self) -> None:
        """Time has passed."""
        for _ in range(2):  # what one part decides may let another one go on
            self._advance()
            for held in self._held.values():
                self._let_in(held)
            for number, gathering in list(self._gatherings.items()):
                self._gather(number, gathering)
        self._advance()
        for key, held in list(self._held.items()):
            if (answer := self._answer(held)) is not None:
                del self._held[key]
                self.outputs.append(Reply(key, answer))

    def join(self, sealed: bytes, statement: Statement) -> None:
        """This peer wants to be in the group of a round, with this statement."""
        if self._memory.round != statement.round:
            self._memory = Memory(statement.round, Patience(self._window_s))
        self._attempt = Attempt(statement, sealed, self._now + 2 * self._window_s + 20.0)
        self.tick()

    def leave(self) -> None:
        """Ends this peer's attempt, whatever has become of it."""
        if self._attempt is not None:
            number, self._attempt = self._attempt.round, None
            for gathered in [r for r in self._gatherings if r <= number]:
                self._drop(gathered, "this peer's attempt has ended")
            self.tick()

    def polled(self, key: int, peer: str, round_number: int, sealed: bytes) -> None:
        """A peer submits its statement, or polls again; `Reply` with this key follows.

        Raises:
            ProtocolError: (`round`) the round is too far ahead.
        """
        if self._outcome(round_number) is None:
            target = self._view.target
            if round_number > target + 1:
                raise ProtocolError("round", f"round {round_number} is far ahead of {target}")
            if round_number > target and peer in self._view.voices():
                self._note_ahead(peer, round_number)
        self._held[key] = Held(peer, round_number, sealed, self._now + POLL_S)
        self.tick()

    def called(self, peer: str, round_number: int) -> Answer:
        """A leader calls this peer to a round. Returns the answer.

        Raises:
            ProtocolError: (`round`) a stranger calls for a round that is not near.
        """
        target = self._view.target
        if (group := self._closed_in(round_number)) is not None:
            return {"group": list(group.sealed), "target": target}
        if peer not in self._view.voices():  # its record may not be here yet, so this alone is not a fault
            if not 0 <= round_number <= target + 1:
                raise ProtocolError("round", f"a stranger called for round {round_number}; the next one is {target}")
            return {"target": target}
        if round_number == target + 1:
            self._note_ahead(peer, round_number)
        if round_number != target:
            return {"target": target}
        self._try_again(peer, round_number)
        self.outputs.append(Called(round_number))
        relieved = {"relieved": True} if peer in self._view.without_duty else {}
        leader = self._leader_in(round_number)
        self.tick()
        return {"leader": leader, **relieved} if leader else {}

    def poll_answered(self, poll: Poll, answer: Answer | ProtocolError | None) -> None:
        """A leader has answered a poll, or broken the protocol; None: it did not answer."""
        attempt = self._attempt
        if attempt is not None and attempt.polls and attempt.number == poll.number:
            attempt.polls = False
            # One that is answered at once is not repeated at once: an honest leader holds it for a while.
            attempt.poll_at = max(self._now, attempt.asked + TICK_S)
            if answer is None:
                self._pass_over(attempt, "does not answer", SILENT)
            else:
                self._follow(attempt, answer)
        self.tick()

    def call_answered(self, call: Call, answer: Answer | ProtocolError | None) -> None:
        """The same of a missing peer that was called."""
        gathering = self._gatherings.get(call.round)
        calling = gathering.calls.get(call.peer) if gathering is not None else None
        if gathering is not None and calling is not None and calling.busy:
            calling.busy, calling.due = False, self._now + POLL_S / 2
            try:
                if isinstance(answer, ProtocolError):
                    raise answer
                if answer is not None:
                    self._hear(call.peer, call.round, gathering, answer)
                    calling.failures = -1
            except ProtocolError as exc:
                self.outputs.append(Fault(call.peer, exc))
            calling.failures += 1
            if calling.failures == 2:
                self._lose(gathering, call.peer, "does not answer")
        self.tick()

    def looked(self, round_number: int) -> None:
        """The search for others is over."""
        if (gathering := self._gatherings.get(round_number)) is not None:
            gathering.looks = False
        self.tick()

    def spend(self, group: Group) -> None:
        """Marks a group whose exchange failed here: another attempt at the round needs another group.

        A leader may give different groups to different members, which then all fail; after the second, it is passed
        over. An honest leader stands aside then, too, or it would go on without its members.
        """
        if group.round == self._memory.round:
            self._memory.spent.add(group.id)
            self._memory.spoiled.update({self._giver, self.leader})
            if self._memory.spoiled[self.leader] > 1:
                self._memory.leaders[self.leader] = FAILED
        if self.closed is not None and self.closed.id == group.id:
            self.closed = None

    def reset(self) -> None:
        """Forgets groups and claims, since this peer has adopted the reference of others, at whatever round."""
        self.closed = None
        self._ahead.clear()
        self._memory.forgive()
        for number in list(self._gatherings):
            self._drop(number, "the reference is another one")
        self.tick()

    # This peer's attempt.

    def _advance(self) -> None:
        attempt = self._attempt
        if attempt is None or attempt.outcome is not None:
            return
        number, me = attempt.round, self._view.me
        gathering = self._gatherings.get(number)
        if not attempt.leader and not self._choose_leader(attempt):
            return
        if attempt.leader == me and gathering is not None and (better := gathering.redirect) is not None:
            if better not in self._memory.failed() and self._view.may_lead(better):
                self._turn_to(attempt, better, redirects=0)
            else:
                self._drop(number, f"{better} failed, or has left")
        if attempt.leader == me:
            self._gathering(number).add(me, attempt.sealed, self._now)
        if attempt.offered is not None:
            self._doubt(attempt, *attempt.offered)
        group = self._closed_in(number)
        if group is not None and (attempt.heard or attempt.leader == me or group.index_of(me) is not None):
            self.leader = self._giver if attempt.leader == me else attempt.leader
            self._enter(attempt, group)
        elif self._now >= attempt.deadline:
            if attempt.redirects:
                self._memory.leaders[attempt.leader] = FAILED
            self._give_up(attempt, RoundError(f"no group formed for round {number}"))
        elif attempt.leader != me and not attempt.polls and self._now >= attempt.poll_at:
            attempt.asked, attempt.polls, attempt.number = self._now, True, attempt.number + 1
            self.outputs.append(Poll(attempt.leader, attempt.number, number, attempt.sealed))

    def _choose_leader(self, attempt: Attempt) -> bool:
        """Turns to the best leader; returns False if there is none."""
        known, number, view = self._memory, attempt.round, self._view
        leader = view.best_leader(number, known.passed_over())
        while leader is not None and leader in view.without_duty:
            if view.best_leader(number, {*known.passed_over(), leader}) is None:
                break
            known.patience.turn_to(leader, self._now)  # and pass it over as if it had failed: not all may know of it
            known.leaders[leader] = FAILED
            self._say(number, f"passes over {leader}: it has no duty")
            leader = view.best_leader(number, known.passed_over())
        if leader is None:
            error = (
                NoLeaderError
                if FAILED in known.leaders.values() and SILENT not in known.leaders.values()
                else RoundError
            )
            known.forgive()
            self._give_up(attempt, error("no peer that could lead the round is reachable"))
            return False
        self._say(number, "leads" if leader == view.me else f"follows {leader}: it ranks best")
        self._turn_to(attempt, leader, redirects=0)
        return True

    def _turn_to(self, attempt: Attempt, leader: str, redirects: int) -> None:
        attempt.leader, attempt.redirects, attempt.polls, attempt.poll_at = leader, redirects, False, self._now
        if leader != self._view.me:
            attempt.until = self._memory.patience.turn_to(leader, self._now)

    def _pass_over(self, attempt: Attempt, why: str, what: str = FAILED) -> None:
        self._say(attempt.round, f"passes over {attempt.leader}: it {why}")
        self._memory.leaders[attempt.leader] = what
        attempt.leader, attempt.offered = "", None

    def _follow(self, attempt: Attempt, answer: Answer | ProtocolError) -> None:
        """Hears what the leader of this peer says."""
        leader, number, known = attempt.leader, attempt.round, self._memory
        try:
            if isinstance(answer, ProtocolError):
                raise answer
            self._adopt(answer, number, leader)
            attempt.heard = True
        except ProtocolError as exc:
            self.outputs.append(Fault(leader, exc))
            self._pass_over(attempt, "breaks the protocol")
            return
        if self._closed_in(number) is not None or attempt.offered is not None:
            return
        redirect = answer.get("leader")
        refused = isinstance(redirect, str) and self._refuses(redirect, number)
        if answer.get("over"):
            # Unless the records confirm it, the next attempt goes to another leader.
            known.leaders[leader] = FAILED if known.leaders.get(leader) == RETURNED else PAST
            self._give_up(attempt, RoundError(f"round {number} is over"))
        elif refused or (answer.get("defers") and not self._view.defers):
            self._pass_over(attempt, "does not lead")  # without it, the next best candidate may be this peer
        elif answer.get("early"):
            if self._now > attempt.until:
                known.leaders[leader] = FAILED
                self._give_up(attempt, RoundError(f"the other peers have not started round {number}"))
        elif self._now > attempt.until or attempt.redirects > _MAX_REDIRECTS:
            self.outputs.append(Fault(leader, ProtocolError("leader", f"did not close the group of round {number}")))
            if not attempt.redirects:  # otherwise it may be due to those who redirected this peer
                self.outputs.append(Stall(leader, number))
            self._pass_over(attempt, "did not close the group in time")
        elif isinstance(redirect, str) and redirect not in known.failed() | {leader} and self._view.may_lead(redirect):
            self._note_return(redirect)
            self._say(number, f"follows {redirect}: {leader} does")
            self._turn_to(attempt, redirect, attempt.redirects + 1)

    def _refuses(self, redirect: str, number: int) -> bool:
        """Returns True if this peer rejects a redirect and its sender. If it may lead, it only goes up in rank."""
        view = self._view
        leads = view.reachable and not view.defers and not self._stands_aside(number)
        goes_down = view.may_lead(redirect) and view.ranks_before(view.me, redirect, number)
        return redirect == view.me or (leads and goes_down)

    def _enter(self, attempt: Attempt, group: Group) -> None:
        """Checks that the group includes this peer with its current experts and reference; fewer tokens will do."""
        index, new = group.index_of(self._view.me), attempt.statement
        if index is not None:
            old = group.members[index].statement
            if (old.held, old.versions, old.digests) == (new.held, new.versions, new.digests):
                self._start_afresh()
                attempt.outcome = group
                return
        self._leave_to_others(group)
        how = "without this peer" if index is None else "with an outdated statement of this peer"
        self._give_up(attempt, RoundError(f"round {attempt.round} began {how}"))

    def _leave_to_others(self, group: Group) -> None:
        """Marks a group that this peer cannot enter as spent, once it has had the time that an exchange may take.

        Until then its members may be about to commit the round, and another group would fork the reference. This peer
        would normally not be here if they had: it would have seen so in the records, and fetched their reference.
        """
        known = self._memory
        if known.left_out_since is None:
            known.left_out_since = self._now
        elif self._now - known.left_out_since > self._window_s + self._exchange_s:
            self._start_afresh()
            self.spend(group)

    def _start_afresh(self) -> None:
        self._memory.left_out_since = None
        self._memory.patience = Patience(self._window_s)

    def _give_up(self, attempt: Attempt, error: RoundError) -> None:
        self._say(attempt.round, f"gives up: {error}")
        attempt.outcome = error

    # Rounds that are gathered here.

    def _gathering(self, number: int) -> Gathering:
        if number not in self._gatherings:
            if len(self._gatherings) >= _MAX_ROUND_GATHERINGS:  # left over from rounds that this peer did not join
                self._drop(min(self._gatherings), "there are too many")
            self._gatherings[number] = Gathering(self._window_s)
        return self._gatherings[number]

    def _drop(self, number: int, why: str) -> None:
        del self._gatherings[number]
        self._say(number, f"gathers no longer: {why}")

    def _gather(self, number: int, gathering: Gathering) -> None:
        """Calls missing peers, and closes the group when no other peer is awaited any more."""
        if gathering.redirect is not None or self._closed_in(number) is not None:
            return
        view, present = self._view, gathering.present(self._now)
        peers = Neighbour(view.me, view.reachable), *view.neighbours
        missing = [n for n in peers if n.peer_id not in present.keys() | gathering.lost]
        if view.me not in present and self._leader_in(number):
            gathering.said[view.me] = self._leader_in(number)
        for peer in missing:
            calling = gathering.calls.setdefault(peer.peer_id, Calling(self._now))
            if not calling.busy and self._now >= calling.due:
                calling.busy, calling.due = peer.peer_id != view.me, self._now + POLL_S / 2
                self.outputs.append(Call(peer.peer_id, number) if calling.busy else Called(number))
        # Do most of the voices that come or answer say that the round is over?
        if view.are_most(gathering.past, gathering.lost.difference(gathering.past, present)):
            self._drop(number, "most say that the round is over")
            if self._attempt is not None and self._leader_in(number) == view.me:  # alone, it would fork the reference
                self._give_up(self._attempt, RoundError(f"round {number} is over"))
            return
        # Otherwise a hostile follower that is early could have it closed before the others come.
        if gathering.opened is None and (view.me in present or view.are_many(present)):
            gathering.opened = self._now
        passed_over = self._memory.patience.passed_over
        if not present or any(gathering.awaits(peer, self._now, passed_over) for peer in missing):
            return
        come = view.are_majority(present, gathering.away(answers_count=True))
        if not come and self._now < (gathering.opened or self._now) + 2 * self._window_s:
            return  # others would be left out
        if not view.neighbours and gathering.looks is not False:
            if gathering.looks is None:
                gathering.looks = True
                self.outputs.append(Look(number))
            return
        group = self._form(number, [sealed for peer, sealed in present.items() if not self._leaves_out(peer)])
        self._set_closed(group, view.me)

    def _hear(self, peer: str, number: int, gathering: Gathering, answer: Answer) -> None:
        """Hears what a missing peer answers."""
        if gathering.redirect is not None or self._closed_in(number) is not None:
            return
        view = self._view
        failed = self._memory.failed() if self._memory.round == number else set()
        if peer in view.voices():
            self._adopt(answer, number, peer, absent=gathering.lost)
        leader, target = answer.get("leader"), answer.get("target")
        if isinstance(target, int) and target > number:
            gathering.past.add(peer)
            self._lose(gathering, peer, f"says that the round is over; its next one is {target}")
        elif isinstance(leader, str):
            gathering.said[peer] = leader
            agreed = {other for other, what in gathering.said.items() if what == leader}
            together = len(agreed) > 1 and view.are_most(agreed, gathering.lost)
            leads = leader not in gathering.present(self._now) and leader != view.me
            if leader not in failed and leads and (view.is_better(leader, number) or together):
                self._note_return(leader)
                gathering.redirect = leader
                why = "most follow it" if together else f"{peer} follows it, and it ranks better"
                self._say(number, f"sends others to {leader}: {why}")
        else:
            gathering.said[peer] = IDLE if target is None else BEHIND

    def _lose(self, gathering: Gathering, peer: str, why: str) -> None:
        gathering.lost.add(peer)
        gathering.calls.pop(peer, None)
        self._say(self._view.target, f"does not wait for {peer}: it {why}")

    def _let_in(self, held: Held) -> None:
        """Adds a poll to the gathering of its round, if there is one or it may begin one."""
        number, view = held.round, self._view
        if held.gathering is not None or self._outcome(number) is not None or self._stands_aside(number):
            return
        # Strangers may only join. One that is early is held: a round may begin and be closed between two polls.
        if number in self._gatherings or (held.peer in view.voices() and not view.defers):
            held.gathering = self._gathering(number)
            if held.gathering.redirect == held.peer:  # it follows this peer, so it does not lead
                held.gathering.redirect = None
            if held.gathering.redirect is None:
                held.gathering.add(held.peer, held.sealed, self._now)

    def _answer(self, held: Held) -> Answer | None:
        """Returns the answer to a poll; None while it is held, until there is news for the follower."""
        outcome, late, defers = self._outcome(held.round), self._now >= held.until, self._view.defers
        if outcome is not None:
            return outcome
        if held.gathering is None:
            if leader := self._leader_in(held.round):
                return {"leader": leader, "defers": defers}
            return {"early": True, "defers": defers} if late or defers else None
        if held.gathering.redirect is not None:
            return {"leader": held.gathering.redirect}
        return {} if late or self._gatherings.get(held.round) is not held.gathering else None

    def _outcome(self, number: int) -> Answer | None:
        """Returns the answer to all who ask for a round that has been closed here or is over."""
        group, over = self._closed_in(number), number < self._view.target
        if group is not None:
            return {"group": list(group.sealed), "over": over}
        return {"over": True} if over else None

    # What it knows.

    def _leader_in(self, number: int) -> str:
        """Whom this peer follows in a round, maybe itself; empty: nobody."""
        attempt = self._attempt
        return attempt.leader if attempt is not None and attempt.round == number else ""

    def _stands_aside(self, number: int) -> bool:
        """Returns True if groups that this peer led have failed twice, so that the others turn to the next leader."""
        return self._memory.round == number and self._view.me in self._memory.failed()

    def _closed_in(self, number: int) -> Group | None:
        return self.closed if self.closed is not None and self.closed.round == number else None

    def _try_again(self, leader: str, number: int) -> None:
        """Stops passing over a leader that did not answer."""
        known = self._memory
        if known.round == number and known.leaders.get(leader) == SILENT and not known.retried:
            known.retried = True
            known.patience.return_to(leader, self._now)
            del known.leaders[leader]
            self._say(number, f"does not pass over {leader} any more: it calls")
            gathering = self._gatherings.get(number)
            if gathering is not None and gathering.redirect is None and self._view.is_better(leader, number):
                gathering.redirect = leader

    def _note_return(self, leader: str) -> None:
        if self._memory.leaders.get(leader) == PAST:
            self._memory.leaders[leader] = RETURNED

    def _adopt(self, answer: Answer, number: int, giver: str, absent: Collection[str] = ()) -> None:
        """Accepts a closed group, unless its giver has given two that failed.

        One without this peer, or from another peer than the leader, must include most of the voices not `absent`: any
        peer can form a small group. If most of them have a place in a second group, the first has failed.
        """
        me, closed, sealed = self._view.me, self._closed_in(number), answer.get("group")
        spoiled = self._memory.round == number and self._memory.spoiled[giver] > 1
        if sealed is None or spoiled or (closed is not None and closed.index_of(me) is not None):
            return
        if not (isinstance(sealed, list) and all(isinstance(item, bytes) for item in sealed)):
            raise ProtocolError("malformed", "a group is a list of signed statements")
        group = self._form(number, sealed)
        with_me = group.index_of(me) is not None
        if (closed is not None and not with_me) or (self._memory.round == number and group.id in self._memory.spent):
            return
        if self._view.are_majority((member.peer_id for member in group.members), absent):
            self._set_closed(group, giver)
        elif with_me and closed is None and self._attempt is not None and self._leader_in(number) == giver:
            self._attempt.offered = self._attempt.offered or (group, self._now)

    def _doubt(self, attempt: Attempt, group: Group, since: float) -> None:
        """Takes a group of a few from the leader unless the others come: it may have left them out."""
        gathering, members = self._gathering(attempt.round), {member.peer_id for member in group.members}
        if gathering.redirect == attempt.leader:
            gathering.redirect = None
        coming = gathering.coming() - members
        waited = self._now >= max(since + _DOUBT_S, attempt.deadline - self._window_s - 20.0)
        if self._view.are_many(coming):
            self._pass_over(attempt, f"closes a group of {len(members)}, but {sorted(coming)} come")
        elif self._view.are_majority(members, gathering.away(answers_count=waited) - members):
            self._set_closed(group, attempt.leader)

    def _set_closed(self, group: Group, giver: str) -> None:
        if self.closed is None or group.round >= self.closed.round:
            self._say(group.round, f"has the group of {len(group.members)} from {giver}")
            self.closed, self._giver = group, giver

    def _note_ahead(self, peer: str, number: int) -> None:
        """Notes a call for the round after the next one; see the top of this file."""
        voices = self._view.voices()
        self._ahead = {other: claimed for other, claimed in self._ahead.items() if other in voices} | {peer: number}
        if self._view.are_most(other for other, claimed in self._ahead.items() if claimed >= number):
            self.outputs.append(Ahead(number))

    def _say(self, number: int, decision: str) -> None:
        self.decisions.append(f"round {number}: {decision}")
