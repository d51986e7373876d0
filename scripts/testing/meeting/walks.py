"""Random walks: a swarm of machines on a virtual clock, with everything around them that can go wrong.

Peers train, call each other to rounds, exchange and commit. Chance freezes them, kills them and starts them again, cuts
the swarm in two and loses or delays messages; up to a third of the members is hostile and answers, calls and closes
groups at random. A peer that learns from records that others are further on adopts their reference. At the end all
faults stop, and the honest peers have to come together.

What must hold at all times:

- one group: of two groups of a round, only one is committed by honest peers that could reach each other
- no attempt takes longer than two windows and half a minute while its peer runs
- nobody commits alone while others are up, in reach and at the same round
- in the end all honest peers commit a round together
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from scripts.testing.meeting.leaderless import Leaderless, Tell
from scripts.testing.meeting.parts import RUN_ID, form, seal, statement
from spes_swarm.base.errors import ProtocolError, RoundError
from spes_swarm.protocol.meeting.gathering import CALL_TIMEOUT_S, POLL_TIMEOUT_S
from spes_swarm.protocol.meeting.meeting import TICK_S, Meeting
from spes_swarm.protocol.meeting.outputs import Answer, Call, Called, Look, Poll, Reply
from spes_swarm.protocol.meeting.view import View
from spes_swarm.protocol.members.standing import Neighbour
from spes_swarm.protocol.rounds.statement import Group

WINDOW_S, EXCHANGE_S = 8.0, 20.0
_RECORD_S, _RECORD_TTL_S = 1.0, 10.0
_TRAINING_S, _RETRY_S = 3.0, 0.5
_CALM_S = 12 * WINDOW_S  # at the end of a walk: time for all to come together
_LOSS = 0.01  # of messages, while faults last
_HANG_S = 2 * WINDOW_S + 30.0


@dataclass
class Peer:
    """A peer of a walk."""

    name: str
    hostile: bool
    machine: Meeting | Leaderless
    target: int = 1
    commits: dict[int, Group] = field(default_factory=dict)
    alive: bool = True
    life: int = 0  # processes that it has had
    awake_from: float = 0.0
    side: int = 0  # of a cut
    records: dict[str, tuple[float, int]] = field(default_factory=dict)  # by peer: when it wrote which target
    began: float | None = None  # its attempt
    exchanges: bool = False
    ticks: bool = False
    nonce: int = 0
    held: list[tuple[float, Callable[[], None]]] = field(default_factory=list)  # what came while it was frozen


@dataclass(frozen=True)
class Problem:
    """An invariant that was broken."""

    seed: int
    time: float
    what: str


class Walk:
    """One walk; see above."""

    def __init__(
        self, seed: int, num_peers: int, num_hostile: int, faults: int, form_of: type[Meeting | Leaderless] = Meeting
    ) -> None:
        self.chance = random.Random(seed)
        self.seed = seed
        self.form_of = form_of
        self.messages = 0
        self.now = 0.0
        self.problems: list[Problem] = []
        self.trace: list[str] = []
        self.rounds = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._keys = count()
        self._replies: dict[tuple[str, int], Callable[[Answer], None]] = {}
        self._entered: dict[bytes, set[str]] = {}  # by group: the honest peers that were in it
        self._lossy = True
        self._disturbed = self._last_loss = 0.0  # when something last went wrong that may divide the swarm
        self._together = -1.0  # when all honest peers last committed a round in one group
        names = [f"p{i}" for i in range(num_peers)]
        self.chance.shuffle(names)
        self.peers = {name: Peer(name, i < num_hostile, self._machine()) for i, name in enumerate(names)}
        self.honest = [peer for peer in self.peers.values() if not peer.hostile]
        for peer in self.peers.values():
            peer.records = dict.fromkeys(set(names) - {peer.name}, (0.0, 1))
            self._after(self.chance.uniform(0.0, _RECORD_S), lambda peer=peer: self._write_record(peer))  # type: ignore[misc]
            self._begin(peer, self.chance.uniform(0.0, 2.0))
        for hostile in self.peers.values():
            if hostile.hostile:
                self._after(1.0, lambda peer=hostile: self._harass(peer))  # type: ignore[misc]
        until = 0.0
        for _ in range(faults):
            until += self.chance.uniform(1.0, 12.0)
            self._after(until, self._fault)
        self._until = until + 20.0
        self._after(self._until, self._calm)

    def run(self) -> list[Problem]:
        """Walks to the end; returns the problems."""
        while self._events and not self.problems and self.now < self._until + _CALM_S:
            self.now, _, event = heapq.heappop(self._events)
            event()
        if not self.problems:
            self._check_end()
        return self.problems

    # The world.

    def _machine(self) -> Meeting | Leaderless:
        return self.form_of(WINDOW_S, EXCHANGE_S, form, lambda peer: False)

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def _at(self, peer: Peer, event: Callable[[], None]) -> None:
        """Something happens at a peer: now, when it wakes, or never."""
        life = peer.life

        def happen() -> None:
            if not peer.alive or peer.life != life:
                return
            if self.now < peer.awake_from:
                self._after(peer.awake_from - self.now, happen)
            else:
                event()

        happen()

    def _view(self, peer: Peer) -> View:
        oldest = self.now - _RECORD_TTL_S
        known = (name for name, (written, _) in sorted(peer.records.items()) if written >= oldest)
        return View(RUN_ID, peer.name, peer.target, tuple(Neighbour(name, True) for name in known))

    def _reach(self, one: Peer, other: Peer) -> bool:
        return one.side == other.side and other.alive

    def _write_record(self, peer: Peer) -> None:
        def write() -> None:
            for other in self.peers.values():
                if other is not peer and other.alive and other.side == peer.side:
                    target = peer.target + (self.chance.choice([-1, 0, 1, 2]) if peer.hostile else 0)
                    other.records[peer.name] = (self.now, target)

        if peer.alive and self.now >= peer.awake_from:
            write()
        self._after(_RECORD_S, lambda: self._write_record(peer))

    # What a peer does around its machine.

    def _input(self, peer: Peer) -> Meeting | Leaderless:
        return peer.machine.at(self.now, self._view(peer))

    def _carry_out(self, peer: Peer) -> None:
        machine = peer.machine
        outputs, machine.outputs = machine.outputs, []
        for decision in machine.decisions:
            self._note(peer, decision)
        machine.decisions.clear()
        for output in outputs:
            match output:
                case Poll():
                    self._ask(peer, output.leader, output, POLL_TIMEOUT_S)
                case Call():
                    self._ask(peer, output.peer, output, CALL_TIMEOUT_S)
                case Reply(key, answer):
                    if (reply := self._replies.pop((peer.name, key), None)) is not None:
                        reply(answer)
                case Called(number):
                    if number == peer.target and not peer.exchanges and peer.began is None:
                        self._begin(peer, self.chance.uniform(0.0, 0.3))
                case Look(number):
                    self._look(peer, number, self.now + _RECORD_TTL_S)
                case _:
                    pass
        if machine.busy and not peer.ticks:
            peer.ticks = True
            self._after(TICK_S, lambda: self._tick(peer, peer.life))
        if (outcome := machine.outcome) is not None and peer.began is not None:
            self._end(peer, outcome)

    def _tick(self, peer: Peer, life: int) -> None:
        def tick() -> None:
            peer.ticks = False
            self._input(peer).tick()
            self._carry_out(peer)

        if peer.life == life:
            self._at(peer, tick)

    def _look(self, peer: Peer, number: int, until: float) -> None:
        def look() -> None:
            if self._view(peer).neighbours or self.now >= until:
                self._input(peer).looked(number)
                self._carry_out(peer)
            else:
                self._look(peer, number, until)

        self._after(0.5, lambda: self._at(peer, look))

    def _begin(self, peer: Peer, after_s: float) -> None:
        life = peer.life

        def begin() -> None:
            if peer.life != life or peer.began is not None or peer.exchanges or peer.hostile:
                return
            self._catch_up(peer)
            peer.began = self.now
            number = peer.target
            peer.nonce += 1
            self._input(peer).join(seal(peer.name, number, peer.nonce), statement(number))
            self._carry_out(peer)
            self._after(_HANG_S, lambda: self._check_hang(peer, life, number))

        self._after(after_s, lambda: self._at(peer, begin))

    def _catch_up(self, peer: Peer) -> None:
        """As peers do from records before a round: the median of the others' targets, and the reference of one."""
        fresh = sorted(target for written, target in peer.records.values() if written >= self.now - _RECORD_TTL_S)
        if not fresh or fresh[(len(fresh) - 1) // 2] <= peer.target:
            return
        donors = [other for other in self.honest if other.target > peer.target and self._reach(peer, other)]
        if donors:
            peer.target = max(donor.target for donor in donors)
            self._note(peer, f"catches up to {peer.target}")
            self._input(peer).reset()
            self._carry_out(peer)

    def _end(self, peer: Peer, outcome: Group | RoundError) -> None:
        peer.began = None
        self._input(peer).leave()
        self._carry_out(peer)
        if isinstance(outcome, RoundError):
            self._begin(peer, _RETRY_S)
            return
        peer.exchanges = True
        self._entered.setdefault(outcome.id, set()).add(peer.name)
        fails = any(self.peers[member.peer_id].hostile for member in outcome.members) and self.chance.random() < 0.2
        self._after(self.chance.uniform(0.3, 2.0), lambda: self._at(peer, lambda: self._commit(peer, outcome, fails)))

    def _commit(self, peer: Peer, group: Group, fails: bool) -> None:
        peer.exchanges = False
        members = {member.peer_id for member in group.members}
        if members != {peer.name} and not any(self.peers[name].hostile for name in members):
            fails = self._entered[group.id] == {peer.name}  # no other member answers
        if fails:  # here, and maybe not at others, who go on
            self._disturbed = max(self._disturbed, self.now)
            self._input(peer).spend(group)
            self._carry_out(peer)
            self._begin(peer, _RETRY_S)
            return
        if group.round != peer.target:  # it has caught up meanwhile
            self._begin(peer, _RETRY_S)
            return
        self._check_commit(peer, group)
        self.rounds += 1
        peer.commits[group.round] = group
        self._note_together(group)
        peer.target = group.round + 1
        self._note(peer, f"commits round {group.round} with {[member.peer_id for member in group.members]}")
        self._input(peer).tick()
        self._carry_out(peer)
        self._begin(peer, self.chance.uniform(0.8, 1.2) * _TRAINING_S)

    # Messages.

    def _lost(self, one: Peer, other: Peer) -> bool:
        if not self._reach(one, other):
            return True
        if self._lossy and self.chance.random() < _LOSS:
            self._last_loss = self.now
            return True
        return False

    def _latency(self) -> float:
        return self.chance.choice([0.02, 0.02, self.chance.uniform(0.0, 0.4)])

    def _ask(self, peer: Peer, name: str, output: Poll | Call, timeout_s: float) -> None:
        other, life = self.peers.get(name), peer.life
        done = False
        self.messages += 2

        def answered(answer: Answer | ProtocolError | None) -> None:
            nonlocal done
            if done or peer.life != life:
                return
            done = True
            machine = self._input(peer)
            if isinstance(output, Poll):
                machine.poll_answered(output, answer)
            else:
                machine.call_answered(output, answer)
            self._carry_out(peer)

        def reply(answer: Answer) -> None:
            assert other is not None
            if not self._lost(other, peer):
                self._after(self._latency(), lambda: self._at(peer, lambda: answered(answer)))

        def arrive() -> None:
            assert other is not None
            if other.hostile:
                self._lie(other, peer, output, reply)
                return
            machine = self._input(other)
            try:
                if isinstance(output, Call):
                    if isinstance(machine, Leaderless) and isinstance(output, Tell):
                        answer = machine.told(peer.name, output)
                    else:
                        answer = machine.called(peer.name, output.round)
                    self._carry_out(other)
                    reply(answer)
                else:
                    key = next(self._keys)
                    self._replies[other.name, key] = reply
                    machine.polled(key, peer.name, output.round, output.sealed)
                    self._carry_out(other)
            except ProtocolError:
                self._carry_out(other)
                reply({"error": "refused"})

        if other is not None and not self._lost(peer, other):
            self._after(self._latency(), lambda: self._at(other, arrive))
        elif other is None or not other.alive:
            self._after(0.05, lambda: self._at(peer, lambda: answered(None)))
        self._after(timeout_s, lambda: self._at(peer, lambda: answered(None)))

    # Hostile members.

    def _lie(self, hostile: Peer, caller: Peer, output: Poll | Call, reply: Callable[[Answer], None]) -> None:
        if isinstance(output, Poll):
            hostile.records["statement " + caller.name] = (self.now, output.round)
        number = output.round
        names = sorted(self.peers)
        some = self.chance.sample(names, self.chance.randint(1, len(names)))
        lies: list[Answer | None] = [
            {},
            None,
            {"over": True},
            {"early": True},
            {"defers": True},
            {"leader": self.chance.choice(names)},
            {"leader": hostile.name},
            {"leader": self.chance.choice(names), "relieved": True},
            {"target": number + self.chance.choice([0, 1, 5])},
            {
                "group": [
                    seal(name, number, self.peers[name].nonce) for name in some if self._has(hostile, name, number)
                ]
            },
        ]
        lie = self.chance.choice(lies)
        if lie is not None:
            self._after(self.chance.choice([0.0, 1.0, 3.0]), lambda: reply(lie))

    def _has(self, hostile: Peer, name: str, number: int) -> bool:
        """Returns True if a hostile peer has a statement: its own, or one that was given to it."""
        return name == hostile.name or hostile.records.get("statement " + name, (0.0, 0))[1] == number

    def _harass(self, hostile: Peer) -> None:
        victim = self.chance.choice(self.honest)
        if self._reach(hostile, victim):

            def arrive() -> None:
                machine = self._input(victim)
                number = victim.target + self.chance.choice([-1, 0, 0, 0, 1, 2])
                hostile.target = max(hostile.target, victim.target)
                try:
                    if self.chance.random() < 0.5:
                        machine.called(hostile.name, number)
                    else:
                        machine.polled(next(self._keys), hostile.name, number, seal(hostile.name, number))
                except ProtocolError:
                    pass
                self._carry_out(victim)

            self._at(victim, arrive)
        self._after(self.chance.uniform(0.1, 3.0), lambda: self._harass(hostile))

    # Faults.

    def _fault(self) -> None:
        kind = self.chance.choice(["freeze", "freeze", "kill", "cut", "lose"])
        peer = self.chance.choice(self.honest)
        if kind == "freeze":
            seconds = self.chance.choice([self.chance.uniform(1, 6), self.chance.uniform(5, 25)])
            self._note(peer, f"frozen for {seconds:.1f} s")
            peer.awake_from = max(peer.awake_from, self.now + seconds)
            self._disturbed = max(self._disturbed, peer.awake_from)
        elif kind == "kill" and peer.alive:
            self._note(peer, "killed")
            peer.alive, peer.life = False, peer.life + 1
            self._after(self.chance.uniform(1.0, 15.0), lambda: self._restart(peer))
        elif kind == "cut":
            for each in self.peers.values():
                each.side = self.chance.randint(0, 1)
            self.trace.append(f"{self.now:7.2f} cut { ({each.name: each.side for each in self.peers.values()}) }")
            self._after(self.chance.uniform(2.0, 20.0), self._heal)
        elif kind == "lose":
            self._lossy = True

    def _heal(self) -> None:
        if any(each.side for each in self.peers.values()):
            self._disturbed = max(self._disturbed, self.now)
            self.trace.append(f"{self.now:7.2f} healed")
        for each in self.peers.values():
            each.side = 0

    def _restart(self, peer: Peer) -> None:
        if peer.alive:
            return
        peer.alive, peer.machine, peer.began = True, self._machine(), None
        peer.exchanges = peer.ticks = False
        peer.awake_from = self.now
        peer.records = {o.name: (self.now, o.target) for o in self.peers.values() if o is not peer and o.alive}
        self._note(peer, "restarts")
        self._disturbed = max(self._disturbed, self.now)
        self._begin(peer, self.chance.uniform(0.5, 2.0))

    def _calm(self) -> None:
        """The end of all faults."""
        self.trace.append(f"{self.now:7.2f} calm")
        self._lossy = False
        self._heal()
        for peer in self.honest:
            peer.awake_from = min(peer.awake_from, self.now)
            if not peer.alive:
                self._restart(peer)

    # What must hold.

    def _problem(self, what: str) -> None:
        self.trace.append(f"{self.now:7.2f} PROBLEM: {what}")
        self.problems.append(Problem(self.seed, self.now, what))

    def _note(self, peer: Peer, what: str) -> None:
        self.trace.append(f"{self.now:7.2f} {peer.name}: {what}")

    def _note_together(self, group: Group) -> None:
        """Notes whether all honest peers have committed a round in the same group."""
        if all((theirs := peer.commits.get(group.round)) and theirs.id == group.id for peer in self.honest):
            self._together = self.now

    @property
    def _undisturbed(self) -> bool:
        """True if all honest peers have been together since anything last went wrong that may divide them."""
        frozen = any(self.now < peer.awake_from or not peer.alive or peer.side for peer in self.honest)
        return not frozen and self._together > max(self._disturbed, self._last_loss)

    def _check_commit(self, peer: Peer, group: Group) -> None:
        members = {member.peer_id for member in group.members}
        for other in self.honest:
            theirs = other.commits.get(group.round)
            if theirs is None or theirs.id == group.id:
                continue
            members_of_both = members | {member.peer_id for member in theirs.members}
            if any(self.peers[name].hostile for name in members_of_both):  # an exchange that only seemed to go well
                self._disturbed = self.now
            elif self._undisturbed:
                self._problem(f"{peer.name} and {other.name} commit round {group.round} in two groups")
        others_come = any(other.target == group.round for other in self.honest if other is not peer)
        if len(members) == 1 and self._undisturbed and others_come:
            self._problem(f"{peer.name} commits round {group.round} alone")

    def _check_hang(self, peer: Peer, life: int, number: int) -> None:
        if peer.life == life and peer.began is not None and peer.target == number:
            since = max(peer.began, peer.awake_from)
            if self.now - since >= _HANG_S:
                self._problem(f"{peer.name} waits for round {number} since {peer.began:.1f}")

    def _check_end(self) -> None:
        if self._together <= self._until:
            at = {peer.name: (peer.target, max(peer.commits, default=0)) for peer in self.honest}
            self._problem(f"not together at the end: targets and commits {at}")


def walk(
    seed: int, num_peers: int, num_hostile: int, faults: int, form_of: type[Meeting | Leaderless] = Meeting
) -> tuple[list[Problem], Walk]:
    """Walks once; returns the problems and the walk."""
    it = Walk(seed, num_peers, num_hostile, faults, form_of)
    return it.run(), it
