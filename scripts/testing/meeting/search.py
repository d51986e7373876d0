"""Exhaustive search: one round of two or three machines, in every order of messages and with a few faults.

All peers want round 1 as soon as they run: none trains meanwhile. A message between peers that run arrives before time
passes, in any order with others. Each step is a choice: which message arrives, whether one is lost, whether a peer
crashes now or is frozen for a while. Equal states are visited once. What must hold in all of them:

- all peers that exchange do so in the same group
- nobody gets a group alone while another peer has neither crashed nor been frozen, and no message was lost
- within a minute of the last fault, every peer that runs has a group, or has given up while most are past the round: it
  would adopt their reference
"""

from __future__ import annotations

import pickle
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

from scripts.testing.meeting.parts import RUN_ID, form, seal, statement
from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.meeting.gathering import CALL_TIMEOUT_S, POLL_TIMEOUT_S
from spes_swarm.protocol.meeting.leading import Leading
from spes_swarm.protocol.meeting.meeting import Meeting
from spes_swarm.protocol.meeting.outputs import Answer, Call, Poll, Reply
from spes_swarm.protocol.meeting.view import View
from spes_swarm.protocol.members.reputation import Neighbour
from spes_swarm.protocol.rounds.statement import Group, Statement

WINDOW_S, EXCHANGE_S = 2.0, 4.0
STEP_S, FREEZE_S = 0.5, 6.0
LIMIT_S = 60.0  # after the last fault
_OLD_S = 15.0  # times further back than this make no difference


@dataclass
class Peer:
    """A peer, its machine and what it waits for."""

    machine: Meeting
    joined: bool = False
    alive: bool = True
    awake_from: float = 0.0
    group: Group | None = None
    behind: bool = False  # it has given up, and most have a group
    asks: dict[int, tuple[Poll | Call, float]] = field(default_factory=dict)  # by key: until when an answer counts
    owes: dict[int, tuple[str, int]] = field(default_factory=dict)  # by its own key: whose poll with which key


@dataclass(frozen=True)
class Message:
    """A question (output) or an answer."""

    sender: str
    receiver: str
    key: int
    output: Poll | Call | None = None
    answer: Answer | None = None


@dataclass
class Scene:
    """A state of the search."""

    peers: dict[str, Peer]
    crashes: int
    freezes: int
    losses: int
    now: float = 100.0
    messages: list[Message] = field(default_factory=list)
    last_fault: float = 100.0
    faulty: frozenset[str] = frozenset()
    lost: bool = False
    keys: int = 0

    def problem(self) -> str | None:
        """What does not hold in this state."""
        groups = {name: peer.group for name, peer in self.peers.items() if peer.group is not None}
        counts = Counter(group.id for group in groups.values())
        # The exchange of a group in which no other member takes part fails.
        if len({group.id for group in groups.values() if len(group.members) == 1 or counts[group.id] > 1}) > 1:
            return f"two groups: { ({name: [m.peer_id for m in group.members] for name, group in groups.items()}) }"
        others_run = len(self.peers) > 1 + len(self.faulty) and not self.lost
        for name, group in groups.items():
            if len(group.members) == 1 and others_run and name not in self.faulty:
                return f"{name} is alone in its group"
        if self.now > self.last_fault + LIMIT_S and not self.done:
            return "a peer that runs has no group and is not behind"
        return None

    @property
    def done(self) -> bool:
        """True if every peer that runs has a group, or has to adopt the reference of those that have one."""
        return all(peer.group is not None or peer.behind or not peer.alive for peer in self.peers.values())

    def runs(self, name: str) -> bool:
        """True if a peer has neither crashed nor is it frozen."""
        return self.peers[name].alive and self.now >= self.peers[name].awake_from

    # Steps.

    def choices(self) -> Iterator[tuple[Any, ...]]:
        """What may happen next."""
        waits = True
        for name, peer in self.peers.items():
            if not peer.joined and self.runs(name):
                yield "join", name
                waits = False
            if self.runs(name) and peer.group is None:
                if self.crashes:
                    yield "crash", name
                if self.freezes:
                    yield "freeze", name
        for index, message in enumerate(self.messages):
            if self.runs(message.receiver) or not self.peers[message.receiver].alive:
                yield "deliver", index
                waits = False
            if self.losses:
                yield "lose", index
        if waits:
            yield ("wait",)

    def take(self, choice: tuple[Any, ...]) -> None:
        """Has it happen."""
        kind = choice[0]
        if kind == "wait":
            self._wait()
        elif kind == "join":
            self.peers[choice[1]].joined = True
            self._join(choice[1])
        elif kind == "deliver":
            self._deliver(self.messages.pop(choice[1]))
        elif kind == "lose":
            self.messages.pop(choice[1])
            self.losses, self.lost, self.last_fault = self.losses - 1, True, self.now
        else:
            peer, self.last_fault = self.peers[choice[1]], self.now
            self.faulty |= {choice[1]}
            if kind == "crash":
                self.crashes, peer.alive = self.crashes - 1, False
            else:
                self.freezes, peer.awake_from = self.freezes - 1, self.now + FREEZE_S
                self.last_fault = peer.awake_from

    def _input(self, name: str) -> Meeting:
        others = tuple(Neighbour(other, True) for other in self.peers if other != name)
        target = 1 if self.peers[name].group is None else 2
        return self.peers[name].machine.at(self.now, View(RUN_ID, name, target, others))

    def _join(self, name: str) -> None:
        self._input(name).join(seal(name, 1), statement(1))
        self._carry_out(name)

    def _wait(self) -> None:
        self.now += STEP_S
        for name, peer in self.peers.items():
            if not self.runs(name):
                continue
            for key, (output, until) in list(peer.asks.items()):
                if self.now >= until:
                    self._answered(name, key, output, None)
            self._input(name)
            self._carry_out(name)
            if peer.joined and peer.group is None and not peer.machine.joining:
                targets = [1 if each.group is None else 2 for each in self.peers.values() if each.alive]
                peer.behind = sorted(targets)[len(targets) // 2] > 1
                if not peer.behind:
                    self._join(name)

    def _deliver(self, message: Message) -> None:
        name, peer = message.receiver, self.peers[message.receiver]
        if message.output is None:
            if peer.alive and (asked := peer.asks.get(message.key)) is not None:
                self._answered(name, message.key, asked[0], message.answer)
            return
        if not peer.alive:
            sender = self.peers[message.sender]
            if message.key in sender.asks and self.runs(message.sender):
                self._answered(message.sender, message.key, message.output, None)
            return
        machine = self._input(name)
        try:
            if isinstance(message.output, Call):
                answer = machine.called(message.sender, message.output.round)
                self.messages.append(Message(name, message.sender, message.key, answer=answer))
            else:
                self.keys += 1
                machine.polled(self.keys, message.sender, message.output.round, message.output.sealed)
                peer.owes[self.keys] = message.sender, message.key
        except ProtocolError:  # a refusal, which is no fault
            self.messages.append(Message(name, message.sender, message.key))
        self._carry_out(name)

    def _answered(self, name: str, key: int, output: Poll | Call, answer: Answer | None) -> None:
        del self.peers[name].asks[key]
        machine = self._input(name)
        if isinstance(output, Poll):
            machine.poll_answered(output, answer)
        else:
            machine.call_answered(output, answer)
        self._carry_out(name)

    def _carry_out(self, name: str) -> None:
        peer = self.peers[name]
        machine = peer.machine
        for output in machine.advance()[0]:
            if isinstance(output, Poll | Call):
                self.keys += 1
                receiver = output.leader if isinstance(output, Poll) else output.peer
                timeout_s = POLL_TIMEOUT_S if isinstance(output, Poll) else CALL_TIMEOUT_S
                peer.asks[self.keys] = output, self.now + timeout_s
                self.messages.append(Message(name, receiver, self.keys, output))
            elif isinstance(output, Reply) and output.key in peer.owes:
                asker, key = peer.owes.pop(output.key)
                self.messages.append(Message(name, asker, key, answer=output.answer))
        outcome = machine.outcome
        if outcome is not None:
            if isinstance(outcome, Group):
                peer.group = outcome
            self._input(name).leave()
            self._carry_out(name)

    # Equal states.

    def fingerprint(self) -> bytes:
        """The same for states between which nothing differs but the time and the numbers of messages."""
        keys: dict[int, int] = {}

        def rename(key: int) -> int:
            return keys.setdefault(key, len(keys))

        peers = [
            (
                self._relative(peer.machine, rename),
                peer.joined,
                peer.behind,
                peer.alive,
                max(peer.awake_from - self.now, 0.0),
                peer.group and peer.group.sealed,
                [(rename(key), self._relative(ask, rename)) for key, ask in peer.asks.items()],
                [(rename(key), owner, rename(theirs)) for key, (owner, theirs) in peer.owes.items()],
            )
            for peer in self.peers.values()
        ]
        messages = sorted(
            (m.sender, m.receiver, m.output is None, repr(self._relative((m.output, m.answer), rename)), rename(m.key))
            for m in self.messages
        )
        budget = (self.crashes, self.freezes, self.losses, self.lost, sorted(self.faulty))
        return repr((peers, messages, budget, round(self.now - self.last_fault, 3))).encode()

    def _time(self, at: float) -> float:
        return max(round(at - self.now, 3), -_OLD_S)

    def _relative(self, value: Any, rename: Any) -> Any:
        kind = type(value)
        if kind is float:
            return self._time(value)
        if kind in _PLAIN:
            return value
        if kind is Group:
            return value.sealed
        if kind is Statement:
            assert value == statement(value.round)  # so its round is all there is to it
            return value.round
        if isinstance(value, dict):
            return [(self._relative(k, rename), self._relative(v, rename)) for k, v in sorted(value.items())]
        if isinstance(value, set | frozenset):
            return sorted(value)
        if isinstance(value, list | tuple):
            return [self._relative(item, rename) for item in value]
        if kind is View or callable(value):
            return None
        names = _names(kind, tuple(getattr(value, "__dict__", ())))  # type: ignore[arg-type]  # it has a hash
        return [(name, self._relative(getattr(value, name), rename)) for name in names]


_PLAIN = {type(None), bool, int, str, bytes}
_IGNORED = {"now", "window_s", "exchange_s"}


@cache
def _names(kind: type, own: tuple[str, ...]) -> list[str]:
    """Returns the attributes that distinguish states, of an object with its `own` in addition to slots."""
    slots = chain.from_iterable(getattr(each, "__slots__", ()) for each in kind.__mro__)
    ignored = _IGNORED | {"_state"} if kind is Leading else _IGNORED  # it is the machine's
    return sorted({*own, *slots} - ignored)


@dataclass
class Found:
    """The result of a search."""

    states: int
    problem: str | None
    trace: list[tuple[Any, ...]]
    complete: bool


def search(num_peers: int, *, crashes: int = 0, freezes: int = 0, losses: int = 0, most: int = 10**9) -> Found:
    """Visits all states that can be reached, breadth first, or the first `most`."""
    machines = {f"p{i}": Peer(Meeting(WINDOW_S, EXCHANGE_S, form, _leaves_out_nobody)) for i in range(num_peers)}
    start = Scene(machines, crashes, freezes, losses)
    seen = {hash(start.fingerprint())}
    waiting: deque[tuple[bytes, tuple[Any, ...]]] = deque([(pickle.dumps(start), ())])
    while waiting:
        packed, trace = waiting.popleft()
        for choice in list(pickle.loads(packed).choices()):
            scene: Scene = pickle.loads(packed)
            scene.take(choice)
            if (problem := scene.problem()) is not None:
                return Found(len(seen), problem, _unroll((trace, choice)), complete=False)
            mark = hash(scene.fingerprint())
            if mark in seen:
                continue
            seen.add(mark)
            if len(seen) >= most:
                return Found(len(seen), None, [], complete=False)
            if not scene.done:
                waiting.append((pickle.dumps(scene), (trace, choice)))
    return Found(len(seen), None, [], complete=True)


def _leaves_out_nobody(peer: str) -> bool:
    del peer
    return False


def _unroll(trace: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    steps: list[tuple[Any, ...]] = []
    while trace:
        trace, step = trace
        steps.append(step)
    return steps[::-1]
