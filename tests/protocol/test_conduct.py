"""Who is late, whom a peer doubts, and what it measures of the others."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.protocol.rounds.conduct import Conduct, Delivery, late

SLACK_S = 0.25
OTHERS = ("a", "b", "c", "d")
TIMES: dict[str, Any] = {"usual_s": 0.1, "slack_s": SLACK_S, "passed_s": 2.0}


def delivery(contributed_s: float, elements: int = 1_000_000, share: float = 1.0) -> Delivery:
    return Delivery(elements, share, num_bytes=2 * elements * share, contributed_s=contributed_s)


def among(others: Iterable[str] = OTHERS) -> Conduct:
    """The record of a peer that exchanges with these."""
    conduct = Conduct()
    conduct.begin(others)
    return conduct


def exchange(
    conduct: Conduct, number: int, pushed_s: dict[str, float], results_s: dict[str, float] | None = None
) -> None:
    conduct.exchanged(
        number,
        {peer: delivery(seconds) for peer, seconds in pushed_s.items()},
        results_s or {},
        trusted=OTHERS,
        **TIMES,
    )


def in_time(**changes: float) -> dict[str, float]:
    return dict.fromkeys(OTHERS, 0.1) | changes


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
        patient.append(conduct.is_patient)
        conduct.exchanged(number, {}, {}, trusted=OTHERS, **TIMES, waited=conduct.is_patient)
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


# Hiding from auditors.


def silent(conduct: Conduct, rounds: Iterable[int], key: bytes = b"key") -> None:
    """Has a peer that has this key show its work of these rounds to nobody."""
    for number in rounds:
        conduct.note_key("d", key)
        conduct.note_silence("d", number, key)


def test_a_peer_hides_after_three_silences_with_the_key_that_it_has() -> None:
    conduct = among()
    silent(conduct, [10, 10, 20])  # a round counts once
    assert not conduct.hides("d", 21)
    assert conduct.doubts("d", 21) == ()
    silent(conduct, [30])
    assert conduct.hides("d", 31)
    assert conduct.doubts("d", 31) == ("audit",)
    assert not conduct.hides("a", 31)
    assert not conduct.hides("somebody", 31)
    assert [number for number in range(31, 200) if conduct.hides("d", number)] == list(range(31, 75))
    assert conduct.doubted(75) == set()


def test_who_crashes_now_and_then_does_not_hide() -> None:
    """A peer that crashes after a commit comes back with another key."""
    conduct = among()
    for crash in range(40):
        silent(conduct, [8 * crash], key=b"%d" % crash)
        assert not conduct.hides("d", 8 * crash + 1)
    restless = among()
    for crash in range(40):
        silent(restless, [7 * crash], key=b"%d" % crash)
        assert restless.hides("d", 7 * crash + 1) == (crash >= 8)


def test_another_key_clears_a_peer_until_it_has_been_silent_nine_times_in_all() -> None:
    conduct = among()
    for restart, key in enumerate((b"first", b"second", b"third")):
        begin = 10 * restart
        silent(conduct, range(begin, begin + 3), key)
        assert conduct.hides("d", begin + 3)
        conduct.note_key("d", b"new")
        assert conduct.hides("d", begin + 3) == (restart == 2)
    assert [number for number in range(23, 200) if conduct.hides("d", number)] == list(range(23, 65))


def test_a_key_that_a_peer_had_before_counts_if_it_has_it_again() -> None:
    conduct = among()
    silent(conduct, [1, 2, 3], b"first")
    silent(conduct, [4], b"second")
    assert not conduct.hides("d", 5)
    conduct.note_key("d", b"first")
    assert conduct.hides("d", 5)


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from([b"x", b"y", b"z"])), max_size=60), st.integers(0, 80))
def test_hiding_is_a_matter_of_two_counts(steps: list[tuple[int, bytes]], later: int) -> None:
    conduct, number, noted = among(), 0, dict[int, bytes]()
    for pause, key in steps:
        number += pause
        silent(conduct, [number], key)
        noted.setdefault(number, key)
    at = number + later
    keys = [key for silence, key in noted.items() if at - silence <= 64]
    assert conduct.hides("d", at) == bool(steps and (keys.count(steps[-1][1]) > 2 or len(keys) > 8))


def test_keys_of_strangers_are_not_remembered() -> None:
    conduct = among()
    for number in range(5000):
        conduct.note_key(f"stranger{number}", b"key")
    assert not conduct._peers


def test_a_silence_counts_unless_all_who_named_the_work_are_liars() -> None:
    """A reducer can name contributions that were never made."""
    conduct = among()
    for number, reducers in enumerate((["a"], ["a"], ["a", "b"])):
        conduct.note_silence("d", number, b"key", reducers)
    assert conduct.hides("d", 3)
    conduct.exclusions.note_lie("a", 1)
    assert not conduct.hides("d", 3)
    conduct.exclusions.pardon("a", 1)
    assert conduct.hides("d", 3)


def test_who_had_no_such_commit_yet_hides_after_nine_rounds() -> None:
    conduct = among()
    conduct.note_silence("d", 0, b"key")
    for number in range(1, 9):
        assert not conduct.hides("d", number)
        conduct.note_silence("d", number, b"")
    assert conduct.hides("d", 9)


# Opposing the others.


def opposing(conduct: Conduct, rounds: Iterable[int], found: Sequence[float] = (1.0,) * 4) -> None:
    """Notes the opposition that was found in the parts of these rounds."""
    for number in rounds:
        conduct.note_opposition("d", number, found)


def test_a_peer_that_opposes_the_others_in_four_rounds_is_doubted_and_ignored_for_64() -> None:
    conduct = among()
    opposing(conduct, (1, 2, 3, 4))
    assert conduct.ignored(5) == set()  # that of round 4 may still be taken back
    assert conduct.doubts("d", 5) == ()
    opposing(conduct, [5], found=[])
    assert conduct.doubts("d", 6) == ("opposition",)
    assert [number for number in range(6, 200) if conduct.ignored(number) == {"d"}] == list(range(6, 70))
    assert not conduct.opposes("a", 6)
    assert not conduct.opposes("somebody", 6)


@pytest.mark.parametrize(
    ("rounds", "found", "opposes"),
    [
        (3, [1.0] * 50, False),  # however many parts
        (15, [1.0], False),  # fewer than sixteen parts
        (16, [1.0], True),
        (100, [0.5] * 4, False),
        (100, [1.0, 1.0, 0.1, 0.0], True),
        (100, [1.0, 1.0, 0.0, 0.0], False),
        (100, [], False),
    ],
)
def test_opposition_counts_on_average_over_many_parts(rounds: int, found: list[float], opposes: bool) -> None:
    conduct = among()
    opposing(conduct, range(1, 1 + rounds), found)
    opposing(conduct, [1 + rounds], found=[])
    assert conduct.opposes("d", rounds + 2) == opposes


def test_what_audits_of_a_round_find_counts_with_what_was_reduced_in_it() -> None:
    conduct = among()
    for number in range(1, 5):
        for _ in range(4):
            opposing(conduct, [number], [1.0])
            assert not conduct.opposes("d", number + 1)
    opposing(conduct, [5], [1.0])
    assert conduct.opposes("d", 6)


def test_only_the_last_sixteen_rounds_count() -> None:
    conduct = among()
    opposing(conduct, (1, 2, 3, 16, 18))
    assert not conduct.opposes("d", 19)
    conduct = among()
    opposing(conduct, (1, 2, 3, 16, 17))
    assert conduct.opposes("d", 18)


def test_a_commit_that_is_taken_back_says_nothing_about_opposition() -> None:
    conduct = among()
    opposing(conduct, (1, 2, 3, 4))
    conduct.note_return(5, b"group", 4)
    opposing(conduct, [6])
    assert not conduct.opposes("d", 7)
    opposing(conduct, [7])
    assert conduct.opposes("d", 8)


def test_a_peer_that_goes_back_to_an_older_round_forgets_what_it_saw_later() -> None:
    conduct = among()
    opposing(conduct, range(100, 104))
    opposing(conduct, range(40, 43))
    assert not conduct.opposes("d", 43)
    conduct = among()
    opposing(conduct, range(100, 105))
    assert conduct.opposes("d", 105)
    assert not conduct.opposes("d", 41)


def test_opposition_is_remembered_and_moves_with_the_rounds() -> None:
    conduct, recalled = among(), among()
    opposing(conduct, (1, 2, 3, 4))
    recalled.recall(conduct.known, 4)
    opposing(recalled, [5])
    assert recalled.opposes("d", 6)
    recalled.recall(conduct.known, 3)  # that of round 4 came after the last commit
    opposing(recalled, [5])
    assert not recalled.opposes("d", 6)
    opposing(conduct, [5])
    recalled.recall(conduct.known, 5)
    recalled.move(100)
    assert [number for number in range(106, 300) if recalled.opposes("d", number)] == list(range(106, 170))


def test_the_graver_of_many_reasons_come_first() -> None:
    """A peer's record has room for two."""
    conduct = among()
    for number in (1, 2, 3):
        conduct.begin(OTHERS)
        conduct.note_fault("d", "clipped")
        exchange(conduct, number, in_time())
    opposing(conduct, (1, 2, 3, 4, 5))
    silent(conduct, (1, 2, 3))
    assert conduct.doubts("d", 6) == ("audit", "opposition", "clipped")
