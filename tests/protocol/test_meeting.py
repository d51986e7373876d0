"""Single decisions of the machine that forms groups; swarms of them walk in tests/testing/test_model_check.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from scripts.testing.meeting.parts import RUN_ID, form, seal, statement
from spes_swarm.base.errors import NoLeaderError, ProtocolError, RoundError
from spes_swarm.protocol.meeting.meeting import TICK_S, Meeting
from spes_swarm.protocol.meeting.outputs import Ahead, Answer, Call, Output, Poll, Reply, Stall
from spes_swarm.protocol.meeting.view import View, rank
from spes_swarm.protocol.members.reputation import Neighbour
from spes_swarm.protocol.rounds.statement import Group

WINDOW_S, EXCHANGE_S = 10.0, 20.0
A, B, C, D = sorted("abcd", key=lambda name: rank(RUN_ID, 1, name))  # by rank in round 1


class Driven:
    """A machine whose clock and peers the test plays."""

    def __init__(self, me: str, others: str, defers: bool = False) -> None:
        self.machine = Meeting(WINDOW_S, EXCHANGE_S, self.form, lambda peer: False)
        self.refused: set[bytes] = set()
        self.now = 0.0
        self.outputs: list[Output] = []
        self.decisions: list[str] = []
        self.calls: Counter[str] = Counter()  # by peer
        self.view = View(RUN_ID, me, 1, tuple(Neighbour(other, True) for other in others), defers=defers)

    def form(self, number: int, sealed: Iterable[bytes]) -> Group:
        items = list(sealed)
        if self.refused.intersection(items):
            raise ProtocolError("excluded", "a peer that may take part no longer")
        return form(number, items)

    def input(self) -> Meeting:
        return self.machine.at(self.now, self.view)

    def done(self) -> list[Output]:
        """What it has wanted done since this was asked last."""
        self.outcome()
        outputs, self.outputs = self.outputs, []
        return outputs

    def outcome(self) -> Group | RoundError | None:
        """What has become of its attempt."""
        outputs, decisions = self.machine.advance()
        self.outputs += outputs
        self.decisions += decisions
        self.calls.update(output.peer for output in outputs if isinstance(output, Call))
        return self.machine.outcome

    def join(self, number: int = 1) -> None:
        self.input().join(seal(self.view.me, number), statement(number))

    def join_again(self) -> None:
        self.input().leave()
        self.join()

    def leader(self) -> str:
        """Whom it follows, maybe itself."""
        return next(self.machine.describe()).removeprefix("round 1: follows ")

    def gathers(self) -> bool:
        return any("gathers" in line for line in self.machine.describe())

    def wait(self, seconds: float, answers: dict[str, Answer | None] | None = None) -> list[Output]:
        """Lets time pass; whoever is asked answers so at once, or never. Returns the other outputs."""
        until, rest = self.now + seconds, []
        while self.now < until:
            self.now += TICK_S
            self.input()
            for output in self.done():
                if isinstance(output, Call) and answers is not None:
                    self.input().call_answered(output, answers.get(output.peer))
                elif isinstance(output, Poll) and answers is not None and output.leader in answers:
                    self.input().poll_answered(output, answers[output.leader])
                else:
                    rest.append(output)
                self.outcome()
        return rest

    def group(self, names: str) -> Answer:
        return {"group": [seal(name, 1) for name in sorted(names)]}


def members(me: Driven) -> list[str]:
    found = me.outcome()
    assert isinstance(found, Group), found
    return [member.peer_id for member in found.members]


def test_a_newcomer_takes_the_group_of_its_initial_peer_although_there_are_many_strangers() -> None:
    me = Driven(B, A, defers=True)
    strangers = tuple(Neighbour(f"stranger {i}", True, in_electorate=False) for i in range(12))
    me.view = replace(me.view, neighbours=(*me.view.neighbours, *strangers))
    me.join()
    (poll,) = me.done()
    assert isinstance(poll, Poll)
    me.input().poll_answered(poll, me.group(A + B))
    assert members(me) == sorted(A + B)


def test_a_leader_does_not_leave_out_those_that_have_crashed_since_they_answered() -> None:
    """They were on their way when they were heard last, and a leader that closes the group is right not to wait."""
    me = Driven(B, A + C + D)
    me.input().polled(1, D, 1, seal(D, 1))  # so that this peer calls the others
    me.join()
    outputs = me.wait(1.0, {A: {}, C: {"leader": A}})
    outputs += me.wait(0.5, {A: me.group(A + B), C: None})
    outputs += me.wait(15.0, {A: None, C: None, D: None})
    assert not any(isinstance(output, Stall) for output in outputs)
    assert members(me) == sorted(A + B)


def test_a_leader_that_leaves_out_those_on_their_way_is_passed_over() -> None:
    me = Driven(B, A + C + D)
    me.join()
    me.wait(0.5, {A: me.group(A + B)})
    outputs = me.wait(3.0, {A: me.group(A + B), C: {"leader": A}, D: {"leader": A}})
    assert Stall(A, 1) in outputs
    assert f"round 1: follows {B}" in " ".join(me.machine.describe())  # itself
    assert me.outcome() is None


def test_an_attempt_keeps_what_it_knows_of_leaders_when_the_target_moves_on() -> None:
    me = Driven(C, A + B)
    me.join()
    me.wait(TICK_S, {A: None, B: {}})
    me.view = replace(me.view, target=2)
    me.input().called(B, 2)
    assert f"leaders {{'{A}': <Fate.SILENT" in " ".join(me.machine.describe())


def test_a_poll_that_waited_while_this_peer_slept_is_not_counted() -> None:
    """Nobody waited for it, so nothing but the time says that it has slept."""
    me = Driven(A, B + C)
    me.wait(2.0)
    me.now += 60.0
    for key, name in enumerate((B, C)):
        me.input().polled(key, name, 1, seal(name, 1))
    me.join()
    outputs = me.wait(1.5, {B: {"target": 2}, C: {"target": 2}})
    assert not any(isinstance(output, Reply) and "group" in output.answer for output in outputs)
    over = me.outcome()
    assert isinstance(over, RoundError)
    assert "is over" in str(over)


def test_a_late_answer_with_the_group_of_all_counts() -> None:
    me = Driven(C, A + B)
    me.join()
    (late,) = me.done()
    assert isinstance(late, Poll)
    for key, name in enumerate((A, B)):  # most others poll this peer, so it leads
        me.input().polled(key, name, 1, seal(name, 1, nonce=1))
    theirs = me.group(A + B + C)
    me.input().poll_answered(late, theirs)
    found = me.outcome()
    assert isinstance(found, Group)
    assert list(found.sealed) == theirs["group"]


def test_without_any_leader_the_error_says_whether_waiting_would_help() -> None:
    for said, error in ((None, RoundError), ({"defers": True}, NoLeaderError)):
        me = Driven(B, A)
        me.view = replace(me.view, reachable=False)
        me.join()
        me.wait(TICK_S, {A: said})
        assert type(me.outcome()) is error


@pytest.mark.parametrize(("followers", "waits_s"), [(B, 2.0), (B + C, 0.0)], ids=["few", "most"])
def test_a_leader_gives_a_group_of_a_few_at_once_and_enters_it_when_they_may_have_looked_for_the_others(
    followers: str, waits_s: float
) -> None:
    """The others train on. A follower that began later than its leader may look for them up to a window longer."""
    me, given_at = Driven(A, B + C + D), dict[str, float]()
    me.join()
    idle: dict[str, Answer | None] = {name: {} for name in (B, C, D) if name not in followers}
    while me.outcome() is None:
        for name in followers:
            me.input().polled(ord(name), name, 1, seal(name, 1))
        for output in me.wait(TICK_S, idle):
            if isinstance(output, Reply) and "group" in output.answer:
                given_at.setdefault(chr(output.key), me.now)
    assert members(me) == sorted(A + followers)
    assert given_at == pytest.approx(dict.fromkeys(followers, WINDOW_S), abs=3 * TICK_S)
    assert me.now - given_at[B] == pytest.approx(waits_s, abs=TICK_S)


@pytest.mark.parametrize("second", ["calls", "polls"])
def test_most_others_that_are_at_the_round_after_the_next_are_believed(second: str) -> None:
    me = Driven(A, B + C)
    me.input().called(B, 2)
    assert Ahead(2) not in me.done()
    if second == "calls":
        me.input().called(C, 2)
    else:
        me.input().polled(1, C, 2, seal(C, 2))
    assert Ahead(2) in me.done()


# What a leader knows of those that do not come.


def test_a_peer_that_has_come_after_all_is_called_again_when_it_goes_silent_and_lost_again() -> None:
    me = Driven(A, B + C + D)
    me.join()
    me.wait(3.0, {B: {}, C: {}, D: None})
    assert me.calls[D] == 2
    me.input().polled(1, D, 1, seal(D, 1))
    me.wait(6.0, {B: {}, C: {}, D: None})
    assert me.calls[D] == 4


def test_a_peer_that_misses_calls_now_and_then_is_not_lost() -> None:
    me = Driven(A, B + C)
    me.join()
    for _ in range(4):
        me.wait(2 * TICK_S, {B: {}, C: None})
        me.wait(2 * TICK_S, {B: {}, C: {}})
    assert Call(C, 1) in me.wait(1.0)


def test_a_peer_that_has_come_here_does_not_count_for_the_leader_that_it_followed_before() -> None:
    me = Driven(A, B + C + D)
    me.join()
    me.wait(TICK_S, {B: {"leader": D}})
    me.input().polled(1, B, 1, seal(B, 1))
    me.wait(1.0, {C: {"leader": D}})
    assert me.leader() == A


def test_nor_does_one_that_is_lost() -> None:
    me = Driven(A, B + C + D)
    me.join()
    me.wait(TICK_S, {C: {"leader": D}, D: {}})
    me.wait(1.5, {D: {}})
    me.wait(1.0, {D: {"leader": D}})
    assert not any("sends others" in decision for decision in me.decisions)


def test_a_statement_that_makes_no_group_does_not_hold_up_the_others() -> None:
    """It counts as there for as long as a poll does, unless its gathering ends."""
    me = Driven(A, B + C)
    me.refused = {seal(B, 1)}
    me.join()
    for key, name in enumerate((B, C)):
        me.input().polled(key, name, 1, seal(name, 1))
    me.done()
    me.input().polled(2, C, 1, seal(C, 1))
    me.wait(2.0, {B: None})
    assert members(me) == sorted(A + C)


# A gathering for others, while this peer trains, ends:


def test_when_its_round_is_over() -> None:
    me = Driven(A, B + C)
    me.input().polled(1, B, 1, seal(B, 1))
    me.wait(TICK_S)
    assert me.gathers()
    me.view = replace(me.view, target=2)
    me.wait(TICK_S)
    assert not me.gathers()


def test_when_most_say_that_its_round_is_over() -> None:
    me = Driven(A, B + C + D)
    me.input().polled(1, B, 1, seal(B, 1))
    me.wait(1.0, {C: {"target": 2}, D: {"target": 2}})
    assert not me.gathers()


def test_when_most_do_not_come() -> None:
    me = Driven(A, B + C + D)
    for _ in range(15):
        for key, name in enumerate((B, C)):
            me.input().polled(key, name, 1, seal(name, 1))
        me.wait(1.0, {D: {"leader": B}})
    assert "round 1: drops its gathering: most others are not at round 1" in me.decisions


# Leaders that are followed again.


def test_a_late_leader_after_an_attempt_in_vain() -> None:
    me = Driven(B, A + C + D)
    me.join()
    outputs: list[Output] = []
    while me.outcome() is None:
        outputs += me.wait(1.0, {A: {}, C: {"leader": A}, D: {"leader": A}})
    assert Stall(A, 1) in outputs
    assert "most others are not at round 1" in str(me.outcome())
    me.join_again()
    me.outcome()
    assert me.leader() == A


@pytest.mark.parametrize(("name", "peers"), [(B, A + C + D), (C, A + B)], ids=["by a leader", "by a follower"])
def test_one_that_said_that_the_round_is_over_once_if_others_follow_it(name: str, peers: str) -> None:
    me = Driven(name, peers)
    others: dict[str, Answer | None] = {name: {"leader": A} for name in (B, C, D)}
    over: Answer = {"over": True}
    me.join()
    me.wait(TICK_S, {A: over})
    for _ in range(2):
        assert "is over" in str(me.outcome())
        me.join_again()
        me.wait(2.0, {**others, A: over})
    assert me.outcome() is None
    assert me.leader() == B
