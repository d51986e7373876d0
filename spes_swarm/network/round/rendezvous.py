"""Forms the group of each round: one group per round, even if peers die meanwhile.

The peers of a round rank each other by a hash of (run, round, peer id). The best-ranked live peer leads: it gathers the
signed statements, calls the peers that are missing, and closes the group when all have come or the window is over (for
peers that still follow a leader that has failed here, after two windows and a few seconds; each further leader that
fails adds a window). A peer that gets no answer from a leader turns to the next in rank. Once per round, it turns back
to such a leader when it calls: one that was frozen would otherwise close a second group. A leader that learns of a
better one sends its followers there. Every peer that has the closed group passes it on, so a leader that dies while it
announces the group does not split it.

No peer is assumed to be honest. Only voices (see standing.py) lead rounds, call for a round or start to gather one. How
long a leader waits for a peer depends on that peer's history. A leader that does not close the group in time, sends its
followers in circles, or whose groups have failed twice is passed over; the first to pass it over waits for the peers
that still follow it. A group that leaves this peer out is accepted only if it includes most of the voices, and only for
as long as its exchange may take. A claim that the swarm is a round further on counts only if enough voices make it to
move the median of their records.

A newcomer defers to the initial peers: it follows them, and leads no round before its first commit. Peers that know it
from earlier rounds may rank it first; it says that it defers, and they turn to the next. Peers that defer themselves
keep following it. A leader that has lost its duties is passed over at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from spes_swarm.base.changes import Changes
from spes_swarm.base.errors import NoLeaderError, ProtocolError, RoundError
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.round.gathering import CALL_TIMEOUT_S, POLL_S, POLL_TIMEOUT_S, Gathering, hold_poll, now
from spes_swarm.network.round.patience import Patience
from spes_swarm.network.round.voices import Voices, requested_round
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.members.standing import Neighbour
from spes_swarm.protocol.rounds.statement import Group, Statement, Vet, form_group, open_statement, seal_statement

_LOGGER = logging.getLogger(__name__)
_MAX_REDIRECTS, _MAX_ROUND_GATHERINGS = 3, 4


@dataclass(eq=False)
class Rendezvous:
    """Forms the groups of one run."""

    rpc: Rpc
    identity: Identity
    run_id: str
    num_blocks: int
    _: KW_ONLY
    reachable: bool  # others can connect to this peer; otherwise it leads no rounds. May change at any time
    window_s: float  # how long a leader waits for live peers that have not come yet, unless they follow another one
    exchange_s: float  # what the exchange of a group takes at most
    live_peers: Callable[[], Collection[Neighbour]]  # the other peers that a round may currently include
    defers: Callable[[], bool]  # True while this peer leaves it to others to lead rounds
    target_round: Callable[[], int]  # the round that this peer wants to commit next
    on_called: Callable[[int], None]  # a leader calls for a round: the trainer should join as soon as its step is done
    on_ahead: Callable[[int], None]  # others gather for the round after `target_round`: this peer may have missed one
    leaves_out: Callable[[str], bool]  # a group that is closed here does not include this peer: it only owes, or is out
    vet: Vet  # checks that a peer may take part
    find_others: Callable[[], Awaitable[None]]  # waits for the others if this peer has slept and lost sight of them
    on_stall: Callable[[str, int], None]  # a leader did not close the group of a round
    without_duty: Callable[[], Collection[str]]  # who leads only if nobody else can, maybe this peer
    _voices: Voices = field(init=False)
    _patience: Patience = field(init=False)
    _gatherings: dict[int, Gathering] = field(default_factory=dict, init=False)
    _leading: dict[int, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _begun: Changes = field(default_factory=Changes, init=False)  # this peer leads another round, or follows a leader
    _following: tuple[int, str] | None = field(default=None, init=False)
    # By round: leaders that failed, also in earlier attempts.
    _failed: dict[int, set[str]] = field(default_factory=dict, init=False)
    # Leaders that reported the round as over. They may have returned to it since; this is believed once per round.
    _past: set[str] = field(default_factory=set, init=False)
    _returned: set[str] = field(default_factory=set, init=False)
    # Leaders that did not answer. Once per round, one that calls is followed again.
    _silent: set[str] = field(default_factory=set, init=False)
    _retried: bool = field(default=False, init=False)
    # By live peer: the newest round beyond the next one that it calls for.
    _ahead: dict[str, int] = field(default_factory=dict, init=False)
    _closed: Group | None = field(default=None, init=False)  # the newest closed group known here
    _spent: set[bytes] = field(default_factory=set, init=False)  # ids of this round's groups whose exchange failed
    _left_out_since: float | None = field(default=None, init=False)  # by groups of this round
    _leader: str = field(default="", init=False)  # who led this peer to the newest group
    _giver: str = field(default="", init=False)  # who passed it on
    _spoiled: Counter[str] = field(default_factory=Counter, init=False)  # by these peers: failed groups of this round

    def __post_init__(self) -> None:
        self._patience = Patience(self.window_s)
        self._voices = Voices(self.run_id, self.identity.peer_id, self.live_peers, self.defers, self.without_duty)

    def describe(self) -> Iterator[str]:
        """Lines for the log: whom this peer follows, and which rounds it gathers."""
        yield f"follows {self._following}; passed over {self._failed}, past {self._past}, ahead {self._ahead}"
        yield from (f"gathers round {number}: {it.describe()}" for number, it in self._gatherings.items())

    @property
    def gathering(self) -> bool:
        """Returns True while this peer waits for the group of a round."""
        return self._following is not None

    async def start(self) -> None:
        """Registers the handlers."""
        await self.rpc.serve("gather", self._serve_gather)
        await self.rpc.serve("call", self._serve_call)

    async def join(self, statement: Statement) -> Group:
        """Submits this peer's statement to the round and returns the closed group.

        Raises:
            RoundError: the round was closed without this peer, or no group formed in time (NoLeaderError: none leads).
        """
        sealed = seal_statement(self.identity, self.run_id, statement)
        deadline = now() + 2 * self.window_s + 20.0
        failed = self._failed.get(statement.round, set())
        if statement.round not in self._failed:
            self._forgive()
            self._spent.clear()
            self._start_afresh()
        self._failed = {statement.round: failed}
        try:
            while now() < deadline:
                leader = self._voices.best_leader(statement.round, failed | self._past, self.reachable)
                if self._voices.relieves(leader, statement.round, failed | self._past, self.reachable):
                    self._turn_to(leader)  # and pass it over as if it had failed: not all may know of it
                    failed.add(leader)
                    continue
                if leader is None:
                    error = NoLeaderError if failed and not self._silent else RoundError
                    failed.clear()
                    self._forgive()
                    raise error("no peer that could lead the round is reachable")
                if leader == self.identity.peer_id:
                    group = await self._lead(statement.round, sealed, deadline, failed)
                else:
                    group = await self._follow(leader, statement.round, sealed, deadline, failed)
                if group is None:
                    _LOGGER.info("round %d: no group led by %s", statement.round, leader)
                    continue
                self._leader = self._following[1] if self._following is not None else ""
                self._check_own_place(group, statement)
                self._start_afresh()
                return group
        finally:
            self._following = None
            self._stop_leading(statement.round)
        raise RoundError(f"no group formed for round {statement.round}")

    def _check_own_place(self, group: Group, statement: Statement) -> None:
        """Checks that the group includes this peer with its current experts and reference; fewer tokens will do."""
        index = group.index_of(self.identity.peer_id)
        if index is not None:
            old, new = group.members[index].statement, statement
            if (old.held, old.versions, old.digests) == (new.held, new.versions, new.digests):
                return
        self._leave_to_others(group)
        how = "without this peer" if index is None else "with an outdated statement of this peer"
        raise RoundError(f"round {statement.round} began {how}")

    def _leave_to_others(self, group: Group) -> None:
        """Marks a group that this peer cannot enter as spent, once it has had the time that an exchange may take.

        Until then its members may be about to commit the round, and another group would fork the reference. This peer
        would normally not be here if they had: it would have seen so in the records, and fetched their reference.
        """
        if self._left_out_since is None:
            self._left_out_since = now()
        elif now() - self._left_out_since > self.window_s + self.exchange_s:
            self._start_afresh()
            self.spend(group)

    def _gathering(self, round_number: int) -> Gathering:
        gathering = self._gatherings.get(round_number)
        if gathering is None:
            if len(self._gatherings) >= _MAX_ROUND_GATHERINGS:  # left over from rounds that this peer did not join
                self._stop_leading(min(self._gatherings))
            gathering = self._gatherings[round_number] = Gathering(self.window_s)
            self._begun.notify()  # before the task, which may close the group at once: with those that wait already
            self._leading[round_number] = asyncio.create_task(self._gather_round(round_number, gathering))
        return gathering

    def _stop_leading(self, finished_round: int) -> None:
        for round_number in [r for r in self._gatherings if r <= finished_round]:
            self._drop(round_number)

    def _drop(self, round_number: int) -> None:
        self._gatherings.pop(round_number).changed.notify()
        self._leading.pop(round_number).cancel()

    async def _lead(self, round_number: int, sealed: bytes, deadline: float, failed: set[str]) -> Group | None:
        """Leads the round until its group is closed. Returns None if there is a better leader, or at the deadline."""
        gathering = self._gathering(round_number)
        better = gathering.redirect
        if better is not None and (better in failed or not self._voices.is_better(better, round_number)):
            self._drop(round_number)  # it failed, or has left
            gathering = self._gathering(round_number)
        self._following = (round_number, self.identity.peer_id)
        while now() < deadline:
            if (group := self._closed_group(round_number)) is not None:
                return group
            if gathering.redirect is not None:
                return None
            if gathering.over:  # alone, this peer would only fork the reference
                raise RoundError(f"round {round_number} is over")
            gathering.add(self.identity.peer_id, sealed)
            await gathering.changed.wait(POLL_S)
        return None

    async def _gather_round(self, round_number: int, gathering: Gathering) -> None:
        """Calls missing peers, and closes the group when no other peer is awaited any more."""
        me = self.identity.peer_id
        callers: dict[str, asyncio.Task[None]] = {}
        looked = False
        try:
            while gathering.redirect is None and self._closed_group(round_number) is None:
                gathering.note_sleep()
                present = gathering.present()
                peers = [Neighbour(me, self.reachable), *self.live_peers()]
                missing = {n.peer_id: n for n in peers if n.peer_id not in present.keys() | gathering.lost}
                for peer_id in missing.keys() - {me} - callers.keys():
                    callers[peer_id] = asyncio.create_task(self._call(peer_id, round_number, gathering))
                if me in missing:
                    self.on_called(round_number)
                    if self._following is not None and self._following[0] == round_number:
                        gathering.elsewhere.add(me)
                # Do most of the voices that come or answer say that the round is over?
                if self._voices.are_most(gathering.past, gathering.lost.difference(gathering.past, present)):
                    gathering.over = True
                    self._drop(round_number)
                    return
                passed_over = self._patience.passed_over
                if present and not any(gathering.awaits(peer, passed_over) for peer in missing.values()):
                    if not (looked or self.live_peers()):
                        looked = True
                        await self.find_others()
                        continue
                    sealed = [present[peer_id] for peer_id in present if not self.leaves_out(peer_id)]
                    self._set_closed(form_group(self.run_id, round_number, sealed, self.num_blocks, self.vet), me)
                    return
                await gathering.changed.wait(POLL_S / 4)
        finally:
            for task in callers.values():
                task.cancel()

    async def _call(self, peer_id: str, round_number: int, gathering: Gathering) -> None:
        """Calls one peer to the round again and again; marks it as lost if it cannot be reached."""
        arguments = {"run": self.run_id, "round": round_number}
        failures = 0
        while failures < 2:
            try:
                answer = await self.rpc.call(peer_id, "call", arguments, CALL_TIMEOUT_S)
                failures = 0
                if peer_id in self._voices.others():
                    self._adopt_group(answer, round_number, peer_id, absent=gathering.lost)
                leader = answer.get("leader")
                if answer.get("relieved") is True and isinstance(leader, str):
                    gathering.relieving.add(peer_id)
                    if self._voices.are_most(gathering.relieving, gathering.lost):
                        self._failed.setdefault(round_number, set()).add(self.identity.peer_id)
                        gathering.redirect_to(leader)
                        return
                failed = self._failed.get(round_number, set())
                if isinstance(leader, str) and self._voices.is_better(leader, round_number):
                    if leader not in failed:
                        self._note_return(leader)
                        gathering.redirect_to(leader)
                        return
                    if peer_id in self._voices.others() - failed:
                        gathering.elsewhere.add(peer_id)
                target = answer.get("target")
                if isinstance(target, int) and target > round_number:
                    gathering.past.add(peer_id)
                    break
            except ProtocolError as exc:
                self.rpc.on_fault(peer_id, exc)
                failures += 1
            except OSError:
                failures += 1
            await asyncio.sleep(POLL_S / 2)
        gathering.lost.add(peer_id)
        gathering.changed.notify()

    def _try_again(self, leader: str, round_number: int) -> None:
        """Stops passing over a leader that did not answer."""
        if leader in self._silent and not self._retried:
            self._retried = True
            self._patience.return_to(leader)
            self._failed.get(round_number, set()).discard(leader)
            gathering = self._gatherings.get(round_number)
            if gathering is not None and gathering.redirect is None and self._voices.is_better(leader, round_number):
                gathering.redirect_to(leader)

    def _note_return(self, leader: str) -> None:
        if leader in self._past:
            self._past.discard(leader)
            self._returned.add(leader)

    async def _follow(
        self, leader: str, round_number: int, sealed: bytes, deadline: float, failed: set[str]
    ) -> Group | None:
        """Follows a leader, or those it redirects to, until the group is closed. Returns None if they fail."""
        redirects = 0
        patience = self._turn_to(leader)
        arguments = {"run": self.run_id, "round": round_number, "statement": sealed}
        while now() < deadline:
            self._following = (round_number, leader)
            asked = now()
            try:
                answer = await self.rpc.call(leader, "gather", arguments, POLL_TIMEOUT_S)
                self._adopt_group(answer, round_number, leader)
            except ProtocolError as exc:
                self.rpc.on_fault(leader, exc)
                failed.add(leader)
                return None
            except OSError:
                failed.add(leader)
                self._silent.add(leader)
                return None
            if (group := self._closed_group(round_number)) is not None:
                return group
            if answer.get("over"):
                # Unless the records confirm it, the next attempt goes to another leader.
                (failed if leader in self._returned else self._past).add(leader)
                raise RoundError(f"round {round_number} is over")
            redirect = answer.get("leader")
            refused = isinstance(redirect, str) and self._refuses(redirect, round_number)
            if refused or (answer.get("defers") and not self.defers()):
                failed.add(leader)  # it does not lead; without it, the next best candidate may be this peer
                return None
            if answer.get("early"):
                if now() > patience:
                    failed.add(leader)
                    raise RoundError(f"the other peers have not started round {round_number}")
                await hold_poll(asked)
                continue
            if now() > patience or redirects > _MAX_REDIRECTS:
                self.rpc.on_fault(leader, ProtocolError("leader", f"did not close the group of round {round_number}"))
                if not redirects:  # otherwise it may be due to those who redirected this peer
                    self.on_stall(leader, round_number)
                failed.add(leader)
                return None
            if isinstance(redirect, str) and redirect not in failed | {leader} and self._voices.may_lead(redirect):
                self._note_return(redirect)
                redirects += 1
                patience = self._turn_to(redirect)
                leader = redirect
            else:
                await hold_poll(asked)
        if redirects:
            failed.add(leader)
        return None

    def _turn_to(self, leader: str) -> float:
        self._begun.notify()
        return self._patience.turn_to(leader)

    def _refuses(self, redirect: str, round_number: int) -> bool:
        """Returns True if this peer rejects a redirect and its sender. If it may lead, it only goes up in rank."""
        me = self.identity.peer_id
        leads = self.reachable and not self.defers() and not self._stands_aside(round_number)
        goes_down = self._voices.may_lead(redirect) and self._voices.ranks_before(me, redirect, round_number)
        return redirect == me or (leads and goes_down)

    def _stands_aside(self, round_number: int) -> bool:
        """Returns True if groups that this peer led have failed twice, so that the others turn to the next leader."""
        return self.identity.peer_id in self._failed.get(round_number, set())

    def _adopt_group(self, answer: dict[str, Any], round_number: int, giver: str, absent: Collection[str] = ()) -> None:
        """Accepts a closed group, unless its giver has given two that failed.

        One without this peer, or from another peer than the leader, must include most of the voices not `absent`: any
        peer can form a small group. If most of them have a place in a second group, the first has failed.
        """
        me, closed, sealed = self.identity.peer_id, self._closed_group(round_number), answer.get("group")
        if sealed is None or self._spoiled[giver] > 1 or (closed is not None and closed.index_of(me) is not None):
            return
        if not (isinstance(sealed, list) and all(isinstance(item, bytes) for item in sealed)):
            raise ProtocolError("malformed", "a group is a list of signed statements")
        group = form_group(self.run_id, round_number, sealed, self.num_blocks, self.vet)
        if closed is not None and group.index_of(me) is None:
            return
        with_me, from_leader = (closed or group).index_of(me) is not None, self._following == (round_number, giver)
        if (with_me and from_leader) or self._voices.are_majority((member.peer_id for member in group.members), absent):
            self._set_closed(group, giver)

    def spend(self, group: Group) -> None:
        """Marks a group whose exchange failed here: another attempt at the round needs another group.

        A leader may give different groups to different members, which then all fail; after the second, it is passed
        over. An honest leader stands aside then, too, or it would go on without its members.
        """
        self._spent.add(group.id)
        self._spoiled.update({self._giver, self._leader})
        if self._spoiled[self._leader] > 1:
            self._failed.get(group.round, set()).add(self._leader)
        if self._closed is not None and self._closed.id == group.id:
            self._closed = None

    def reset(self) -> None:
        """Forgets groups and claims, since this peer has adopted the reference of others, at whatever round."""
        self._closed = None
        self._ahead.clear()
        self._failed.clear()
        self._forgive()
        self._stop_leading(max(self._gatherings, default=0))

    def _forgive(self) -> None:
        for known in (self._past, self._returned, self._silent, self._spoiled):
            known.clear()
        self._retried = False

    def _start_afresh(self) -> None:
        self._left_out_since = None
        self._patience.clear()

    def _set_closed(self, group: Group, giver: str) -> None:
        if group.id not in self._spent and (self._closed is None or group.round >= self._closed.round):
            self._closed, self._giver = group, giver
        for gathering in self._gatherings.values():
            gathering.changed.notify()

    def _closed_group(self, round_number: int) -> Group | None:
        return self._closed if self._closed is not None and self._closed.round == round_number else None

    def _note_ahead(self, peer_id: str, round_number: int) -> None:
        """Notes a call for the round after the next one; see the top of this file."""
        voices = self._voices.others()
        self._ahead = {peer: claimed for peer, claimed in self._ahead.items() if peer in voices}
        self._ahead[peer_id] = round_number
        if self._voices.are_most(peer for peer, claimed in self._ahead.items() if claimed >= round_number):
            self.on_ahead(round_number)

    async def _serve_gather(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        """Handles a follower that submits its statement, or polls again."""
        round_number = requested_round(request, self.run_id)
        sealed = request.get("statement")
        if not isinstance(sealed, bytes):
            raise ProtocolError("malformed", "`gather` without a statement")
        if (outcome := self._outcome(round_number)) is not None:
            return outcome
        target = self.target_round()
        if round_number > target + 1:
            raise ProtocolError("round", f"round {round_number} is far ahead of {target}")
        member = open_statement(sealed, self.run_id, round_number, self.num_blocks, self.vet)
        if member.peer_id != peer_id:
            raise ProtocolError("sender", "the statement is another peer's")
        has_voice = peer_id in self._voices.others()
        if has_voice and round_number > target:
            self._note_ahead(peer_id, round_number)
        defers, until = self.defers(), now() + POLL_S
        # Strangers may only join. One that is early waits here: a round may begin and be closed between two polls.
        while self._stands_aside(round_number) or (round_number not in self._gatherings and (defers or not has_voice)):
            if self._following is not None and self._following[0] == round_number:
                return {"leader": self._following[1], "defers": defers}
            if defers or not await self._begun.wait(until - now()):
                return {"early": True, "defers": defers}
            if (outcome := self._outcome(round_number)) is not None:
                return outcome
        gathering = self._gathering(round_number)
        if gathering.redirect is None:
            gathering.add(peer_id, sealed)
            await self._hold(round_number, gathering, until)
        return self._outcome(round_number) or ({"leader": gathering.redirect} if gathering.redirect else {})

    def _outcome(self, round_number: int) -> dict[str, Any] | None:
        """Returns the answer to all who ask for a round that has been closed here or is over."""
        group, over = self._closed_group(round_number), round_number < self.target_round()
        if group is not None:
            return {"group": list(group.sealed), "over": over}
        return {"over": True} if over else None

    async def _hold(self, round_number: int, gathering: Gathering, until: float) -> None:
        """Holds a poll until there is news for the follower: without any, it would pause before it polls again."""
        while self._gatherings.get(round_number) is gathering and gathering.redirect is None:
            if self._closed_group(round_number) is not None or not await gathering.changed.wait(until - now()):
                return

    async def _serve_call(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        """Handles a leader that calls this peer to a round."""
        round_number = requested_round(request, self.run_id)
        target = self.target_round()
        if (group := self._closed_group(round_number)) is not None:
            return {"group": list(group.sealed), "target": target}
        if peer_id not in self._voices.others():  # its record may not be here yet, so this alone is not a fault
            if not 0 <= round_number <= target + 1:
                raise ProtocolError("round", f"a stranger called for round {round_number}; the next one is {target}")
            return {"target": target}
        if round_number == target + 1:
            self._note_ahead(peer_id, round_number)
        if round_number != target:
            return {"target": target}
        self._try_again(peer_id, round_number)
        self.on_called(round_number)
        relieved = {"relieved": True} if peer_id in self.without_duty() else {}
        if self._following is not None and self._following[0] == round_number:
            return {"leader": self._following[1], **relieved}
        return {}
