"""Who is late, whom a peer doubts, and what it measures of the others."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.protocol.rounds.conduct import Conduct, Delivery, late

SLACK_S = 0.25
OTHERS = ("a", "b", "c", "d")


def delivery(contributed_s: float, elements: int = 1_000_000, share: float = 1.0) -> Delivery:
    return Delivery(elements, share, num_bytes=2 * elements * share, contributed_s=contributed_s)


def exchange(
    conduct: Conduct, number: int, pushed_s: dict[str, float], results_s: dict[str, float] | None = None
) -> None:
    conduct.exchanged(
        number,
        {peer: delivery(seconds) for peer, seconds in pushed_s.items()},
        results_s or {},
        usual_s=0.1,
        slack_s=SLACK_S,
        waited_s=2.0,
    )


def in_time(**changes: float) -> dict[str, float]:
    return dict.fromkeys(OTHERS, 0.1) | changes


@given(st.dictionaries(st.text(min_size=1), st.floats(0, 1e6), min_size=1), st.floats(0, 10), st.floats(0, 10))
def test_at_most_half_are_late_and_never_the_median(times_s: dict[str, float], usual_s: float, slack_s: float) -> None:
    found = late(times_s, usual_s, slack_s)
    assert len(found) <= len(times_s) / 2
    assert all(times_s[peer] > 2 * usual_s + slack_s for peer in found)


def test_the_last_of_two_or_more_others_is_late_but_not_the_only_one() -> None:
    assert late({"a": 60.0}, 0.1, SLACK_S) == set()
    assert late({"a": 60.0, "b": 0.1}, 0.1, SLACK_S) == {"a"}
    assert late({"a": math.inf, "b": math.inf, "c": 0.1}, 0.1, SLACK_S) == set()  # this peer may be cut off
    assert late({}, 0.1, SLACK_S) == set()
    assert late({"a": 60.0, "b": 0.1}, 0.1, math.inf) == set()


def test_lateness_is_tolerated_once_in_eight_exchanges_and_clears_itself() -> None:
    conduct = Conduct()
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


def test_who_is_late_as_a_reducer_twice_rests_and_comes_back() -> None:
    conduct = Conduct()
    exchange(conduct, 1, in_time(), in_time(d=5.0))
    assert not conduct.rests("d", 2)
    exchange(conduct, 2, in_time(), in_time(d=5.0))
    resting = [number for number in range(3, 40) if conduct.rests("d", number)]
    assert resting == list(range(3, 18))
    assert not conduct.is_late("d")  # its own work came in time
    again = Conduct()
    for number in (1, 10, 19):  # too seldom
        exchange(again, number, in_time(), in_time(d=5.0))
        assert not again.rests("d", number + 1)


def fail(conduct: Conduct, number: int, peer: str, kind: str) -> None:
    conduct.note_fault(peer, kind, number)
    exchange(conduct, number, in_time())


def test_three_faults_in_eight_exchanges_are_a_reason_for_doubt() -> None:
    conduct = Conduct()
    fail(conduct, 1, "d", "lost")
    fail(conduct, 2, "d", "clipped")
    assert conduct.doubted(3) == set()
    fail(conduct, 3, "d", "clipped")
    assert conduct.doubted(4) == {"d"}
    assert conduct.doubts("d", 4) == ("clipped", "lost")
    for number in range(4, 9):
        exchange(conduct, number, in_time())
        assert conduct.doubted(number) == {"d"}
    exchange(conduct, 9, in_time())
    assert conduct.doubted(10) == set()


def test_several_faults_in_one_round_count_once_and_those_of_a_failed_round_not_at_all() -> None:
    conduct = Conduct()
    for number in (1, 2):
        for kind in ("lost", "missing", "norm"):
            conduct.note_fault("d", kind, number)
        exchange(conduct, number, in_time())
    assert conduct.doubted(3) == set()
    for number in (3, 4, 5):
        conduct.note_fault("d", "lost", number)
        conduct.forget_round()
    exchange(conduct, 6, in_time())
    assert conduct.doubted(7) == set()


@pytest.mark.parametrize("kind", ["push", "pull", "refused", "busy", "round", "version", "duty"])
def test_what_may_be_due_to_the_line_or_to_this_peer_is_no_reason(kind: str) -> None:
    conduct = Conduct()
    for number in range(1, 20):
        fail(conduct, number, "d", kind)
    assert conduct.doubted(20) == set()


def test_a_leader_that_did_not_close_is_doubted_at_once_and_for_long() -> None:
    conduct = Conduct()
    conduct.note_fault("d", "leader", 5)
    assert [number for number in range(5, 100) if conduct.doubted(number) == {"d"}] == list(range(5, 70))
    assert conduct.doubts("d", 6) == ("leader",)


def test_the_pace_is_the_median_member_s_in_the_median_of_three_exchanges() -> None:
    conduct = Conduct()
    assert conduct.pace == 0
    conduct.exchanged(
        1,
        {"a": delivery(0.3), "b": delivery(0.2, 500_000), "c": delivery(9.0), "d": delivery(0.1)},
        {},
        usual_s=0.0,
        slack_s=math.inf,
        waited_s=15.0,
    )
    assert conduct.pace == pytest.approx(0.3)  # of 0.1, 0.3, 0.4 and 9 seconds for 10^6 values
    exchange(conduct, 2, in_time())
    exchange(conduct, 3, in_time())
    assert conduct.pace == pytest.approx(0.1)


def test_when_nobody_comes_in_time_the_next_exchanges_wait_longer() -> None:
    conduct = Conduct()
    for number in range(3):
        exchange(conduct, number, in_time())
    waited_s = 2.0
    for number in range(3, 10):
        conduct.exchanged(
            number,
            {peer: delivery(math.inf, share=0.5) for peer in OTHERS},
            {},
            usual_s=conduct.pace,
            slack_s=SLACK_S,
            waited_s=waited_s,
        )
        waited_s = 4 * conduct.pace
    assert conduct.pace > 60


def test_rates_are_what_arrived_in_the_time_that_it_took() -> None:
    conduct = Conduct()
    assert conduct.rates() == {}
    half = delivery(math.inf, share=0.5)  # a million bytes in two seconds
    conduct.exchanged(1, {"a": delivery(1.0), "b": half}, {}, usual_s=0.5, slack_s=0.1, waited_s=2.0)
    assert conduct.rates() == pytest.approx({"a": 16.0, "b": 4.0})
    nothing = delivery(math.inf, share=0.0)
    conduct.exchanged(2, {"a": nothing}, {}, usual_s=0.5, slack_s=0.1, waited_s=2.0)
    assert conduct.rates() == pytest.approx({"a": 16.0, "b": 4.0})


def test_among_peers_that_take_no_time_nobody_is_faster() -> None:
    conduct = Conduct()
    exchange(conduct, 1, {"a": 0.01, "b": 0.2, "c": 2.0})
    assert conduct.rates() == pytest.approx({"a": 64.0, "b": 64.0, "c": 8.0})


def test_peers_that_differ_by_chance_are_rarely_late_and_never_doubted() -> None:
    """Times of a busy machine: now and then, a peer takes several times as long as the others."""
    rng = random.Random(0)
    conduct, late_rounds = Conduct(), 0
    for number in range(2000):
        exchange(conduct, number, {peer: 0.1 * rng.lognormvariate(0, 0.5) for peer in OTHERS})
        late_rounds += any(conduct.is_late(peer) for peer in OTHERS)
        assert conduct.doubted(number) == set()
    assert late_rounds < 20


def test_identities_without_number_do_not_fill_the_memory() -> None:
    conduct = Conduct()
    for number in range(5000):
        conduct.note_fault(f"peer{number}", "leader", number)
    assert len(conduct.doubted(0)) <= 4096
    assert conduct.doubts("peer4999", 5000) == ("leader",)
