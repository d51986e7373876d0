"""Chaos experiments: schedules, reports, and a short run with real peers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.testing.chaos.peer import ChaosPeer
from scripts.testing.chaos.report import (
    PROBLEMS,
    Attempt,
    Commit,
    Outcome,
    Problem,
    Report,
    UndisturbedRounds,
    compare_digests,
    describe,
    phase_at,
    seconds_lost,
    totals,
)
from scripts.testing.chaos.schedule import (
    ENDING,
    MIN_PEERS,
    STARTING,
    STOP_S,
    Fault,
    Kind,
    Phase,
    Role,
    draw_schedule,
    split_in_two,
)
from scripts.testing.local_peer import PATIENCE_S, Event, LocalPeer
from tests.helpers.empty_process import launch_nothing
from tests.helpers.repository import ROOT

SCRIPT = ROOT / "scripts" / "chaos.py"


# The schedule.


@pytest.mark.slow
@given(seed=st.integers(0, 2**32), num_peers=st.integers(MIN_PEERS, 6), spare=st.integers(0, 3))
def test_a_schedule_keeps_its_limits_at_every_moment(seed: int, num_peers: int, spare: int) -> None:
    max_peers = max(num_peers + spare, MIN_PEERS + 1)
    running, gone = num_peers, 0
    for fault in draw_schedule(seed, 60, num_peers, max_peers):
        assert fault.running == running
        if fault.newcomer is not None:
            assert fault.newcomer in STARTING
            assert running < max_peers
            running += 1
            gone -= fault.newcomer is Kind.RETURN
        if fault.kind in STARTING:
            running += 1
            gone -= fault.kind is Kind.RETURN
        else:
            assert fault.running > MIN_PEERS  # without the victim, there are enough
        if fault.kind in ENDING:
            running -= 1
            gone += 1
        assert MIN_PEERS <= running <= max_peers
        assert gone >= 0


def test_a_seed_gives_one_schedule() -> None:
    assert draw_schedule(7, 100, 4, 6) == draw_schedule(7, 100, 4, 6)
    assert draw_schedule(7, 100, 4, 6) != draw_schedule(8, 100, 4, 6)
    assert draw_schedule(7, 50, 4, 6) == draw_schedule(7, 100, 4, 6)[:50]


def test_a_long_schedule_has_everything_in_it() -> None:
    schedule = draw_schedule(1, 400, 4, 6)
    strikes = [fault for fault in schedule if fault.kind not in STARTING]
    assert {fault.kind for fault in schedule} == set(Kind)
    assert {(fault.kind, fault.phase) for fault in strikes} == {
        (kind, phase) for kind in set(Kind) - STARTING for phase in Phase if (kind, phase) != (Kind.CUT, Phase.TRANSFER)
    }
    assert {(f.phase, f.role) for f in strikes} == {
        *((phase, role) for phase in set(Phase) - {Phase.TRANSFER} for role in (Role.ANY, Role.LEADER)),
        *((Phase.TRANSFER, role) for role in (Role.ANY, Role.NEWCOMER)),
    }
    stops = [fault.seconds for fault in schedule if fault.kind is Kind.STOP]
    assert STOP_S[0] <= min(stops) < max(stops) <= STOP_S[1]


def test_kinds_can_be_left_out() -> None:
    kinds = {Kind.KILL, Kind.RETURN}
    assert {fault.kind for fault in draw_schedule(1, 50, 4, 6, kinds)} == kinds
    assert all(fault.kind is not Kind.CUT for fault in draw_schedule(1, 100, 4, 6, set(Kind) - {Kind.CUT}))


def test_impossible_wishes_are_refused() -> None:
    with pytest.raises(ValueError, match="none of kill is possible"):
        draw_schedule(1, 50, 4, 6, {Kind.KILL})
    with pytest.raises(ValueError, match="1 peers"):
        draw_schedule(1, 1, 1, 6)
    with pytest.raises(ValueError, match="at most 6"):
        draw_schedule(1, 1, 7, 6)


@given(seed=st.integers(0, 2**32), num_peers=st.integers(2, 8))
def test_a_cut_has_two_sides_and_the_first_is_not_the_smaller(seed: int, num_peers: int) -> None:
    names = [f"peer{i}" for i in range(num_peers)]
    first, second = split_in_two(names, seed)
    assert sorted(first + second) == names
    assert len(first) >= len(second) >= 1
    assert (first, second) == split_in_two(names[::-1], seed)


# Time lost.


def pace_of(**intervals: float) -> UndisturbedRounds:
    pace = UndisturbedRounds()
    for peers, seconds in intervals.items():
        pace.add(int(peers.removeprefix("n")), seconds)
    return pace


def test_the_pace_is_the_median_for_a_number_of_peers_or_the_least_that_follows_from_the_nearest() -> None:
    pace = UndisturbedRounds()
    with pytest.raises(ValueError, match="no undisturbed round"):
        pace.interval(4)
    for seconds in (4.0, 30.0, 5.0):
        pace.add(4, seconds)
    pace.add(2, 2.0)
    assert pace.interval(4) == 5.0
    assert pace.interval(2) == 2.0
    assert pace.interval(6) == 5.0  # more of them are not quicker
    assert pace.interval(1) == 1.0  # fewer are quicker in proportion at best
    assert pace.interval(3) == 2.0  # no better than the other one


def test_what_is_lost_is_what_the_rounds_took_beyond_the_pace_of_their_groups() -> None:
    pace = pace_of(n4=4.0, n3=3.0)
    commits = [Commit(10, 100.0, 4), Commit(11, 109.0, 4), Commit(12, 112.5, 3)]
    assert seconds_lost(commits, pace) == pytest.approx(12.5 - 4.0 - 3.0)
    assert seconds_lost(commits[:2], pace) == pytest.approx(5.0)
    assert seconds_lost(commits[:1], pace) == 0.0
    assert seconds_lost([], pace) == 0.0
    assert seconds_lost([Commit(10, 100.0, 4), Commit(11, 102.0, 4)], pace) == 0.0  # never negative


def test_the_phase_is_the_furthest_that_a_peer_was_in() -> None:
    first = Attempt(started=10.0, grouped=12.0, ended=15.0)
    second = Attempt(started=11.0, grouped=12.5, ended=14.0)
    assert phase_at(9.0, [first, second]) is Phase.TRAINING
    assert phase_at(10.5, [first, second]) is Phase.RENDEZVOUS
    assert phase_at(12.2, [first, second]) is Phase.EXCHANGE
    assert phase_at(14.5, [first, second]) is Phase.EXCHANGE
    assert phase_at(15.0, [first, second]) is Phase.TRAINING
    assert phase_at(15.0, []) is Phase.TRAINING


# Digests.


def reports(**rounds: str) -> list[Report]:
    """`a="x y -"`: peer a committed round 1 with x, round 2 with y, and not round 3."""
    return [
        Report(peer, number, digest, "")
        for peer, digests in rounds.items()
        for number, digest in enumerate(digests.split(), 1)
        if digest != "-"
    ]


def test_equal_digests() -> None:
    found = compare_digests(reports(a="x y z", b="x y z", c="- - z"))
    assert (found.rounds, found.reports) == (3, 7)
    assert not found.differing


def test_a_round_of_one_peer_is_not_compared() -> None:
    found = compare_digests(reports(a="x y", b="x"))
    assert (found.rounds, found.reports) == (1, 2)


def test_a_difference_heals_in_the_next_round_that_both_commit() -> None:
    found = compare_digests(reports(a="x y z", b="x Y z", c="x y z"))
    assert found.differing == {2: {"a": "y", "b": "Y", "c": "y"}}
    assert found.unhealed == ()
    assert found.open == ()
    assert compare_digests(reports(a="x y q z", b="x Y - z")).unhealed == ()


def test_a_difference_that_lasts_is_told_apart() -> None:
    found = compare_digests(reports(a="x y z w", b="x Y Z w"))
    assert sorted(found.differing) == [2, 3]
    assert found.unhealed == (2,)  # in round 3 they differ still; what is left of that heals in round 4
    assert found.open == ()


def test_a_difference_with_a_peer_that_ended_stays_open() -> None:
    found = compare_digests(reports(a="x y z", b="x Y"))
    assert found.unhealed == ()
    assert found.open == (2,)


def test_the_sides_of_a_cut_are_not_compared() -> None:
    both = [Report("a", 1, "x", ""), Report("b", 1, "x", "")]
    apart = [Report("a", 2, "y", "1a"), Report("b", 2, "Y", "1b"), Report("c", 2, "y", "1a")]
    healed = [Report("a", 3, "z", ""), Report("b", 3, "z", "")]
    found = compare_digests([*both, *apart, *healed])
    assert found.rounds == 3
    assert not found.differing
    within = compare_digests([*both, *apart, Report("d", 2, "other", "1b"), *healed])
    assert within.differing == {2: {"b": "Y", "d": "other"}}


# Tables and criteria.


def outcome_of(number: int, kind: Kind, lost_s: float, *problems: Problem) -> Outcome:
    """A fault after which the first round of four peers took `lost_s` more than four seconds."""
    fault = Fault(
        number=number,
        kind=kind,
        phase=Phase.EXCHANGE,
        role=Role.LEADER,
        newcomer=None,
        running=4,
        moment=0.5,
        seconds=0.0,
        seed=0,
    )
    return Outcome(
        fault=fault,
        victims=["peer1"],
        at=101.0,
        round=10,
        struck_in=Phase.TRAINING,
        commits=[Commit(10, 100.0, 4), Commit(11, 104.0 + lost_s, 4)],
        together_s=5.0,
        problems=list(problems),
    )


PACE = pace_of(n4=4.0)
GOOD = reports(a="x y", b="x y")


def test_an_experiment_without_problems_meets_all_criteria() -> None:
    outcomes = [outcome_of(1, Kind.KILL, 1.0), outcome_of(2, Kind.STOP, 9.0), outcome_of(3, Kind.KILL, 2.0)]
    result = totals(outcomes, GOOD, PACE)
    assert result.failures() == []
    assert (result.faults, result.rounds, result.median_rounds_lost) == (3, 2, 0.5)
    assert set(result.problems.values()) == {0}


@pytest.mark.parametrize("kind", sorted(PROBLEMS))
def test_every_kind_of_problem_fails_the_experiment(kind: str) -> None:
    outcomes = [outcome_of(1, Kind.KILL, 1.0), outcome_of(2, Kind.KILL, 1.0, Problem(kind, "why"))]
    result = totals(outcomes, GOOD, PACE)
    assert result.failures() == [f"1 {PROBLEMS[kind]}"]
    assert f"{kind.upper()}: why" in describe(outcomes[1], PACE)


def test_what_else_fails_the_experiment() -> None:
    slow = totals([outcome_of(1, Kind.KILL, 4.0)], GOOD, PACE)
    assert slow.failures() == ["a fault costs 1.00 rounds (median), not below 1"]
    quick = [outcome_of(1, Kind.KILL, 1.0)]
    assert totals(quick, reports(a="x y", b="X Y"), PACE).failures() == [
        "digests of rounds (1,) still differed at the next commit"
    ]
    assert totals(quick, [], PACE).failures() == ["no digests were compared"]


@pytest.mark.parametrize(
    ("kind", "detail", "accuses"),
    [
        ("clipped", "it claims too many tokens", True),
        ("norm", "part 3 is longer than stated", True),
        ("duty", "most members doubt it", True),
        ("late", "was too slow; 4 parts averaged without it", False),
        ("lost", "is gone; 1 part averaged without it", False),
        ("pull", "could not pull results: connection lost", False),
    ],
)
def test_only_what_names_a_liar_or_one_without_duty_is_an_accusation(
    tmp_path: Path, kind: str, detail: str, accuses: bool
) -> None:
    fault = {"event": "fault", "time": 1.0, "peer_id": "A", "kind": kind, "peer": "B", "detail": detail}

    class Quiet(LocalPeer):
        def new_events(self) -> list[Event]:
            return [fault]

    with Quiet(tmp_path, [], launch=launch_nothing) as process:
        peer = ChaosPeer("peer0", process, 0)
        assert peer.read() == []
    assert peer.accusations == ([f"of B: {kind}: {detail}"] if accuses else [])


# The real thing.


@pytest.mark.swarm
def test_faults_cost_real_peers_little_and_break_nothing(tmp_path: Path) -> None:
    # A seed whose few faults are of all kinds (but cuts) and phases.
    command = ["--seed", 2344, "--faults", 6, "--peers", 4, "--max-peers", 4, "--inner-steps", 10]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, command), "--output-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
        check=False,
    )
    result = json.loads((tmp_path / "chaos.json").read_text(encoding="utf-8"))
    assert result["totals"]["problems"] == dict.fromkeys(PROBLEMS, 0), done.stdout + done.stderr
    assert result["totals"]["digests"]["unhealed"] == []
    assert len(result["faults"]) == 6
    assert result["totals"]["digests"]["reports"] > 2 * 6
    assert (done.returncode == 0) == (not result["failures"]), done.stdout
