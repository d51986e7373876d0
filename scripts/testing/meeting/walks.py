"""Random walks: what must hold in a swarm of machines (world.py), whatever goes wrong and whatever liars do.

- of two groups of a round, only one is committed by honest peers, once they have been together in two rounds since
  anything went wrong that may divide them (a cut, a loss, a kill); always, if peers are frozen and nothing else goes
  wrong. A group with a liar in it may be committed next to another one: not all of its members need to believe in it
- no attempt takes longer than two windows and 22 seconds while its peer runs, and none is held up for longer than
  13 seconds by a peer that is frozen
- strangers' calls and anybody's polls for a round that is far ahead are refused
- nobody enters a group whose exchange has failed again, or follows a leader whose groups have failed twice
- nobody commits alone while others are up, in reach and at the same round, with the same reservation
- no honest peer is blamed for what liars did, and nobody while nothing has gone wrong; liars do not move the round. As
  long as fewer than a quarter are liars, most peers never doubt an honest one

After the last fault all honest peers come together. From then on, without liars, each round includes all of them, at
once, with few messages; with liars, there are rounds with all honest peers again and again, for minutes. Where a
trainer's steps take longer than the window (a third of the walks), rounds do not wait for all, and this is not checked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from scripts.testing.meeting.liars import WAIT, Liar
from scripts.testing.meeting.parts import seal
from scripts.testing.meeting.world import DOUBTED_STALLS, Peer, Said, World
from spes_swarm.base.errors import ProtocolError, RoundError
from spes_swarm.protocol.meeting.outputs import Ahead, Call, Fault, Poll, Stall
from spes_swarm.protocol.rounds.statement import Group

_CALM_S = 128.0  # at the end of a walk: time for all to come together
_AGAIN_S = 256.0  # the same if there are liars, and from one such round to the next
_LIARS_S = 300.0  # for which a walk with liars goes on after the last fault
_LONGEST_S = 320.0  # after which rounds need not wait for everybody again
_FROZEN_S = 13.0  # for which one frozen peer stops the others, at most, in addition to a trainer's step
_MORE_ROUNDS = 6  # together, at least, after the first one; with liars, one
_KNOWN_AFTER = 40  # lies, or rounds of four peers
_GROUP_S = 1.0  # from the last that joins a round to the last that has its group, at most
_MESSAGES = 4  # to and fro, for each member of a round, at most, in the mean


@dataclass(frozen=True)
class Problem:
    """An invariant that was broken."""

    seed: int
    time: float
    what: str


class Walk(World):
    """One walk; see above."""

    def __init__(self, seed: int, num_honest: int, num_hostile: int, faults: int, freezes_only: bool = False) -> None:
        super().__init__(seed, num_honest, num_hostile, faults, freezes_only)
        self.problems: list[Problem] = []
        self._hang_s = 2 * self.window_s + 22.0
        self._together = [-1.0, -1.0]  # when all honest peers had committed a round in the same group
        self._orderly = 0  # such rounds after the last fault; without liars, those in which all are awaited
        self._joined: dict[int, float] = {}  # by round: when the last attempt at it began
        self._grouped: dict[int, float] = {}  # and when the last one had its group
        self.delays: list[float] = []  # from one to the other, of rounds while nothing was wrong
        self._messages_before = 0
        self._liars = {
            peer.name: Liar(peer.name, sorted(self.peers), self.chance) for peer in self.peers.values() if peer.hostile
        }
        self._lies: Counter[str] = Counter()  # by liar
        self._stalls: Counter[tuple[str, float | None, str]] = Counter()  # by peer, when its attempt began, and leader
        self._blamed: set[str] = set()
        self._liars_turn = self.chance.random() < 0.5  # to another plan, again and again
        if freezes_only:  # one that does nothing is as good as dead
            for liar in self._liars.values():
                liar.play_dead()
            return
        for name in self._liars:
            self.after(1.0, lambda name=name: self._harass(self.peers[name]))  # type: ignore[misc]
            self.after(0.0, lambda name=name: self._turn(self.peers[name]))  # type: ignore[misc]

    def run(self) -> list[Problem]:
        """Walks to the end; returns the problems."""
        enough, longest_s = (math.inf, _LIARS_S) if self._liars else (_MORE_ROUNDS, _LONGEST_S)
        while not self.problems and self._orderly < enough and self.now < self.calm_from + longest_s:
            self.step()
            since = max(self._together[-1], self.calm_from) if self._liars else self.calm_from
            late = self.now > since + (_AGAIN_S if self._liars else _CALM_S)
            if late and self.longest_step_s < self.window_s and self._together[-1] <= since:
                at = {peer.name: (peer.target, max(peer.commits, default=0)) for peer in self.honest}
                self._problem(f"not together at the end: targets and commits {at}")
        if not self.problems and not self._liars_turn and not self.freezes_only:
            self._check_liars()
        return self.problems

    def _check_liars(self) -> None:
        """Checks that liars who had one plan all the time are known for what they do."""
        has_led = len(self._together) >= _KNOWN_AFTER * len(self.peers) / 4 and self._is_steady
        for name, liar in self._liars.items():
            if liar.plan in ("is_malformed", "breaks_the_protocol") and self._lies[name] >= _KNOWN_AFTER:
                if name not in self._blamed:
                    self._problem(f"nobody blames {name}, whose answers are malformed")
            elif liar.plan in ("stalls", "is_early") and has_led and all(peer.stalls[name] < 2 for peer in self.honest):
                self._problem(f"nobody doubts {name}, which leads nothing")

    # Liars.

    def lie(self, liar: Peer, caller: Peer, asked: Poll | Call, reply: Callable[[Said], None]) -> None:
        """See World."""
        lie = self._liars[liar.name].answer(caller.name, asked)
        if isinstance(lie, dict | ProtocolError):
            self._lies[liar.name] += 1
            self.after(self.chance.choice([0.0, 0.0, 1.0, 3.0]), lambda: reply(lie))
        elif lie == WAIT:
            self.after(1.0, lambda: reply({}))

    def spoils(self, leader: str) -> bool:
        """See World."""
        return leader in self._liars and self._liars[leader].spoils

    def _turn(self, liar: Peer) -> None:
        if not self.now or self._liars_turn:
            self.note(liar, "turns: " + self._liars[liar.name].turn())
        self.after(self.chance.uniform(5.0, 60.0), lambda: self._turn(liar))

    def _harass(self, liar: Peer) -> None:
        if self._liars[liar.name].busy:
            victim = self.chance.choice(self.honest)
            number = victim.target + self.chance.choice([-1, 0, 0, 0, 1, 2])
            asked = Call(victim.name, number)
            if self.chance.random() < 0.5:
                self.disturb(liar, victim, asked)
            else:
                self.disturb(liar, victim, Poll(victim.name, number, seal(liar.name, number)))
        self.after(self.chance.uniform(0.1, 3.0), lambda: self._harass(liar))

    # What must hold.

    def on_join(self, peer: Peer) -> None:
        """See World."""
        number, life, began = peer.target, peer.life, self.now

        def check() -> None:
            if peer.life != life or peer.began != began:
                return
            if self.now - max(began, peer.awake_from) >= self._hang_s:
                self._problem(f"{peer.name} waits for round {number} since {began:.1f}")
            else:
                self.after(max(peer.awake_from - self.now, 0.0) + self._hang_s, check)

        self._joined[number] = self.now
        self.after(self._hang_s, check)

    def on_end(self, peer: Peer, began: float, outcome: Group | RoundError) -> None:
        """See World."""
        if self._is_orderly and isinstance(outcome, RoundError):
            self._problem(f"{peer.name} fails: {outcome}")
        silent = len(self._liars) + sum(until > began - _FROZEN_S for _, until in self.freezes)
        longest_s = _FROZEN_S * max(silent, 1) + self.longest_step_s
        if self.freezes_only and peer.awake_from < began and self.now - began > longest_s:
            self._problem(f"{peer.name} waited for {self.now - began:.1f} s, since others were frozen")
        if isinstance(outcome, RoundError):
            if "no peer that could lead" in str(outcome):
                peer.failures.clear()
            return
        self._grouped[outcome.round] = self.now
        if (peer.name, outcome.id) in self.failed:
            self._problem(f"{peer.name} enters a group of round {outcome.round} again, which has failed")

    def on_failure(self, peer: Peer, group: Group) -> None:
        """See World."""
        leader = peer.machine.leader
        peer.failures[group.round, leader] += 1
        if peer.failures[group.round, leader] > 2:
            self._problem(f"{peer.name} follows {leader} in round {group.round} although two of its groups have failed")

    def on_output(self, peer: Peer, output: Ahead | Fault | Stall) -> None:
        """See World."""
        match output:
            case Ahead(number):
                few = 4 * len(self._liars) <= len(self.peers)
                if few and self._is_steady and all(other.target < number for other in self.honest):
                    self._problem(f"{peer.name} believes that others are at round {number}")
            case Fault(name, error) if error.kind != "leader":  # that it has not closed a group is no more than a fact
                self._blamed.add(name)
                if self._is_steady and not self.peers[name].hostile:
                    self._problem(f"{peer.name} blames {name}: {error}")
            case Stall(name):
                self._stalls[peer.name, peer.began, name] += 1
                if self._stalls[peer.name, peer.began, name] > 1:
                    self._problem(f"{peer.name} says twice in one attempt that {name} does not lead")
                if self._is_steady and not self._liars and self.longest_step_s < self.window_s:
                    self._problem(f"{peer.name} says that {name} does not lead")

    def on_disturbance(self, victim: Peer, liar: Peer, asked: Poll | Call, refused: bool) -> None:
        """See World."""
        trusts = isinstance(asked, Call) and liar.name in self.view(victim).electorate()
        if asked.round > victim.target + 1 and not trusts and not refused:
            self._problem(f"{victim.name} accepts {asked}, although it is at round {victim.target}")

    def on_doubt(self, peer: Peer, doubted: list[str]) -> None:
        """See World."""
        for name in doubted:
            doubting = sum(other.stalls[name] >= DOUBTED_STALLS for other in self.honest)
            few = 4 * len(self._liars) < len(self.peers)
            if few and not self.peers[name].hostile and self.now > self.calm_from and 2 * doubting > len(self.honest):
                self._problem(f"{peer.name} and most others doubt that {name} leads")

    def on_commit(self, peer: Peer, group: Group) -> None:
        """See World."""
        members, number, is_steady = {member.peer_id for member in group.members}, group.round, self._is_steady
        for other in self.honest:
            theirs = other.commits.get(number)
            if theirs is None or theirs.id == group.id:
                continue
            members_of_both = members | {member.peer_id for member in theirs.members}
            if any(self.peers[name].hostile for name in members_of_both):  # an exchange that only seemed to go well
                self.disturbed = self.now
            elif is_steady or self.freezes_only:
                self._problem(f"{peer.name} and {other.name} commit round {number} in two groups")
        others_come = any(other.target == number for other in self.honest if other is not peer)
        honest = {name for name in members if not self.peers[name].hostile}
        if len(honest) == 1 and is_steady and others_come and self._awaits_all(peer):
            self._problem(f"{peer.name} commits round {number} alone, or with liars only")
        if self._is_orderly and len(members) < len(self.honest):
            missing = {other.name for other in self.honest} - members
            self._problem(f"{peer.name} commits round {number} without {sorted(missing)}")
        others = (other.commits.get(number) for other in self.honest if other is not peer)
        if all(theirs is not None and theirs.id == group.id for theirs in others):
            self._check_cost(number)
            self._together.append(self.now)
            self._orderly += self.now > self.calm_from and (bool(self._liars) or self._is_orderly)

    def _check_cost(self, number: int) -> None:
        """Checks what a round has cost, in which all were."""
        messages, self._messages_before = self.messages - self._messages_before, self.messages
        if self._is_orderly:
            self.delays.append(self._grouped[number] - self._joined[number])
            if self.delays[-1] > _GROUP_S:
                self._problem(f"the group of round {number} took {self.delays[-1]:.1f} s after all had joined")
            if messages > 2 * _MESSAGES * len(self.honest):
                self._problem(f"round {number} took {messages} messages")

    @property
    def _is_steady(self) -> bool:
        """True if all honest peers have been together twice since anything last went wrong that may divide them.

        Once is not enough: the rest may have begun the next round while one of them was late for that one.
        """
        return all(map(self.runs, self.honest)) and self._together[-2] > self.disturbed

    @property
    def _is_orderly(self) -> bool:
        """True if that is so, there are no liars, and rounds wait for everybody."""
        return self._is_steady and not self._liars and all(map(self._awaits_all, self.honest))

    def _awaits_all(self, peer: Peer) -> bool:
        others = self.view(peer).neighbours
        return self.longest_step_s < self.window_s and all(n.wait_s >= self.window_s for n in others)

    def _problem(self, what: str) -> None:
        self.trace.append(f"{self.now:7.2f} PROBLEM: {what}")
        self.problems.append(Problem(self.seed, self.now, what))


def walk(
    seed: int, num_honest: int, num_hostile: int, faults: int, freezes_only: bool = False
) -> tuple[list[Problem], Walk]:
    """Walks once; returns the problems and the walk."""
    it = Walk(seed, num_honest, num_hostile, faults, freezes_only)
    return it.run(), it
