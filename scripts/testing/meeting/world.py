"""A swarm of machines on a virtual clock, with everything around them that can go wrong.

Peers train, call each other to rounds, exchange and commit. What each knows of the others is told by the real
`Reputation`, from records that are a second old and expire. Chance freezes peers, kills them and starts them again as
newcomers, cuts the swarm in two, takes the way from one peer to another, and loses or delays messages.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from scripts.testing.meeting.parts import RUN_ID, form, seal, statement
from spes_swarm.base.errors import NoLeaderError, ProtocolError, RoundError
from spes_swarm.protocol.meeting.gathering import CALL_TIMEOUT_S, POLL_TIMEOUT_S
from spes_swarm.protocol.meeting.meeting import TICK_S, Meeting
from spes_swarm.protocol.meeting.outputs import Ahead, Answer, Call, Called, Fault, Poll, Reply, Stall
from spes_swarm.protocol.meeting.view import View
from spes_swarm.protocol.members.reputation import Neighbour, Reputation
from spes_swarm.protocol.rounds.statement import Group

Said = Answer | ProtocolError  # what an asked peer says

EXCHANGE_S = 20.0
RECORD_S, RECORD_TTL_S = 1.0, 10.0
_RETRY_S, _LEAST_TRAINING_S = 0.5, 3.0
_RECORDS_LAG_S = 4.0
_LONGEST_FREEZE_S = 25.0
_ALONE_S = 5.0  # for which a member waits for others to enter an exchange
_FAILURES = 0.02  # of exchanges, at one member of a group, while faults last
_LOSS = 0.01  # of messages, while faults last
DOUBTED_STALLS = 2  # of a leader, at a peer, for it to doubt that leader


@dataclass
class Peer:
    """A peer of a swarm, and the process around its machine."""

    name: str
    hostile: bool
    machine: Meeting
    reputation: Reputation
    reachable: bool
    training_s: float  # until it joins a round by itself
    step_s: float  # until it joins a round to which it is called
    target: int = 1
    reference: int = 0  # another one for each group that it has committed or adopted
    commits: dict[int, Group] = field(default_factory=dict)
    stalls: Counter[str] = field(default_factory=Counter)
    failures: Counter[tuple[int, str]] = field(default_factory=Counter)  # exchanges, by round and leader
    alive: bool = True
    life: int = 0  # processes that it has had
    committed_at: float = 0.0
    awake_from: float = 0.0
    blind_until: float = 0.0  # it has slept until its records had expired
    side: int = 0  # of a cut
    records: dict[str, tuple[float, int, bool]] = field(default_factory=dict)  # by peer: when, its target, reachable
    begins_at: float = math.inf  # an attempt
    began: float | None = None
    exchanges: bool = False
    ticks: bool = False
    nonce: int = 0
    ahead: int = 0  # a round that others gather

    @property
    def machine_is_idle(self) -> bool:
        """True if nobody waits for anything here."""
        return self.began is None and not self.exchanges


class World:
    """The swarm; subclasses see what happens in it and let liars act."""

    def __init__(self, seed: int, num_honest: int, num_hostile: int, faults: int, freezes_only: bool) -> None:
        self.chance = random.Random(seed)
        self.seed = seed
        self.now = 0.0
        self.messages = self.rounds = 0
        self.trace: list[str] = []
        self.freezes_only = freezes_only
        self.window_s = self.chance.choice([8.0, 20.0]) if freezes_only else 8.0
        self.longest_step_s = self.chance.choice([0.3, 2.0, 1.5 * self.window_s])
        self.faulty = True  # until all faults stop
        self.disturbed = 0.0  # when something last went wrong that may divide the swarm
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._keys = count(), count()
        self._replies: dict[tuple[str, int], Callable[[Said], None]] = {}
        self._failing: set[bytes] = set()  # groups whose exchange fails at all members
        self.failed: set[tuple[str, bytes]] = set()  # exchanges, by peer and group
        self._exchanging: dict[bytes, set[str]] = {}  # by group: who has entered it and not failed
        self._no_way: set[tuple[str, str]] = set()
        self.freezes: list[tuple[float, float]] = []  # of honest peers: from when until when
        names = [f"p{i}" for i in range(num_honest + num_hostile)]
        self.chance.shuffle(names)
        hidden = set(self.chance.sample(names, 1)) if len(names) > 2 and self.chance.random() < 0.3 else set()
        self.peers = {name: self._peer(name, i < num_hostile, name not in hidden) for i, name in enumerate(names)}
        self.honest = [peer for peer in self.peers.values() if not peer.hostile]
        for peer in self.peers.values():
            peer.records = {o.name: (0.0, 1, o.reachable) for o in self.peers.values() if o is not peer}
            peer.reputation.committed(0.0, sorted(set(names) - {peer.name}), ())
            self.after(self.chance.uniform(0.0, RECORD_S), lambda peer=peer: self._write_record(peer))  # type: ignore[misc]
            if not peer.hostile:
                self._begin(peer, self.chance.uniform(0.0, 2.0))
        until = 0.0
        for _ in range(faults):
            until += self.chance.uniform(1.0, 12.0)
            self.after(until, self._fault)
        self.calm_from = until + _LONGEST_FREEZE_S + 1.0
        self.after(self.calm_from, self._calm)

    def _peer(self, name: str, hostile: bool, reachable: bool) -> Peer:
        training_s = _LEAST_TRAINING_S * self.chance.choice([1.0, 1.2, 20.0])
        step_s = self.chance.choice([0.05, 0.1, 0.3, self.longest_step_s])
        return Peer(name, hostile, self._machine(), Reputation(), reachable, training_s, step_s)

    # What is seen of it.

    def on_commit(self, peer: Peer, group: Group) -> None:
        """A peer has committed a round, and this is about to be noted."""

    def on_failure(self, peer: Peer, group: Group) -> None:
        """A peer's exchange has failed, and this is about to be noted."""

    def on_end(self, peer: Peer, began: float, outcome: Group | RoundError) -> None:
        """A peer's attempt has ended."""

    def on_join(self, peer: Peer) -> None:
        """A peer attempts a round."""

    def on_output(self, peer: Peer, output: Ahead | Fault | Stall) -> None:
        """A machine reports something about others."""

    def on_disturbance(self, victim: Peer, liar: Peer, asked: Poll | Call, refused: bool) -> None:
        """A liar has called or polled a peer, which has refused that or has not."""

    def on_doubt(self, peer: Peer, doubted: list[str]) -> None:
        """Most members of a group that a peer has committed doubt these."""

    def lie(self, liar: Peer, caller: Peer, asked: Poll | Call, reply: Callable[[Said], None]) -> None:
        """A liar was asked something."""

    def spoils(self, leader: str) -> bool:
        """Whether the exchanges of this leader's groups fail."""
        del leader
        return False

    def note(self, peer: Peer, what: str) -> None:
        """Writes a line of the trace."""
        self.trace.append(f"{self.now:7.2f} {peer.name}: {what}")

    def step(self) -> None:
        """Has the next event happen."""
        self.now, _, event = heapq.heappop(self._events)
        event()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Has something happen later."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def at(self, peer: Peer, event: Callable[[], None]) -> None:
        """Something happens at a peer: now, when it wakes, or never."""
        life = peer.life

        def happen() -> None:
            if not peer.alive or peer.life != life:
                return
            if self.now < peer.awake_from:
                self.after(peer.awake_from - self.now, happen)
            else:
                event()

        happen()

    def reach(self, one: Peer, other: Peer) -> bool:
        """True if a peer can ask another one something now."""
        return one.side == other.side and other.alive and (one.name, other.name) not in self._no_way

    def runs(self, peer: Peer) -> bool:
        """True if a peer is up, awake and connected to all."""
        ways = any(peer.name in way for way in self._no_way)
        return peer.alive and self.now >= peer.awake_from and not peer.side and not ways

    def input(self, peer: Peer) -> Meeting:
        """The machine of a peer, about to be told something."""
        return peer.machine.at(self.now, self.view(peer))

    def view(self, peer: Peer) -> View:
        """What a peer knows of the others, as its roster would tell."""
        oldest, reputation = self.now - RECORD_TTL_S, peer.reputation
        present = [name for name, (written, *_) in sorted(peer.records.items()) if written >= oldest]
        electorate = reputation.electorate(present)
        training = {name for name in present if reputation.has_answered(name)} | electorate
        wait_s = reputation.wait_times(training, self.window_s)
        neighbours = (
            Neighbour(name, peer.records[name][2], name in electorate, wait_s[name]) for name in sorted(training)
        )
        without_duty = frozenset(reputation.without_duty)
        defers = reputation.defers(present)
        blind = self.now < peer.blind_until
        return View(RUN_ID, peer.name, peer.target, tuple(neighbours), peer.reachable, defers, without_duty, blind)

    def carry_out(self, peer: Peer) -> None:
        """Does what a peer's machine wants done."""
        machine = peer.machine
        outputs, decisions = machine.advance()
        for decision in decisions:
            self.note(peer, decision)
        for output in outputs:
            match output:
                case Poll():
                    self._ask(peer, output.leader, output, POLL_TIMEOUT_S)
                case Call():
                    self._ask(peer, output.peer, output, CALL_TIMEOUT_S)
                case Reply(key, answer):
                    self._replies.pop((peer.name, key))(answer)
                case Called(number):
                    if number == peer.target and peer.machine_is_idle:
                        self._begin(peer, self.chance.uniform(0.0, peer.step_s))
                case Ahead(number):
                    peer.ahead = max(peer.ahead, number)
                    self.on_output(peer, output)
                case Stall(leader):
                    peer.stalls[leader] += 1
                    self.on_output(peer, output)
                case Fault():
                    self.on_output(peer, output)
        if machine.busy and not peer.ticks:
            peer.ticks = True
            self.after(TICK_S, lambda: self._tick(peer, peer.life))
        if (outcome := machine.outcome) is not None and peer.began is not None:
            self._end(peer, outcome)

    # A peer.

    def _machine(self) -> Meeting:
        return Meeting(self.window_s, EXCHANGE_S, form, lambda peer: False)

    def _write_record(self, peer: Peer) -> None:
        if peer.hostile:  # what records say of rounds is not the machine's business
            peer.target = max(other.target for other in self.honest)
        if peer.alive and self.now >= peer.awake_from:
            for other in self.peers.values():
                if other is not peer and other.alive and self.now >= other.awake_from and other.side == peer.side:
                    other.records[peer.name] = (self.now, peer.target, peer.reachable)
                    other.reputation.note_answer(peer.name)  # to a greeting
            self.input(peer)  # it keeps the time
            if peer.machine_is_idle and self._round_of_most(peer) > peer.target:
                self._begin(peer, peer.step_s)
        self.after(RECORD_S, lambda: self._write_record(peer))

    def _tick(self, peer: Peer, life: int) -> None:
        def tick() -> None:
            peer.ticks = False
            self.input(peer)
            self.carry_out(peer)

        if peer.life == life:
            self.at(peer, tick)

    def _begin(self, peer: Peer, after_s: float) -> None:
        """Has a peer begin an attempt then, unless it is to do so earlier."""
        life, at = peer.life, self.now + after_s
        if at >= peer.begins_at:
            return
        peer.begins_at = at

        def begin() -> None:
            if peer.life != life or peer.begins_at != at:
                return
            peer.begins_at = math.inf
            if not peer.machine_is_idle or peer.hostile:
                return
            if self._catch_up(peer):
                self._begin(peer, self.chance.uniform(0.8, 1.2) * peer.training_s)
                return
            peer.began = self.now
            peer.nonce += 1
            self.on_join(peer)
            sealed = seal(peer.name, peer.target, peer.reference, peer.life, peer.nonce)
            self.input(peer).join(sealed, statement(peer.target, peer.reference, peer.life))
            self.carry_out(peer)

        self.after(after_s, lambda: self.at(peer, begin))

    def _catch_up(self, peer: Peer) -> bool:
        """Adopts the reference of most others, as peers do before a round that could not bring theirs up to date."""
        most = self._round_of_most(peer)
        donors = [other for other in self.honest if other.target == most and self.reach(peer, other)]
        if most == peer.target or not donors:
            return False
        self._adopt(peer, donors[0])
        return True

    def _adopt(self, peer: Peer, donor: Peer) -> None:
        peer.target, peer.reference = donor.target, donor.reference
        peer.commits = {number: group for number, group in peer.commits.items() if number < peer.target}
        peer.failures.clear()
        self.note(peer, f"adopts {donor.name}'s reference, for round {peer.target}")
        self.input(peer).reset()
        self.carry_out(peer)

    def _round_of_most(self, peer: Peer) -> int:
        """The upper median of the rounds of all, or one that others gather; no earlier one just after a commit."""
        fresh = [target for written, target, _ in peer.records.values() if written >= self.now - RECORD_TTL_S]
        ordered = sorted([*fresh, peer.target])
        most = max(ordered[len(ordered) // 2], peer.ahead)
        return most if most > peer.target or self.now > peer.committed_at + _RECORDS_LAG_S else peer.target

    def _end(self, peer: Peer, outcome: Group | RoundError) -> None:
        began, peer.began = peer.began or 0.0, None
        self.on_end(peer, began, outcome)
        self.input(peer).leave()
        self.carry_out(peer)
        if isinstance(outcome, RoundError):
            if isinstance(outcome, NoLeaderError):
                peer.reputation.stop_following()
            self._begin(peer, _RETRY_S)
            return
        peer.exchanges = True
        self._exchanging.setdefault(outcome.id, set()).add(peer.name)
        fails = any(self.peers[member.peer_id].hostile for member in outcome.members) and self.chance.random() < 0.2
        fails = fails or self.spoils(peer.machine.leader)
        self.after(self.chance.uniform(0.3, 2.0), lambda: self.at(peer, lambda: self._commit(peer, outcome, fails)))

    def _commit(self, peer: Peer, group: Group, fails: bool, waited: bool = False) -> None:
        members = {member.peer_id for member in group.members}
        if self._exchanging[group.id] == {peer.name} != members and not waited:  # others may be about to enter it
            self.after(_ALONE_S, lambda: self.at(peer, lambda: self._commit(peer, group, fails, waited=True)))
            return
        peer.exchanges = False
        if members != {peer.name} and not any(self.peers[name].hostile for name in members):
            alone = self._exchanging[group.id] == {peer.name}  # no other member answers
            chance = _FAILURES if self.faulty and not self.freezes_only else 0.0
            if self.chance.random() < chance:
                self._failing.add(group.id)
            fails = fails or alone or self.chance.random() < chance or group.id in self._failing
        fails = fails or (peer.name, group.id) in self.failed  # nobody exchanges it again
        if fails or group.round != peer.target:  # here, and maybe not at others, who go on
            self.failed.add((peer.name, group.id))
            self.on_failure(peer, group)
            self.disturbed = max(self.disturbed, self.now)
            self._exchanging[group.id].discard(peer.name)
            self.input(peer).spend(group)
            self.carry_out(peer)
            self._begin(peer, _RETRY_S)
            return
        self.rounds += 1
        self.note(peer, f"commits round {group.round} with {sorted(members)}")
        self.on_commit(peer, group)
        peer.committed_at = self.now
        peer.commits[group.round] = group
        present = {n.peer_id for n in self.view(peer).neighbours}
        peer.reputation.committed(self.now, sorted(members - {peer.name}), sorted(present - members))
        doubted = self._doubted(group)
        peer.reputation.without_duty = dict.fromkeys(doubted, group.round)
        self.on_doubt(peer, doubted)
        peer.target, peer.reference = group.round + 1, int.from_bytes(group.id[:6])
        self.input(peer)
        self.carry_out(peer)
        self._begin(peer, self.chance.uniform(0.8, 1.2) * peer.training_s)

    def _doubted(self, group: Group) -> list[str]:
        """Whom most members of a group doubt, since it has not closed groups."""
        honest = [p for m in group.members if not (p := self.peers[m.peer_id]).hostile]
        return [
            name
            for name in sorted(self.peers)
            if 2 * sum(peer.stalls[name] >= DOUBTED_STALLS for peer in honest) > len(honest)
        ]

    # Messages.

    def _lost(self, one: Peer, other: Peer) -> bool:
        if not self.reach(one, other):
            return True
        if self.faulty and not self.freezes_only and self.chance.random() < _LOSS:
            self.disturbed = max(self.disturbed, self.now)
            return True
        return False

    def _latency(self) -> float:
        if self.faulty and not self.freezes_only and self.chance.random() < _LOSS:
            self.disturbed = max(self.disturbed, self.now)
            return self.chance.uniform(1.0, 6.0)
        return self.chance.choice([0.02, 0.02, self.chance.uniform(0.0, 0.2)])

    def _ask(self, peer: Peer, name: str, asked: Poll | Call, timeout_s: float) -> None:
        other, life = self.peers.get(name), peer.life
        done = False
        self.messages += 2

        def answered(answer: Said | None) -> None:
            nonlocal done
            if done or peer.life != life:
                return
            done = True
            if answer is not None:
                peer.reputation.note_answer(name)
            machine = self.input(peer)
            if isinstance(asked, Poll):
                machine.poll_answered(asked, answer)
            else:
                machine.call_answered(asked, answer)
            self.carry_out(peer)

        def reply(answer: Said | None) -> None:
            assert other is not None
            if not self._lost(other, peer):
                self.after(self._latency(), lambda: self.at(peer, lambda: answered(answer)))

        def arrive() -> None:
            assert other is not None
            other.reputation.note_answer(peer.name)
            if other.hostile:
                self.lie(other, peer, asked, reply)
                return
            machine = self.input(other)
            try:
                if isinstance(asked, Call):
                    answer = machine.called(peer.name, asked.round)
                    self.carry_out(other)
                    reply(answer)
                else:
                    key = next(self._keys)
                    self._replies[other.name, key] = reply
                    machine.polled(key, peer.name, asked.round, asked.sealed)
                    self.carry_out(other)
            except ProtocolError:
                self.carry_out(other)
                reply(None)  # a refusal, which is no fault

        if other is not None and not self._lost(peer, other):
            self.after(self._latency(), lambda: self.at(other, arrive))
        elif other is None or not other.alive:
            self.after(0.05, lambda: self.at(peer, lambda: answered(None)))
        self.after(timeout_s, lambda: self.at(peer, lambda: answered(None)))

    def disturb(self, liar: Peer, victim: Peer, asked: Poll | Call) -> None:
        """A liar calls or polls a peer; it does not care for the answer."""

        def arrive() -> None:
            machine, refused = self.input(victim), False
            try:
                if isinstance(asked, Call):
                    machine.called(liar.name, asked.round)
                else:
                    key = next(self._keys)
                    self._replies[victim.name, key] = lambda answer: None
                    machine.polled(key, liar.name, asked.round, asked.sealed)
            except ProtocolError:
                refused = True
            self.on_disturbance(victim, liar, asked, refused)
            self.carry_out(victim)

        if self.reach(liar, victim):
            self.at(victim, arrive)

    # Faults.

    def _fault(self) -> None:
        kind = self.chance.choice(["freeze"] * 3 + ["kill", "cut", "way"] * (not self.freezes_only))
        peer = self.chance.choice(self.honest)
        frozen = {other.name for other in self.honest if self.now < other.awake_from}
        if self.freezes_only and 2 * len(frozen | {peer.name}) >= len(self.honest):
            return  # most stay awake
        if kind == "freeze":
            seconds = self.chance.choice([self.chance.uniform(1, 6), self.chance.uniform(5, _LONGEST_FREEZE_S)])
            self.note(peer, f"frozen for {seconds:.1f} s")
            peer.awake_from = max(peer.awake_from, self.now + seconds)
            self.freezes.append((self.now, peer.awake_from))
            if seconds > RECORD_TTL_S / 2:
                peer.blind_until = peer.awake_from + RECORD_TTL_S
            self.disturbed = max(self.disturbed, peer.awake_from)
        elif kind == "kill" and peer.alive:
            self.note(peer, "killed")
            peer.alive, peer.life = False, peer.life + 1
            self.after(self.chance.uniform(1.0, 15.0), lambda: self._restart(peer))
        elif kind == "cut":
            for each in self.peers.values():
                each.side = self.chance.randint(0, 1)
            self.disturbed = max(self.disturbed, self.now)
            self.trace.append(f"{self.now:7.2f} cut { ({each.name: each.side for each in self.peers.values()}) }")
            self.after(self.chance.uniform(2.0, 20.0), self._heal)
        elif kind == "way":
            way = peer.name, self.chance.choice(sorted(self.peers.keys() - {peer.name}))
            self._no_way.add(way)
            self.trace.append(f"{self.now:7.2f} no way from {way[0]} to {way[1]}")
            self.after(self.chance.uniform(5.0, 30.0), self._heal)

    def _heal(self) -> None:
        self.disturbed = max(self.disturbed, self.now)
        self.trace.append(f"{self.now:7.2f} healed")
        self._no_way.clear()
        for each in self.peers.values():
            each.side = 0

    def _restart(self, peer: Peer) -> None:
        if peer.alive:
            return
        peer.alive, peer.machine, peer.began = True, self._machine(), None
        peer.exchanges = peer.ticks = False
        peer.failures.clear()
        peer.begins_at, peer.awake_from = math.inf, self.now
        peer.records = {
            o.name: (self.now, o.target, o.reachable) for o in self.peers.values() if o is not peer and o.alive
        }
        others = [other.name for other in self.honest if other is not peer]
        peer.reputation = Reputation(self.chance.sample(others, min(2, len(others))))
        peer.reputation.follow()
        donors = [other for other in self.honest if other.target > peer.target and self.reach(peer, other)]
        if donors:
            self._adopt(peer, max(donors, key=lambda other: (other.target, other.name)))
        self.note(peer, "restarts")
        self.disturbed = max(self.disturbed, self.now)
        self._begin(peer, self.chance.uniform(0.5, 2.0))

    def _calm(self) -> None:
        """The end of all faults."""
        self.trace.append(f"{self.now:7.2f} calm")
        self.faulty = False
        self._heal()
        for peer in self.honest:
            peer.stalls.clear()
            if not peer.alive:
                self._restart(peer)
