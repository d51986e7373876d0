"""Whose word counts, and how long a round waits for whom. Times are chosen by the tests, in seconds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.protocol.members.reputation import (
    CLOCK_MEMORY_S,
    GRACE_SHARE,
    MAX_NEWCOMERS,
    MAX_PEERS,
    MEMBER_GRACE_S,
    NEWCOMER_SHARE,
    Reputation,
)

WINDOW_S = 10.0
ROUND_S = 4.0


def after_rounds(num_rounds: int, *members: str) -> Reputation:
    """This peer has committed so many rounds of ROUND_S with these members, the last at time 0."""
    reputation = Reputation()
    for i in range(num_rounds):
        reputation.committed((i + 1 - num_rounds) * ROUND_S, members, [])
    return reputation


# Voices.


def newcomer(*told: str) -> Reputation:
    """A peer that has fetched its reference, and committed nothing yet."""
    reputation = Reputation(told)
    reputation.follow()
    return reputation


def test_before_its_first_round_a_newcomer_goes_by_those_that_it_was_told_to_join() -> None:
    reputation = newcomer("told", "gone")
    reputation.note_answer("stranger")
    assert reputation.electorate(["told", "stranger", "silent"]) == {"told"}
    assert reputation.defers(["told", "stranger"])


def test_where_none_of_those_is_left_it_goes_by_those_that_answer() -> None:
    reputation = newcomer("gone")
    reputation.note_answer("a")
    assert reputation.electorate(["a", "silent"]) == {"a"}
    assert not reputation.defers(["a", "silent"])


def test_peers_that_come_back_from_disk_do_not_wait_for_each_other_to_lead() -> None:
    """Each was told of the other; with a reference of its own, neither defers."""
    for me, other in (("a", "b"), ("b", "a")):
        reputation = Reputation([other])
        reputation.note_answer(other)
        reputation.note_answer("c")
        assert not reputation.defers([other, "c"]), me
        assert reputation.electorate([other, "c"]) == {other, "c"}


def test_before_its_first_round_a_peer_takes_the_time_from_those_that_it_was_told_to_join() -> None:
    for reputation in (Reputation(["told"]), newcomer("told")):
        reputation.note_answer("stranger")
        assert reputation.clock_electorate(["told", "stranger"], 0.0) == {"told"}
        assert reputation.clock_electorate(["stranger"], 0.0) == {"stranger"}


def test_a_founder_defers_to_nobody() -> None:
    reputation = Reputation()
    reputation.note_answer("a")
    assert not reputation.defers(["a"])


def test_after_a_common_round_only_members_are_in_the_electorate() -> None:
    reputation = newcomer("told")
    reputation.committed(0.0, ["member"], [])
    reputation.note_answer("stranger")
    assert reputation.electorate(["told", "stranger", "member"]) == {"member"}
    assert not reputation.defers(["told"])


def test_slots_are_reserved_for_members_and_before_the_first_round_for_all_that_answer() -> None:
    for reputation in (Reputation(), newcomer("told")):
        reputation.note_answer("a")
        assert [reputation.reserves_for(peer) for peer in ("a", "silent", "told")] == [True, False, False]
        reputation.committed(0.0, ["member"], [])
        assert [reputation.reserves_for(peer) for peer in ("a", "member", "told")] == [False, True, False]


def test_a_round_that_was_held_alone_makes_no_members() -> None:
    reputation = newcomer("told")
    reputation.committed(0.0, [], ["told"])
    assert reputation.defers(["told"])
    assert reputation.electorate(["told"]) == {"told"}


def test_members_stay_in_the_electorate_through_a_cut_however_long() -> None:
    reputation = after_rounds(1, "a", "b")
    for i in range(1000):
        reputation.committed(i * ROUND_S, ["a"], [])
    assert reputation.electorate(["a", "b"]) == {"a", "b"}


def test_in_what_time_it_is_only_recent_members_have_a_say() -> None:
    reputation = after_rounds(1, "a", "b")
    reputation.committed(100.0, ["a"], [])
    assert reputation.clock_electorate(["a", "b", "stranger"], CLOCK_MEMORY_S) == {"a", "b"}
    assert reputation.clock_electorate(["a", "b", "stranger"], CLOCK_MEMORY_S + 1.0) == {"a"}
    assert reputation.clock_electorate(["b", "stranger"], CLOCK_MEMORY_S + 1.0) == {"b"}  # better than nobody


def test_the_time_is_the_members_and_no_longer_that_of_those_it_was_told_to_join() -> None:
    reputation = newcomer("told")
    reputation.committed(0.0, ["member"], [])
    assert reputation.clock_electorate(["told", "member"], 0.0) == {"member"}


def test_those_heard_of_longest_ago_are_forgotten_first() -> None:
    reputation = Reputation()
    reputation.committed(0.0, [f"m{i}" for i in range(MAX_PEERS)], [])
    for i in range(MAX_PEERS):
        reputation.note_answer(f"a{i}")
    assert reputation.is_member("m0")
    assert reputation.has_answered("a0")
    reputation.committed(1.0, ["new"], [])
    reputation.note_answer("newer")
    assert [reputation.is_member(peer) for peer in ("m0", "m1", "new")] == [False, True, True]
    assert [reputation.has_answered(peer) for peer in ("a0", "a1", "newer")] == [False, True, True]


# Patience.


def test_members_are_waited_for_until_the_window_ends() -> None:
    assert after_rounds(3, "a").wait_times(["a"], WINDOW_S) == {"a": WINDOW_S}


def test_one_missed_round_is_forgiven_and_two_leave_a_grace() -> None:
    reputation = after_rounds(9, "a", "b")
    reputation.committed(ROUND_S, ["a"], ["b"])
    assert reputation.wait_times(["b"], WINDOW_S) == {"b": WINDOW_S}
    reputation.committed(2 * ROUND_S, ["a", "b"], [])
    reputation.committed(3 * ROUND_S, ["a"], ["b"])
    assert reputation.wait_times(["b"], WINDOW_S) == {"b": pytest.approx(GRACE_SHARE * ROUND_S)}


def test_short_rounds_leave_a_late_member_a_quarter_of_a_second() -> None:
    """Identities that have never worked have no such claim."""
    reputation = Reputation()
    reputation.note_answer("stranger")
    for i in range(20):
        reputation.committed(0.5 * i, ["a"], ["b", "stranger"] if i > 10 else [])
        reputation.committed(0.5 * i + 0.25, ["a", "b"], [])
    wait_s = reputation.wait_times(["b", "stranger"], WINDOW_S)
    assert wait_s == {"b": MEMBER_GRACE_S, "stranger": pytest.approx(GRACE_SHARE * 0.25)}


def test_eight_rounds_later_a_member_that_was_late_is_waited_for_again() -> None:
    reputation = after_rounds(2, "a")
    reputation.committed(ROUND_S, [], ["a"])
    reputation.committed(2 * ROUND_S, [], ["a"])
    waits = []
    for i in range(3, 11):
        waits.append(reputation.wait_times(["a"], WINDOW_S)["a"] == WINDOW_S)
        reputation.committed(i * ROUND_S, ["a"], [])
    assert waits == [False] * 7 + [True]


def test_nobody_waits_for_a_record_whose_peer_has_never_answered() -> None:
    assert after_rounds(3, "a").wait_times(["ghost"], WINDOW_S) == {"ghost": 0.0}
    assert Reputation().wait_times(["ghost"], WINDOW_S) == {"ghost": 0.0}


def test_a_newcomer_is_waited_for_once() -> None:
    reputation = after_rounds(9, "a")
    reputation.note_answer("new")
    assert reputation.wait_times(["new"], WINDOW_S) == {"new": pytest.approx(NEWCOMER_SHARE * ROUND_S)}
    for i in range(1, 30):
        reputation.committed(i * ROUND_S, ["a"], ["new"])
        assert reputation.wait_times(["new"], WINDOW_S) == {"new": pytest.approx(GRACE_SHARE * ROUND_S)}
    reputation.committed(30 * ROUND_S, ["a", "new"], [])
    assert reputation.wait_times(["new"], WINDOW_S) == {"new": WINDOW_S}


def test_a_newcomer_that_did_not_come_is_never_waited_for_again() -> None:
    reputation = after_rounds(9, "a")
    reputation.note_answer("new")
    reputation.committed(ROUND_S, ["a"], ["new"])
    for i in range(2, 12):
        reputation.committed(i * ROUND_S, ["a"], [])
    assert reputation.wait_times(["new"], WINDOW_S) == {"new": pytest.approx(GRACE_SHARE * ROUND_S)}


def test_after_one_that_was_waited_for_in_vain_the_next_newcomer_is_eight_rounds_later() -> None:
    reputation = after_rounds(9, "a")
    reputation.note_answer("ghost")
    reputation.committed(ROUND_S, ["a"], ["ghost"])
    reputation.note_answer("new")
    waits = []
    for i in range(2, 12):
        waits.append(reputation.wait_times(["new"], WINDOW_S)["new"] > GRACE_SHARE * ROUND_S)
        reputation.committed(i * ROUND_S, ["a"], [])
    assert waits == [False] * 8 + [True] * 2


def test_a_new_ghost_in_every_round_keeps_no_honest_newcomer_out() -> None:
    reputation = after_rounds(9, "a")
    reputation.committed(ROUND_S, ["a"], [])
    for i in range(2, 30):
        reputation.note_answer(f"ghost{i}")
        if i == 4:
            reputation.note_answer("honest")
        came = reputation.wait_times(["honest"], WINDOW_S)["honest"] > GRACE_SHARE * ROUND_S
        others = ["honest"] if came else []
        ghosts = [f"ghost{j}" for j in range(2, i + 1)]
        reputation.committed(i * ROUND_S, ["a", *others], ghosts if came else [*ghosts, "honest"])
        if came:
            break
    assert 4 < i < 14


def test_before_there_are_members_a_round_waits_for_all_however_short_the_rounds_alone_were() -> None:
    reputation = after_rounds(2)
    reputation.note_answer("first")
    assert reputation.wait_times(["first"], WINDOW_S) == {"first": WINDOW_S}


def test_only_so_many_newcomers_are_waited_for_at_a_time() -> None:
    reputation = after_rounds(9, "a")
    crowd = [f"new{i}" for i in range(3 * MAX_NEWCOMERS)]
    for peer in crowd:
        reputation.note_answer(peer)
    waits = reputation.wait_times(crowd, WINDOW_S)
    assert sum(wait > GRACE_SHARE * ROUND_S for wait in waits.values()) == MAX_NEWCOMERS


def test_who_founds_a_swarm_together_waits_for_all_that_answer() -> None:
    reputation = Reputation()
    for peer in ("b", "c"):
        reputation.note_answer(peer)
    assert reputation.wait_times(["b", "c"], WINDOW_S) == {"b": WINDOW_S, "c": WINDOW_S}


@pytest.mark.slow
@given(
    st.lists(st.lists(st.integers(0, 30), max_size=6), max_size=60),
    st.floats(0.5, 60.0),
)
def test_identities_without_work_cost_rounds_less_than_a_fifth(absent: list[list[int]], round_s: float) -> None:
    """Whatever strangers do, old ones and new ones, as often as they like; what counts is the mean over many rounds."""
    reputation = Reputation()
    now = 0.0
    for _ in range(3):
        reputation.committed(now, ["a"], [])
        now += round_s
    waited = 0.0
    for numbers in absent:
        strangers = [f"s{n}" for n in numbers]
        for stranger in strangers:
            reputation.note_answer(stranger)
        waited += max(reputation.wait_times(strangers, math.inf).values(), default=0.0)
        reputation.committed(now, ["a"], strangers)
        now += round_s  # what a round takes without them: a longer one would only be a larger base
    # A grace in each round, and a newcomer's wait in every ninth, once more than that in a short time.
    assert waited <= round_s * (GRACE_SHARE * len(absent) + NEWCOMER_SHARE * (len(absent) / 9 + 1))


# Peers that only owe.


def test_a_stranger_that_delivers_nothing_twice_is_left_out_of_eight_rounds_and_then_of_twice_as_many() -> None:
    reputation = Reputation()
    left_out = []
    for _ in range(60):
        left_out.append(reputation.leaves_out("stranger"))
        reputation.exchanged((), () if left_out[-1] else {"stranger"})
    assert [index for index, out in enumerate(left_out) if not out] == [0, 1, 10, 27]


def test_one_delivery_clears_a_peer() -> None:
    reputation = Reputation()
    for delivered, idle in ((set(), {"a"}), ({"a"}, set()), (set(), {"a"})):
        reputation.exchanged(delivered, idle)
        assert not reputation.leaves_out("a")


def test_no_round_waits_for_a_peer_that_it_leaves_out() -> None:
    reputation = Reputation()
    reputation.note_answer("stranger")
    assert reputation.wait_times({"stranger"}, 5.0)["stranger"] > 0
    for _ in range(2):
        reputation.exchanged((), {"stranger"})
    assert reputation.wait_times({"stranger"}, 5.0) == {"stranger": 0.0}


def test_idle_strangers_are_remembered_within_bounds() -> None:
    reputation = Reputation()
    for number in range(MAX_PEERS + 10):
        reputation.exchanged((), {f"stranger{number}"})
    assert len(reputation._idle) == MAX_PEERS
