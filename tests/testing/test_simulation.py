"""The simulator: what must come out where the answer is known, and that a seed decides everything."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import numpy as np
import pytest

from scripts.testing.simulation import Report, Scenario, Simulation, Weibull, traffic
from spes_swarm.protocol.ownership.reassignment import Rules
from spes_swarm.protocol.rounds.plan import Form, make_plan
from spes_swarm.protocol.rounds.statement import Group
from tests.helpers.rounds import small_layout
from tests.helpers.unsigned_groups import group, member

ROOM_FOR_ALL = Scenario(num_peers=12, num_experts=16, duration_s=3600.0, rooms=((4, 1.0),))


def run(scenario: Scenario) -> Report:
    return Simulation(scenario).run()


def test_without_departures_every_expert_is_trained_in_every_round() -> None:
    report = run(replace(ROOM_FOR_ALL, session=None))
    assert report.rounds == 60
    assert report.trained == report.expected == 60 * 16
    assert set(report.ages) == {0}
    assert not report.gained  # joiners have chosen well, and nobody ever moves


@pytest.mark.slow
def test_a_seed_decides_everything() -> None:
    scenario = replace(ROOM_FOR_ALL, session=Weibull(600.0))
    reports = [run(replace(scenario, seed=seed)) for seed in (1, 1, 2)]
    for report in reports:
        report.reassign_s.clear()  # measured, not simulated
    assert reports[0] == reports[1] != reports[2]


@pytest.mark.slow
def test_when_all_leave_in_order_no_expert_misses_a_round() -> None:
    scenario = Scenario(num_peers=40, num_experts=16, duration_s=6 * 3600.0, session=Weibull(600.0), sudden=0.0)
    report = run(scenario)
    assert report.departures["announced"] > 100
    assert min(report.room) >= 16
    assert report.untrained.keys() <= {"holder has just come"}
    assert report.takeovers == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_what_a_dead_peer_held_is_adopted_with_the_first_commit_after_its_lease(seed: int) -> None:
    scenario = Scenario(
        num_peers=24,
        num_experts=16,
        duration_s=6 * 3600.0,
        seed=seed,
        session=Weibull(600.0, 1.0),
        sudden=1.0,
        rooms=((1, 1.0),),
    )
    report = run(scenario)
    prompt = [takeover for takeover in report.takeovers if takeover.had_room]
    assert len(prompt) > 20
    assert max(takeover.waited for takeover in prompt) == 1
    # A lease of two rounds has ended by the third commit, and the adopter has trained by the fourth.
    delayed = [takeover for takeover in prompt if takeover.rounds > 4]
    assert len(delayed) < 0.1 * len(prompt)  # the adopter died, too


def test_experts_take_turns_where_there_is_not_room_for_all() -> None:
    scenario = replace(ROOM_FOR_ALL, num_peers=3, num_experts=30, session=None, rules=Rules(None, 5))
    report = run(replace(scenario, duration_s=4 * 3600.0))
    assert set(report.untrained) == {"no room"}
    assert report.trained == report.possible == 12 * report.rounds
    assert max(report.ages) <= 2 * 5 + 5  # 18 wait for 12 places: at most two turns


@pytest.mark.slow
def test_the_swarm_keeps_its_size() -> None:
    scenario = Scenario(num_peers=60, num_experts=8, duration_s=24 * 3600.0, round_s=600.0, session=Weibull(1800.0))
    report = run(scenario)
    # Some of the members are leaving, and joiners still download.
    assert statistics.fmean(report.peers) == pytest.approx(60, rel=0.15)


def test_half_of_the_swarm_may_die_at_once() -> None:
    scenario = replace(ROOM_FOR_ALL, num_peers=40, session=Weibull(1e9), outage=0.5)
    report = run(scenario)
    assert report.departures["sudden"] >= 10
    assert report.coverage > 0.97
    assert report.peers[-1] < 35


def test_sessions_have_the_median_that_was_asked_for() -> None:
    rng = random.Random(0)
    sessions = [Weibull(1800.0, 0.5).draw(rng) for _ in range(20_000)]
    assert statistics.median(sessions) == pytest.approx(1800.0, rel=0.05)
    assert statistics.fmean(sessions) == pytest.approx(Weibull(1800.0, 0.5).mean_s, rel=0.05)


def test_what_remains_of_a_session_is_longer_than_a_new_one_is() -> None:
    """Renewal theory: the mean of what remains is E[X^2] / (2 E[X])."""
    rng = random.Random(0)
    weibull = Weibull(1800.0, 0.7)
    draws = np.array([weibull.draw(rng) for _ in range(100_000)])
    remaining = [weibull.remaining(rng) for _ in range(100_000)]
    assert statistics.fmean(remaining) == pytest.approx((draws**2).mean() / (2 * draws.mean()), rel=0.05)


def given_group() -> Group:
    layout = small_layout(3)
    at_4 = {"versions": [4] * 4, "digests": [b"\4" * 32] * 4}
    return group(
        [
            member("a", layout, held=[0, 1]),
            member("b", layout, held=[1], bandwidth_mbps=30.0),
            member("c", layout, held=[2], reachable=False),
            member("d", layout, tokens=0, **at_4),
        ]
    )


def test_traffic_is_what_the_members_push_and_want() -> None:
    plan = make_plan(given_group(), small_layout(3), 50)
    sent, received = np.zeros((2, 4))
    for sender in range(4):
        for reducer in range(4):
            for part, contribution in plan.contributed(sender, reducer) if sender != reducer else []:
                size = part.size * (2 if contribution.form is Form.DELTA else 4)
                sent[sender] += size
                received[reducer] += size
        for part in plan.wanted(sender):
            if part.reducer != sender:
                size = part.size * (2 if plan.block_of(part).result_form(sender) is Form.DELTA else 4)
                sent[part.reducer] += size
                received[sender] += size
    assert [list(side) for side in traffic(plan, 2.0)] == [list(sent), list(received)]
