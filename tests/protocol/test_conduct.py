"""Who is late, whom a peer doubts, and what it measures of the others."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.protocol.rounds.conduct import Conduct, late
from tests.helpers.conducted import OTHERS, SLACK_S, TIMES, among, delivery, exchange, in_time


@given(st.dictionaries(st.text(min_size=1), st.floats(0, 1e6), min_size=1), st.floats(0, 10), st.floats(0, 10))
def test_at_most_half_are_late_and_never_the_median(times_s: dict[str, float], usual_s: float, slack_s: float) -> None:
    found = late(times_s, times_s, usual_s, slack_s)
    assert len(found) <= len(times_s) / 2
    assert all(times_s[peer] > 2 * usual_s + slack_s for peer in found)


def test_the_last_of_two_or_more_others_is_late_but_not_the_only_one() -> None:
    assert late({"a": 60.0}, OTHERS, 0.1, SLACK_S) == set()
    assert late({"a": 60.0, "b": 0.1}, OTHERS, 0.1, SLACK_S) == {"a"}
    assert late({"a": math.inf, "b": math.inf, "c": 0.1}, OTHERS, 0.1, SLACK_S) == set()  # this peer may be cut off
    assert late({}, OTHERS, 0.1, SLACK_S) == set()
    assert late({"a": 60.0, "b": 0.1}, OTHERS, 0.1, math.inf) == set()
    strangers = {f"stranger{i}": math.inf for i in range(9)}
    assert late({"a": 60.0, "b": 0.1, **strangers}, OTHERS, 0.1, SLACK_S) == {"a", *strangers}
    assert late(strangers, OTHERS, 0.1, SLACK_S) == set()


def test_lateness_is_tolerated_once_in_eight_exchanges_and_clears_itself() -> None:
    conduct = among()
    exchange(conduct, 1, in_time(d=5.0))
    assert not conduct.is_late("d")
    for number in range(2, 9):
        exchange(conduct, number, in_time())
    exchange(conduct, 9, in_time(d=5.0))
    assert not conduct.is_late("d")
    exchange(conduct, 10, in_time(d=math.inf))
    assert conduct.is_late("d")
    for number in range(11, 18):
        assert conduct.is_late("d")
        exchange(conduct, number, in_time())
    assert not conduct.is_late("d")
    assert not any(conduct.is_late(peer) for peer in ("a", "b", "c", "somebody"))


def test_who_is_late_as_a_reducer_three_times_rests_and_comes_back() -> None:
    conduct = among()
    for number in (1, 2, 3):
        assert not conduct.resting(number)
        exchange(conduct, number, in_time(), in_time(d=5.0))
    assert [number for number in range(4, 40) if conduct.resting(number) == {"d"}] == list(range(4, 19))
    assert not conduct.is_late("d")  # its own work came in time
    again = among()
    for number in (1, 5, 9, 13, 17):  # too seldom
        exchange(again, number, in_time(), in_time(d=5.0))
        assert not again.resting(number + 1)


def test_a_reducer_waits_in_two_of_eight_exchanges() -> None:
    """It would be late itself otherwise, and rest for the delays of others."""
    conduct = among()
    patient = []
    for number in range(20):
        patient.append(conduct.may_wait)
        conduct.exchanged(number, {}, {}, trusted=OTHERS, **TIMES, waited=conduct.may_wait)
    assert patient == ([True] * 2 + [False] * 7) * 2 + [True] * 2


def fail(conduct: Conduct, number: int, peer: str, kind: str) -> None:
    conduct.note_fault(peer, kind)
    exchange(conduct, number, in_time())


def test_three_faults_in_eight_exchanges_are_a_reason_for_doubt() -> None:
    conduct = among()
    fail(conduct, 1, "d", "lost")
    fail(conduct, 2, "d", "clipped")
    assert conduct.doubted(3) == set()
    fail(conduct, 3, "d", "clipped")
    assert conduct.doubted(4) == {"d"}
    assert conduct.doubts("d", 4) == ("clipped", "lost")
    assert [number for number in range(4, 20) if conduct.doubted(number) == {"d"}] == list(range(4, 10))


def test_several_faults_in_one_round_count_once_and_those_of_a_failed_round_not_at_all() -> None:
    conduct = among()
    for number in (1, 2):
        for kind in ("lost", "missing", "norm"):
            conduct.note_fault("d", kind)
        exchange(conduct, number, in_time())
    assert conduct.doubted(3) == set()
    for _ in range(3):
        conduct.note_fault("d", "lost")
        conduct.begin(OTHERS)
    exchange(conduct, 6, in_time())
    assert conduct.doubted(7) == set()


@pytest.mark.parametrize("kind", ["push", "pull", "late", "refused", "busy", "round", "version", "duty"])
def test_what_may_be_due_to_the_line_or_to_this_peer_is_no_reason(kind: str) -> None:
    conduct = among()
    for number in range(1, 20):
        fail(conduct, number, "d", kind)
    assert conduct.doubted(20) == set()


def test_a_leader_that_did_not_close_two_groups_is_doubted_for_long() -> None:
    conduct = among()
    for _ in range(3):
        conduct.note_stall("d", 5)  # several attempts at one round
    assert conduct.doubted(6) == set()
    conduct.note_stall("d", 9)
    assert [number for number in range(9, 100) if conduct.doubted(number) == {"d"}] == list(range(9, 70))
    assert conduct.doubts("d", 10) == ("leader",)


def test_whoever_finds_fault_with_half_of_the_others_may_be_cut_off() -> None:
    conduct = among()
    for number in range(1, 9):
        for peer in ("a", "b"):
            conduct.note_fault(peer, "missing")
        exchange(conduct, number, in_time())
    assert conduct.doubted(9) == set()


def test_rounds_without_experts_say_nothing_about_those_with_them() -> None:
    conduct = among()
    for number in range(12):
        elements, seconds = (1_000_000, 1.0) if number % 4 == 0 else (10_000, 0.1)
        deliveries = {peer: delivery(seconds, elements) for peer in OTHERS}
        conduct.exchanged(number, deliveries, {}, trusted=OTHERS, **TIMES)
    assert conduct.pace == pytest.approx(1.0)


def test_the_pace_is_the_median_member_s_in_the_median_of_three_exchanges() -> None:
    conduct = among()
    assert conduct.pace == 0
    conduct.exchanged(
        1,
        {"a": delivery(0.3), "b": delivery(0.2, 500_000), "c": delivery(9.0), "d": delivery(0.1)},
        {},
        trusted=OTHERS,
        usual_s=0.0,
        slack_s=math.inf,
        passed_s=15.0,
    )
    assert conduct.pace == pytest.approx(0.3)  # of 0.1, 0.3, 0.4 and 9 seconds for 10^6 values
    exchange(conduct, 2, in_time())
    exchange(conduct, 3, in_time())
    assert conduct.pace == pytest.approx(0.1)


def test_when_nobody_comes_in_time_the_next_exchanges_wait_longer() -> None:
    conduct = among()
    for number in range(3):
        exchange(conduct, number, in_time())
    passed_s = 2.0
    for number in range(3, 10):
        nobody = {peer: delivery(math.inf, share=0.5) for peer in OTHERS}
        times: dict[str, Any] = {"usual_s": conduct.pace, "slack_s": SLACK_S, "passed_s": passed_s}
        conduct.exchanged(number, nobody, {}, trusted=OTHERS, **times)
        passed_s = 4 * conduct.pace
    assert conduct.pace > 60


def test_rates_are_what_arrived_in_the_time_that_it_took() -> None:
    conduct = among()
    assert conduct.rates() == {}
    half = delivery(math.inf, share=0.5)  # a million bytes in two seconds
    conduct.exchanged(1, {"a": delivery(1.0), "b": half}, {}, trusted=OTHERS, **TIMES)
    assert conduct.rates() == pytest.approx({"a": 16.0, "b": 4.0})
    nothing = delivery(math.inf, share=0.0)
    conduct.exchanged(2, {"a": nothing}, {}, trusted=OTHERS, **TIMES)
    assert conduct.rates() == pytest.approx({"a": 16.0, "b": 4.0})


def test_among_peers_that_take_no_time_nobody_is_faster() -> None:
    conduct = among()
    exchange(conduct, 1, {"a": 0.01, "b": 0.2, "c": 2.0})
    assert conduct.rates() == pytest.approx({"a": 64.0, "b": 64.0, "c": 8.0})


def test_peers_that_differ_by_chance_are_rarely_late_and_never_doubted() -> None:
    """Times of a busy machine: now and then, a peer takes several times as long as the others."""
    rng = random.Random(0)
    conduct, late_rounds = among(), 0
    for number in range(2000):
        exchange(conduct, number, {peer: 0.1 * rng.lognormvariate(0, 0.5) for peer in OTHERS})
        late_rounds += any(conduct.is_late(peer) for peer in OTHERS)
        assert conduct.doubted(number) == set()
    assert late_rounds < 20


def test_countless_identities_do_not_fill_the_memory_or_push_out_who_is_known() -> None:
    conduct = among()
    for number in (1, 2, 3):
        for i in range(5000):
            conduct.note_fault(f"stranger{number}-{i}", "malformed")
        conduct.note_fault("d", "lost")
        assert conduct._faults == {"d": "lost"}
        exchange(conduct, number, in_time())
    assert conduct.doubted(4) == {"d"}
    for number in range(5000):
        conduct.note_stall(f"peer{number}", 1)
    assert len(conduct._peers) <= 4096


def test_the_pace_is_that_of_trusted_members_and_faults_of_others_are_forgotten() -> None:
    slow = {f"stranger{i}": delivery(math.inf, share=0.0) for i in range(9)}
    conduct = among(["a", *slow])
    for number in range(1, 4):
        for peer in ("stranger0", "elsewhere"):
            conduct.note_fault(peer, "lost")
        conduct.exchanged(number, {"a": delivery(0.1), **slow}, {}, trusted=["a"], **TIMES)
    assert conduct.pace == pytest.approx(0.1)
    assert conduct.doubted(4) == {"stranger0"}  # of those that were not in the exchange, nothing is remembered


def test_half_of_those_that_reduced_in_a_harmful_commit_rest_for_a_while() -> None:
    members = [among(), among(("x",))]  # what else they know makes no difference
    for conduct in members:
        conduct.note_commit(OTHERS)
        conduct.note_return(10, b"group", 9)
    resting = members[0].resting(11)
    assert len(resting) == 2
    assert members[1].resting(11) == resting
    assert members[0].resting(25) == resting
    assert not members[0].resting(26)
    assert not members[0].doubted(11)


def test_a_return_does_not_end_a_rest_that_was_earned_otherwise() -> None:
    conduct = among()
    for number in range(3):
        exchange(conduct, number, in_time(), in_time(a=9.0))
    assert conduct.resting(10) == {"a"}
    conduct.note_commit("bcd")
    conduct.note_return(4, b"group", 3)
    assert "a" in conduct.resting(10)
    assert len(conduct.resting(10)) == 3


@pytest.mark.parametrize(
    ("number", "liars", "useful"), [(5, 1, 0.6), (10, 1, 0.9), (10, 2, 0.9), (10, 3, 0.75), (20, 4, 0.9)]
)
def test_liars_soon_reduce_nothing(number: int, liars: int, useful: float) -> None:
    """Each commit in which one of them reduces does harm, and is taken back."""
    names = [f"peer{i}" for i in range(number)]
    for first in range(3):
        hostile, conduct = {names[(first + i) % number] for i in range(liars)}, among(names)
        stood, at = 0, 1
        while at < 600:
            reducers = {name for name in names if name not in conduct.resting(at)} or {*names}
            conduct.note_commit(reducers)
            at += 1
            if reducers & hostile:
                conduct.note_return(at, b"group %d" % at, at - 1)
                at += 1
            else:
                stood += 1
        assert stood > useful * 600
