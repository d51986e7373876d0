"""A round has the same figures in every monitor, whenever it looks, and no round is missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from spes_swarm.monitor.aggregates import Known
from spes_swarm.monitor.ledger import Ledger
from spes_swarm.monitor.state import HistoryPoint
from spes_swarm.protocol.members.records import Progress, RecentRounds, Rounds
from tests.helpers.monitoring import RUN, START, TTL_S, Watched, figures, peer_id, progress, report

A, B, C, D = (peer_id(n) for n in range(4))


def points(watched: Watched) -> dict[int, HistoryPoint]:
    return {point.round: point for point in watched.ledger.points()}


# What counts as reported.


def test_rounds_between_two_looks_appear_with_their_own_figures() -> None:
    watched = Watched()
    first = figures(3, train_loss=5.0)
    watched.look({A: progress(), B: progress()}, rounds={A: report(START, first), B: report(START, first)})
    watched.wait(2)
    rounds = [figures(n, train_loss=5.0 - n / 10, bytes_sent=n) for n in range(3, 8)]
    others = [figures(n, train_loss=6.0 - n / 10, bytes_sent=n) for n in range(3, 8)]
    records = {A: progress(watched.now, round=7), B: progress(watched.now, round=7)}
    state = watched.look(records, rounds={A: report(watched.now, *rounds), B: report(watched.now, *others)})
    assert list(points(watched)) == [3, 4, 5, 6, 7]
    assert points(watched)[5].train_loss == pytest.approx((4.5 + 5.5) / 2)
    assert (points(watched)[5].bytes, points(watched)[5].time, points(watched)[5].tokens) == (10, START + 2, 12800)
    assert (points(watched)[5].peers, points(watched)[5].experts_covered) == (2, 4)
    assert state.loss_round == 7
    assert state.train_loss == pytest.approx(4.8)


def test_a_round_waits_for_the_reports_of_all_its_members() -> None:
    watched = Watched()
    records = {A: progress(), B: progress()}
    watched.look(records, rounds={A: report(START, figures(3, train_loss=4.0)), B: report(START - 1, figures(2))})
    assert points(watched) == {}
    watched.wait(1)
    watched.look(records, rounds={B: report(watched.now, figures(2), figures(3, train_loss=5.0))})
    assert points(watched)[3].train_loss == 4.5


def test_a_later_round_does_not_appear_before_an_earlier_one() -> None:
    watched = Watched()
    alone = {A: report(START, figures(3))}
    watched.look({A: progress(), B: progress(train_loss=None)}, rounds=alone)
    watched.wait(1)
    # B has left after round 3, and its report comes last.
    leaving = progress(watched.now, state="leaving", experts=[1], train_loss=None)
    later = {A: report(watched.now, figures(3), figures(4, peers=1))}
    watched.look({A: progress(watched.now, round=4), B: leaving}, rounds=later)
    assert points(watched) == {}
    watched.wait(1)
    watched.look(rounds={B: report(watched.now, figures(3, train_loss=7.5))})
    assert [(n, point.train_loss) for n, point in points(watched).items()] == [(3, 6.5), (4, 5.5)]


def test_a_member_that_was_killed_is_not_waited_for_after_it_is_late() -> None:
    watched = Watched()
    both = {A: report(START, figures(3)), B: report(START, figures(3))}
    watched.look({A: progress(), B: progress()}, rounds=both)
    watched.wait(5)
    # Both commit round 4, and B is gone before it reports it.
    records = {A: progress(watched.now, round=4), B: progress(watched.now, round=4, train_loss=None)}
    watched.look(records, rounds={A: report(watched.now, figures(3), figures(4, train_loss=4.0))})
    assert list(points(watched)) == [3]
    watched.wait(16)
    watched.look({A: progress(watched.now, round=4, train_loss=None)})
    assert points(watched)[4].train_loss == 4.0


def test_one_that_claims_to_be_behind_for_ever_holds_up_nothing_for_long() -> None:
    watched = Watched()
    for number in range(3, 60):
        records = {A: progress(watched.now, round=number), B: progress(watched.now, round=number)}
        liar = progress(watched.now, round=2, train_loss=None)
        # One member more than there are: its report never comes.
        mine = report(watched.now, *(figures(n, peers=3) for n in range(max(3, number - 10), number + 1)))
        watched.look({**records, C: liar}, rounds={A: mine, B: mine})
        watched.wait(1)
    assert list(points(watched)) == list(range(3, 60 - int(TTL_S) - 1))


def test_one_liar_can_neither_complete_a_round_nor_invent_one() -> None:
    watched = Watched()
    lies = report(START, *(figures(n, peers=1, train_loss=99.0) for n in (1, 2, 3)))
    watched.look({A: progress(), B: progress(), C: progress()}, rounds={C: lies})
    assert points(watched).keys() <= {3}
    watched.wait(1)
    honest = report(watched.now, *(figures(n, peers=3) for n in (2, 3)))
    watched.look(rounds={A: honest, B: honest})
    assert {n: point.train_loss for n, point in points(watched).items()} == {2: 5.5, 3: 5.5}


def test_rounds_from_before_the_first_look_count_if_all_members_report_them() -> None:
    """Of round 1, the report of a member that has left since is missing: another monitor may have it."""
    known = [figures(1, peers=3), figures(2), figures(3)]
    watched = Watched()
    watched.look({A: progress(), B: progress()}, rounds={A: report(START, *known), B: report(START, *known)})
    assert list(points(watched)) == [2, 3]


def test_a_round_from_before_the_first_look_counts_without_a_member_that_was_killed_before_it_reported_it() -> None:
    watched = Watched()
    known = [figures(1, peers=4), figures(2, peers=3), figures(3)]
    records = {A: progress(), B: progress(), C: progress(round=2, train_loss=None)}
    rounds = {A: report(START, *known), B: report(START, *known), C: report(START - 1, figures(1, peers=4))}
    watched.look(records, rounds=rounds)
    assert list(points(watched)) == [3]
    for number in range(4, 24):  # so many that round 2 is in no record any more
        watched.wait(1)
        newer = report(watched.now, *(figures(n) for n in range(max(3, number - 10), number + 1)))
        watched.look({p: progress(watched.now, round=number) for p in (A, B)}, rounds={A: newer, B: newer})
    assert list(points(watched)) == list(range(2, 24))  # the report of round 1's fourth member is not known


# The last evaluation.


def test_an_evaluation_from_before_the_first_look_is_shown_with_its_round() -> None:
    evaluated = [figures(10, eval_loss=loss, eval_loss_stderr=0.25) for loss in (4.0, 4.5)]
    records = {A: progress(round=90, eval_loss=None), B: progress(round=90, eval_loss=None)}
    watched = Watched()
    state = watched.look(
        records, rounds={A: report(START, evaluated[0], figures(90)), B: report(START, evaluated[1], figures(90))}
    )
    assert (state.eval_round, state.eval_loss, state.eval_loss_stderr) == (10, 4.25, 0.25)
    assert (state.loss_round, list(points(watched))) == (90, [90])
    watched.wait(1)
    records = {peer: progress(watched.now, round=91, train_loss=None) for peer in (A, B)}
    newer = report(watched.now, figures(91, eval_loss=3.0))
    state = watched.look(records, rounds={A: newer})
    assert (state.eval_round, state.eval_loss) == (10, 4.25)  # not all have reported it yet
    state = watched.look(records, rounds={B: newer})
    assert (state.eval_round, state.eval_loss, state.eval_loss_stderr) == (91, 3.0, None)


def test_an_older_history_does_not_hide_a_newer_evaluation() -> None:
    before = Watched()
    early = report(START, figures(3, eval_loss=6.0, peers=1))
    assert before.look({A: progress()}, rounds={A: early}).eval_round == 3
    after = Watched(Ledger(RUN, TTL_S, Known(round=3, points=tuple(before.ledger.points()))))
    later = report(START + 1, figures(50, eval_loss=4.0), figures(90))
    assert after.look({A: progress(START + 1, round=90)}, rounds={A: later}).eval_round == 50


# Any two monitors.


@dataclass
class _Run:
    """Peers that commit a round every 0.4 s, as their records tell it."""

    num_rounds: int
    killed_at: float  # the last peer's end, in seconds
    written: dict[str, list[tuple[float, Progress | Rounds]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, peer in enumerate((A, B, C)):
            self.written[peer] = []
            recent, told = RecentRounds(), -1.0
            for number in range(1, self.num_rounds + 1):
                at = 0.4 * number + 0.07 * index
                if peer == C and at > self.killed_at:
                    break
                self._write(peer, at, progress(START + at, round=number, train_loss=None))
                loss = self.loss(peer, number)
                members = 3 if at + 0.2 < self.killed_at else 2
                recent.note(figures(number, train_loss=loss, peers=members, time=START + at))
                if at - told >= 1.0 or number == self.num_rounds:
                    told = at
                    rounds = recent.record(START + at + 0.15 + 2 * TTL_S)
                    assert rounds is not None
                    self._write(peer, at + 0.15, rounds)

    def _write(self, peer: str, at: float, record: Progress | Rounds) -> None:
        if peer != C or at < self.killed_at:
            self.written[peer].append((at, record))

    @staticmethod
    def loss(peer: str, number: int) -> float:
        return 6.0 / number + {A: 0.0, B: 0.25, C: 0.75}[peer]

    def watch(self, start: float, pauses: list[float]) -> dict[int, HistoryPoint]:
        """What a monitor has seen in the end that looks at these times."""
        watched = Watched()
        watched.wait(start)
        end = 0.4 * self.num_rounds + 20.0
        for pause in [*pauses, *[2.0] * 40]:
            progress_of: dict[str, Progress] = {}
            rounds_of: dict[str, Rounds] = {}
            for peer, records in self.written.items():
                for at, record in records:
                    if at <= watched.passed_s:
                        if isinstance(record, Progress):
                            progress_of[peer] = record
                        else:
                            rounds_of[peer] = record
            watched.look(progress_of, rounds=rounds_of)
            if watched.passed_s > end:
                break
            watched.wait(pause)
        return points(watched)


_PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # an example takes too long to be shrunk
_PAUSES = st.lists(st.floats(0.05, 3.5), max_size=20)


@pytest.mark.slow
@given(st.floats(0, 4), _PAUSES, st.floats(0, 4), _PAUSES, st.floats(4, 30))
@example(2.5, [2.0, 0.9], 4.0, [], 4.0)  # killed before it reports a round from before the other's first look
@settings(max_examples=60, phases=_PHASES)
def test_two_monitors_show_the_same_rounds_and_figures(
    start: float, pauses: list[float], other_start: float, other_pauses: list[float], killed_at: float
) -> None:
    run = _Run(40, killed_at)
    one, other = run.watch(start, pauses), run.watch(other_start, other_pauses)
    for seen in (one, other):
        assert list(seen) == list(range(min(seen), 41))  # none is missing
    both = one.keys() & other.keys()
    assert {number: one[number] for number in both} == {number: other[number] for number in both}
    if killed_at > 20:
        for number, point in one.items():
            assert point.train_loss == median(run.loss(peer, number) for peer in (A, B, C))
